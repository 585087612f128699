"""Graph breaks: parse torch's reports, list each place once, and explain the cause and the fix.

torch gives the kind of a break, an explanation and a context. The rules below are searched in order over these three;
the first match gives cause and fix. If none matches, torch's own explanation and first useful hint are shown.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from .places import (
    Place,
    definition,
    innermost,
    is_installed,
    is_ours_or_torch,
    library_called,
    read_stack,
    with_source,
)
from .rows import Break

_HEADER = re.compile(r"^Graph [Bb]reak.* in user code at (.+):(\d+)$", re.MULTILINE)
_SKIPS = re.compile(r"[Ss]kipping the (?:function|frame)|results in a skip|skipping the rest of the function")
_LINK = re.compile(r"please visit: (\S+)")
_INDENT = "  "

_REPLACEMENTS = (
    (r"flash_mla", "torch.ops.dsv4.sparse_mla_decode or sparse_mla_prefill"),
    (r"deep_gemm", "torch.ops.dsv4.fp8_linear, fp8_grouped_einsum or indexer_logits_topk"),
    (r"hadamard", "hadamard=True of torch.ops.dsv4.indexer_q_rope_quant"),
    (r"flashinfer|vllm|aiter|sgl_kernel|sgl_kernels|tilelang", "the op of torch.ops.dsv4 that does the same"),
)
"""Packages of DeepSeek-V4 kernels that Dynamo cannot trace, and the ops that replace them."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """A pattern searched in "kind, explanation, context"; groups of the match fill the `{0}` fields of both texts."""

    pattern: str
    cause: str
    fix: str


_KEEP_A_TENSOR = (
    "keep it a tensor: dsv4 ops take lengths, positions and slots as tensors; a number that Python must have is "
    "computed before the call and passed in"
)
_OUTSIDE = "do it before or after the compiled function and pass the result in"

_RULES = (
    _Rule(
        r"recompile limit|cache limit",
        "the function was compiled too often; from now on it runs eagerly for new values",
        "remove the recompiles listed below",
    ),
    _Rule(
        r"\bbuiltin `?print`?\b|builtin `print`",
        "print() needs Python, so the graph ends before it",
        "remove it, or print the result after the call; torch._dynamo.config.reorderable_logging_functions.add(print) "
        "moves prints to the end of the graph",
    ),
    _Rule(
        r"\bbuiltin `?(open|input|exec|eval|__import__)`?\b",
        "{0}() needs Python, so the graph ends before it",
        _OUTSIDE,
    ),
    _Rule(
        r"[Ll]ogging\.Logger|LoggingLogger|logging/__init__|qualname: (?:Logger|getLogger|info|warning|debug)\b",
        "a logging call needs Python, so the graph ends before it",
        "guard it with `if not torch.compiler.is_compiling():`, or add the method to "
        "torch._dynamo.config.ignore_logging_functions",
    ),
    _Rule(
        r"qualname: warn\b",
        "warnings.warn needs Python, so the graph ends before it",
        "guard it with `if not torch.compiler.is_compiling():`, or warn where the module is built",
    ),
    _Rule(
        r"[Dd]ata-dependent (?:branching|assertion)|attempted to jump with",
        "`if`, `while` or `assert` depends on the value of a tensor, which is not known while tracing",
        "choose without branching: torch.where(condition, a, b), or torch.cond for large bodies; for absent tokens "
        "pass slot -1 or length 0, which dsv4 ops skip by themselves",
    ),
    _Rule(
        r"Tensor\.item\(\)|_local_scalar_dense|Tensor\.(?:tolist|numpy)\b|[Dd]ynamic slicing|non-scalar tensor",
        "Python reads a value out of a tensor (item(), int(), float(), tolist(), a tensor as index or slice bound)",
        _KEEP_A_TENSOR,
    ),
    _Rule(
        r"Dynamic shape operator[\s\S]*?Operator `([\w.:]+)`",
        "the size of the result of {0} depends on values (nonzero, unique, x[mask])",
        "use a fixed capacity: torch.where(mask, x, 0), topk(k), or index rows of full width that end in -1",
    ),
    _Rule(
        r"Data dependent operator[\s\S]*?Operator `([\w.:]+)`",
        "{0} returns a number that depends on values",
        _KEEP_A_TENSOR,
    ),
    _Rule(r"\(reason: E\d{3}: ([^:\n]+): ([^\n]+)\)", "{0}", "{1}"),  # of a function of this package
    _Rule(
        r"torch\.compiler\.disable",
        "the function called here is marked torch.compiler.disable",
        "remove the mark if the function can be traced now; otherwise make it an op with torch.library.custom_op and "
        "register_fake",
    ),
    _Rule(
        r"_dynamo\.(?:graph_break|skip_frame|step_unsupported)\(\)",
        "the code asks for a graph break here",
        "remove the call",
    ),
    _Rule(
        r"\[(E\d{3})\] ([^\n]+)",
        "a dsv4 op rejects its arguments: {1}",
        "`dsv4 explain {0}` shows the rule; the detail below shows the arguments",
    ),
    _Rule(
        r"making fake tensor call|fake tensor propagation|Fake tensor propagation|with fake tensors|a meta kernel",
        "an op cannot compute the shape of its result, or rejects its arguments, while tracing",
        "register a fake with torch.library.register_fake; if it has one, call it eagerly to see the error",
    ),
    _Rule(
        r"context manager|GenericContextWrapping|record_function escaped",
        "the graph would have to end inside a `with` block whose context manager torch cannot exit and enter again",
        "enter it around the compiled call, or remove the break inside the block; torch.no_grad, inference_mode and "
        "autocast are fine",
    ),
    _Rule(
        r"[Aa]ttempt to trace generator|[Ff]unction is a generator|async|coroutine|SEND with bad type",
        "torch does not compile generators and coroutines",
        "compile the function that does the work and call it from the generator",
    ),
    _Rule(
        r"Tensor\.backward|autograd\.(?:grad|backward)|requires_grad_\(\)",
        "gradients are computed inside the compiled function",
        "dsv4 ops are for inference: call under torch.inference_mode() and keep gradients out of the function",
    ),
    _Rule(
        r"deepcopy",
        "copy.deepcopy of a tensor",
        "use tensor.clone()",
    ),
    _Rule(
        r"wrap (RNN, GRU,? (?:or|and) LSTM|sparse Tensor|strided NestedTensor)",
        "torch.compile does not support {0}",
        "use dense tensors and other layers, or wrap it in a custom op",
    ),
    _Rule(
        r"nn\.Parameter\(\)",
        "a parameter is created inside the function",
        "create parameters where the module is built",
    ),
    _Rule(
        r"[Oo]bserved exception[\s\S]*?raised exception ([A-Za-z_]\w*)",
        "the code raises {0} while it is traced",
        "call it eagerly to see whether it raises there too; raise from shapes, dtypes and arguments only",
    ),
    _Rule(
        r"class definition|LOAD_BUILD_CLASS|__build_class__",
        "a class is defined inside the function",
        "define it at module level",
    ),
    _Rule(
        r"Reconstruction failure",
        "an object made before a graph break is used after it, and torch cannot rebuild it",
        "remove the break nearby, or make the object outside the compiled function",
    ),
    _Rule(
        r"torch\._numpy",
        "a numpy call that torch cannot translate",
        "use the equivalent torch function, or compute it before the call and pass the result in",
    ),
    _Rule(r"[Ii]mport failure|Bad import result", "an import inside the function fails", "import at module level"),
)

_GENERAL_RULES = (
    _Rule(
        r"builtin operator `(\w+)` with argument types \[[^\]]*Tensor",
        "{0}() of a tensor needs its value",
        _KEEP_A_TENSOR,
    ),
    _Rule(r"builtin operator `(\w+)`", "torch cannot trace {0}() of these arguments", _OUTSIDE),
    _Rule(r"trace method `__new__` of class `type`", "torch cannot create an object of this class", _OUTSIDE),
    _Rule(r"trace method `(\w+)` of class `([^`]+)`", "torch cannot trace the method {0} of {1}", _OUTSIDE),
    _Rule(r"ops that return a non-Tensor", "a function of torch that returns no tensor is called", _OUTSIDE),
    _Rule(r"Tensor repr", "the text of a tensor needs its value", _OUTSIDE),
    _Rule(r"C/C\+\+", "C code is called, which torch cannot trace", _OUTSIDE),
)
"""Rules for breaks that no rule above and no library call explains."""

_C_FUNCTION = re.compile(r"module: (\S+?), qualname: (\S+?),|builtin `([\w.]+?)\.?`")
_SKIPPED_FUNCTION = re.compile(r"function `([^`]+)`[\s\S]*should not be traced")
_USELESS_HINT = re.compile(
    r"[Pp]lease (?:report|file)|[Ff]ile an issue|report an issue|may have been caused by|graph break is fundamental"
)
_HF_MODEL = re.compile(r"transformers[/\\]models[/\\]deepseek_v4")


@dataclass(frozen=True, slots=True)
class RawBreak:
    """One of torch's reports of a break: its texts, and the user's stack, outermost call first."""

    kind: str
    explanation: str
    context: str
    hints: list[str]
    whole_function: bool
    stack: list[Place]
    link: str
    detail: str


def parse_break(text: str) -> RawBreak:
    """Parse torch's report of a break: header, reason, explanation, hints, context, and the user's stack."""
    body, _, tail = text.partition("User code traceback:")
    stack_text = tail.partition("\nTraceback (most recent call last)")[0]
    if not tail:
        stack_text = text.partition("following user code:")[2].partition("\nTraceback (most recent call last)")[0]
    stack = read_stack(stack_text)
    header = _HEADER.search(body)
    if header and not (stack and (stack[-1].file, stack[-1].line) == (header[1], int(header[2]))):
        stack.append(Place(header[1], int(header[2])))
    reason = body.partition("Graph Break Reason:")[2].partition("*** While handling")[0]
    kind, explanation, hints, context = parse_reason(reason)
    link = _LINK.search(reason)
    return RawBreak(
        kind=kind or _last_line(text),
        explanation=explanation,
        context=context,
        hints=hints,
        whole_function=_SKIPS.search(body) is not None,
        stack=stack,
        link=link[1] if link else "",
        detail=reason.strip(),
    )


def parse_reason(reason: str) -> tuple[str, str, list[str], str]:
    """Return kind, explanation, hints and context of a reason. The kind is the line above "Explanation:"."""
    head, _, rest = reason.partition("Explanation:")
    lines = [line.strip() for line in head.splitlines() if line.strip()]
    kind = lines[-1] if lines else ""
    rest, _, context = rest.partition("Developer debug context:")
    explanation, *hints = re.split(r"\n\s*Hint: ", rest)
    context = context.partition("\n\n")[0]
    return kind, explanation.strip(), [" ".join(hint.split()) for hint in hints], context.strip()


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line and not line.startswith(_INDENT)]
    return lines[-1] if lines else "graph break"


def collect(raw: Iterable[RawBreak], limits: Iterable[Place] = ()) -> list[Break]:
    """Return one row for each place and cause: functions that run eagerly first, then the most frequent.

    `limits` are functions that have reached torch's recompile limit.
    """
    breaks: dict[tuple[str, int, str], Break] = {}
    for new in [*map(_row, raw), *map(_row_at_limit, limits)]:
        row = breaks.setdefault((new.place.file, new.place.line, new.cause), new)
        if row is not new:
            row.seen += 1
            row.scope = "function" if "function" in (row.scope, new.scope) else "break"
    return sorted(breaks.values(), key=lambda b: (b.scope != "function", -b.seen))


def _row(raw: RawBreak) -> Break:
    location = innermost(raw.stack)
    library = library_called(raw.stack, location)
    cause, fix = explain_break(raw.kind, raw.explanation, raw.context, raw.hints, location.file, library)
    caller = None
    if is_installed(location.file):
        callers = [frame for frame in raw.stack if not is_installed(frame.file) and not is_ours_or_torch(frame.file)]
        caller = with_source(callers[-1]) if callers else None
    return Break(
        place=with_source(location),
        kind=raw.kind,
        cause=cause,
        fix=fix,
        scope="function" if raw.whole_function else "break",
        called_from=caller,
        stack=[f"{frame.file}:{frame.line} in {frame.function}" for frame in raw.stack],
        detail=raw.detail,
        link=raw.link,
    )


def _row_at_limit(place: Place) -> Break:
    kind = "Dynamo recompile limit exceeded"
    cause, fix = explain_break(kind, "", "", [], place.file)
    return Break(definition(place), kind, cause, fix, scope="function")


def explain_break(
    kind: str, explanation: str, context: str, hints: list[str], file: str, library: str = ""
) -> tuple[str, str]:
    """Return cause and fix of a break.

    Args:
        kind, explanation, context, hints: torch's name, explanation, developer context and hints.
        file: the file of the break; Hugging Face's DeepSeek-V4 code has a separate fix.
        library: the standard-library module that the line calls, if torch stopped inside it.
    """
    into_library = f"the call goes into {library} of the standard library, which torch cannot trace"
    cause, fix = (
        _by_rule(_RULES, f"{kind}\n{explanation}\n{context}")
        or _c_function(explanation, context)
        or ((into_library, _OUTSIDE) if library else None)
        or _by_rule(_GENERAL_RULES, explanation)
        or ("", "")
    )
    cause = cause or _first_sentence(explanation) or kind
    fix = fix or next((hint for hint in hints if not _USELESS_HINT.search(hint)), "")
    if _HF_MODEL.search(file):
        fix = "dsv4_compile.hf.convert(model, max_batch_size=..., max_seq_len=...) replaces this code by traceable code"
    return cause, fix or "move the line out of the compiled function, or wrap it with torch.library.custom_op"


def _by_rule(rules: tuple[_Rule, ...], text: str) -> tuple[str, str] | None:
    for rule in rules:
        match = re.search(rule.pattern, text)
        if match:
            return rule.cause.format(*match.groups()), rule.fix.format(*match.groups())
    return None


def _c_function(explanation: str, context: str) -> tuple[str, str] | None:
    """Return cause and fix of a call that torch does not trace: C code, an extension, a function it is told to skip."""
    if "C/C++" in explanation or "likely a C extension" in context:
        match = _C_FUNCTION.search(context) or _C_FUNCTION.search(explanation)
        if match is None:
            return None
        module, name, dotted = match.groups()
        called = dotted or f"{module}.{name}"
        cause = f"{called} is C code, which torch cannot trace"
        for pattern, replacement in _REPLACEMENTS:
            if re.search(pattern, called):
                return cause, f"call {replacement}, which traces, or wrap it with torch.library.custom_op"
        package = called.split(".")[0].lstrip("_")
        if package == "torch" or package in {name.lstrip("_") for name in sys.stdlib_module_names}:
            return cause, _OUTSIDE
        return cause, "make it an op with torch.library.custom_op and register_fake, so that it stays in the graph"
    skipped = _SKIPPED_FUNCTION.search(explanation)
    if skipped:
        return f"torch is told not to trace {skipped[1]}", _OUTSIDE
    return None


def _first_sentence(text: str) -> str:
    flat = " ".join(text.split())
    return re.split(r"(?<=[.!?]) ", flat, maxsplit=1)[0].rstrip(".")
