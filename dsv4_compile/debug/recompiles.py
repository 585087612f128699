"""Recompiles: the guard of a function that failed, the values, and how to avoid it.

torch reports as text the first guard that failed of each compiled version of a function. `explain_guard` turns one such
text into a `FailedGuard`; those of one function with the same `key` become one row of the report.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .places import Place, definition
from .rows import Recompile

_VALUE_LENGTH = 40


@dataclass(frozen=True, slots=True)
class FailedGuard:
    """One failed guard. `expected` and `actual` are "" where neither torch nor the frame shows them."""

    key: str
    guard: str
    cause: str
    fix: str
    expected: str = ""
    actual: str = ""


@dataclass(frozen=True, slots=True)
class RawRecompile:
    """One recompile: torch's name of the new version, and the failed guard of the newest version before it."""

    compile_id: str
    failed: FailedGuard


_SIZE_FIX = (
    "torch._dynamo.mark_dynamic({name}, {dim}) before the first call, for a token dimension; a cache is allocated "
    "once, at its full size"
)
_HF_CACHE = re.compile(r"past_key_values|\['cache'\]\.layers\b")
"""Names of tensors in a cache of transformers, up to 5.23 and from 5.24 on."""
_HF_CACHE_FIX = (
    "transformers' own cache grows with every call: dsv4_compile.hf.convert(model, max_batch_size=..., "
    "max_seq_len=...) gives the model one that does not"
)
_ZERO_ONE_FIX = "torch always compiles sizes 0 and 1 separately: pad to 2, or accept one extra graph"
_PROPERTY_FIX = {
    "dtype": "pass one dtype: convert where the tensor is made",
    "device": "pass tensors of one device",
    "stride": "pass one memory layout: call .contiguous() where the tensor is made",
    "rank": "pass one number of dimensions: reshape where the tensor is made",
    "requires_grad": "call under torch.inference_mode(), or detach the tensor",
    "dispatch key set": "call under one mode, torch.inference_mode() for all calls or for none",
}
_PRESENCE_FIX = "always pass a tensor: an empty one, or one filled with -1, instead of None"
_CONSTANT_FIX = {
    "int": "pass it as a tensor, or accept one recompile: from its second value on torch keeps an int argument dynamic",
    "float": "pass it as a tensor",
    "other": "expect one graph for each value, or compile one function for each",
}
_ATTRIBUTE_FIX = (
    "keep what changes from call to call in a tensor buffer instead of a Python attribute; "
    "torch._dynamo.config.allow_unspec_int_on_nn_module = True makes int attributes dynamic"
)
_OBJECT_FIX = "create the object once and pass the same one to every call"
_RELATION_FIX = (
    "sizes that were equal, or divisible, in earlier calls are not now: mark those dims dynamic before the first call, "
    "or pad to a fixed set of sizes"
)

_TYPE_FIX = "pass values of one type"
_IDENTITY = re.compile(r"___check_(obj|type)_id\(([^,]+), \d+\)(?:, type=<class '(.+?)'>)?")

_MISMATCH = re.compile(
    r"tensor '(.+?)' ([\w ]+?) mismatch(?: at index (\d+))?\.? ?(?:expected (.*?))?(?:, actual (.*))?$"
)
_NOT_A_TENSOR = re.compile(r"expected type of '(.+?)' to be .*?,[ ']*but found <class '(.+)'>$")
_LENGTH = re.compile(r"len\((.+)\) == (\d+)")
_EQUAL = re.compile(r"^([^=<>!]+?) == (.+)$")
_PRESENCE = re.compile(r"^(.+?) is (not )?None$")
_SIZE_TERM = re.compile(r"[\w.]+\.size\(\)\[\d+\]")
_SIZES = re.compile(r"\.(?:size|stride)\(\)|\b(?:Ne|Eq|Mod)\(|[<>]=?")


def collect(
    raw: Iterable[RawRecompile], functions: Mapping[str, Place], limits: Iterable[Place] = ()
) -> list[Recompile]:
    """Return one row for each function and guarded value, functions at their recompile limit first, then by count.

    `functions` has the function of each compile id, `limits` those that have reached torch's recompile limit.
    """
    rows: dict[tuple[str, int, str], Recompile] = {}
    at_limit = {(location.file, location.line) for location in limits}
    for item in raw:
        location, failed = _function_of(item.compile_id, functions), item.failed
        key = (location.file, location.line, failed.key)
        row = rows.get(key)
        if row is None:
            row = Recompile(definition(location), failed.guard, failed.cause, failed.fix, count=0)
            row.limit_hit = (location.file, location.line) in at_limit
            rows[key] = row
        row.count += 1
        row.values += [v for v in dict.fromkeys((failed.expected, failed.actual)) if v and v not in row.values]
    return sorted(rows.values(), key=lambda r: (not r.limit_hit, -r.count))


def _function_of(compile_id: str, functions: Mapping[str, Place]) -> Place:
    """Return the function of a compilation. A failed one is not in `functions`, but an earlier version of it is."""
    function = compile_id.split("/")[0]
    known = [function_place for name, function_place in functions.items() if name.split("/")[0] == function]
    return functions.get(compile_id) or (known[0] if known else Place())


def split_reason(reason: str) -> tuple[str, str]:
    """Return compile id and guard of one of torch's reasons, "0/1: x.size()[0] == 4   # user code"."""
    head, _, rest = reason.partition(": ")
    guard = rest.split("\nUser stack trace:")[0]
    return head, re.split(r"\s{2,}#", guard, maxsplit=1)[0].strip()


def explain_guard(guard: str, frame: Mapping[str, Any] | None = None) -> FailedGuard:
    """Explain `guard`. `frame` holds the variables of the call that failed it; the actual value is read from them."""
    frame = frame or {}
    for reader in (_tensor_property, _presence, _mode, _aliases, _identity, _length, _relation, _constant):
        failed = reader(guard, frame)
        if failed is not None:
            return failed
    return FailedGuard(guard, guard, f"`{guard}` no longer holds", "make all calls satisfy the guard")


def _tensor_property(guard: str, frame: Mapping[str, Any]) -> FailedGuard | None:
    match = _MISMATCH.search(guard)
    if match is None:
        return None
    name, what, dim, expected, actual = (group or "" for group in match.groups())
    expected = expected.split("=")[-1]
    if what == "requires_grad" and not actual:
        actual = str(int(expected in ("0", "False")))
    key = f"{name} {what} {dim}"
    if what != "size":
        fix = _PROPERTY_FIX.get(what, "pass tensors that agree in it")
        dim_text = f" of dim {dim}" if dim else ""
        return FailedGuard(key, guard, f"the {what}{dim_text} of `{name}` changed", fix, expected, actual)
    fix = _HF_CACHE_FIX if _HF_CACHE.search(name) else _SIZE_FIX.format(name=name, dim=dim)
    if {expected, actual} & {"0", "1"} and fix is not _HF_CACHE_FIX:
        fix = f"{fix}. {_ZERO_ONE_FIX}"
    return FailedGuard(key, guard, f"the size of `{name}` in dim {dim} changed", fix, expected, actual)


def _presence(guard: str, frame: Mapping[str, Any]) -> FailedGuard | None:
    match = _NOT_A_TENSOR.search(guard)
    if match:
        now = "None" if match[2] == "NoneType" else match[2]
        cause = f"`{match[1]}` was a tensor and is {now} now"
        return FailedGuard(f"{match[1]} presence", guard, cause, _PRESENCE_FIX, "tensor", now)
    match = _PRESENCE.match(guard)
    if match:
        expected, actual = ("not None", "None") if match[2] else ("None", _shown(_value_of(match[1], frame)))
        cause = f"`{match[1]}` was {expected} and is {actual or 'something else'} now"
        return FailedGuard(f"{match[1]} presence", guard, cause, _PRESENCE_FIX, expected, actual)
    return None


def _mode(guard: str, frame: Mapping[str, Any]) -> FailedGuard | None:
    if not guard.startswith("GLOBAL_STATE changed"):
        return None
    what = guard.partition(":")[2].strip() or "a setting of torch"
    fix = (
        "make every call under the same mode, torch.inference_mode() for instance, and change settings before the first"
    )
    return FailedGuard(guard, guard, f"{what} differs from earlier calls", fix)


def _aliases(guard: str, frame: Mapping[str, Any]) -> FailedGuard | None:
    if "Duplicate tensor" not in guard:
        return None
    names = guard.partition(":")[2].strip() or "two arguments"
    return FailedGuard(
        "aliases", guard, f"one tensor is passed as {names}", "pass different tensors, or always the same one"
    )


def _length(guard: str, frame: Mapping[str, Any]) -> FailedGuard | None:
    match = _LENGTH.search(guard)
    if match is None:
        return None
    value = _value_of(match[1], frame)
    actual = str(len(value)) if hasattr(value, "__len__") else ""
    fix = "pass a fixed number of items, or one stacked tensor"
    return FailedGuard(f"{match[1]} length", guard, f"the length of `{match[1]}` changed", fix, match[2], actual)


def _relation(guard: str, frame: Mapping[str, Any]) -> FailedGuard | None:
    if not _SIZES.search(guard):
        return None
    shown = guard.split("  #")[0]
    fix = _ZERO_ONE_FIX if re.search(r"^2 <= |!= [01]$|>= 2|== 1$", shown) else _RELATION_FIX
    sizes = [f"{term} = {_shown(_value_of(term, frame))}" for term in _SIZE_TERM.findall(shown)]
    return FailedGuard(shown, guard, f"sizes no longer satisfy `{shown}`", fix, "", ", ".join(sizes))


def _constant(guard: str, frame: Mapping[str, Any]) -> FailedGuard | None:
    match = _EQUAL.match(guard.split(" (HINT")[0])
    if match is None:
        return None
    name, expected = match[1].strip(), match[2].strip()
    try:
        kind = type(ast.literal_eval(expected)).__name__
    except (ValueError, SyntaxError):
        kind = "other"
    fix = _CONSTANT_FIX.get(kind, _CONSTANT_FIX["other"])
    if "." in name and "[" not in name and kind in ("int", "float"):
        fix = _ATTRIBUTE_FIX
    if name.startswith("G["):
        fix = "do not change global variables between calls; pass the value as an argument"
    cause = f"the value of `{name}` changed and the graph was compiled for one value"
    return FailedGuard(name, guard, cause, fix, expected, _shown(_value_of(name, frame)))


def _identity(guard: str, frame: Mapping[str, Any]) -> FailedGuard | None:
    match = _IDENTITY.search(guard)
    if match and match[1] == "type":
        actual = type(_value_of(match[2], frame)).__name__ if frame else ""
        return FailedGuard(f"{match[2]} type", guard, f"the type of `{match[2]}` changed", _TYPE_FIX, match[3], actual)
    if match:
        name, what = match[2].removesuffix(".__code__"), "function" if "__code__" in match[2] else "object"
        return FailedGuard(f"{name} identity", guard, f"`{name}` is another {what} than before", _OBJECT_FIX)
    if "got deallocated" in guard:
        return FailedGuard(guard, guard, "an object that the compiled code belongs to was deleted", _OBJECT_FIX)
    return None


_MISSING = object()


def _shown(value: Any) -> str:
    """Return `value` as short text, a tensor as its shape; "" when there is no value."""
    if value is _MISSING:
        return ""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"tensor {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= _VALUE_LENGTH else f"{text[: _VALUE_LENGTH - 3]}..."


def _value_of(expression: str, frame: Mapping[str, Any]) -> Any:
    """Evaluate a guard's left side in `frame`: a chain of names, attributes and constant subscripts."""
    try:
        return _walk(ast.parse(expression, mode="eval").body, frame)
    except Exception:
        # An attribute access of a user's object may raise anything; the report must not fail.
        return _MISSING


def _walk(node: ast.expr, frame: Mapping[str, Any]) -> Any:
    match node:
        case ast.Name(id=name):
            return frame[name]
        case ast.Attribute(value=value, attr=name):
            return getattr(_walk(value, frame), name)
        case ast.Subscript(value=value, slice=index):
            return _walk(value, frame)[ast.literal_eval(index)]
        case ast.Call(func=ast.Attribute(value=value, attr="size"), args=[]):
            return torch.Tensor.size(_walk(value, frame))
        case _:
            return _MISSING
