"""Errors of this package, each with a code, the rule that was broken, the value, the reason, and a fix.

`CODES` is the table of codes. `dsv4 explain E204` prints an entry; `fail(...)` and `check(...)` raise one.
Ranges: E1xx environment and versions, E2xx inputs and metadata, E3xx compile and lowering, E4xx CUDA graphs,
E5xx tuning and cache, W6xx warnings, E7xx several ranks, E8xx serving engines.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

_LIBRARIES = ("dsv4_compile", "torch")
"""Packages with stack frames that a warning skips to find the user's line."""


@dataclass(frozen=True, slots=True)
class Code:
    """One row of the error table: the rule for every caller and the usual fix."""

    title: str
    rule: str
    fix: str


CODES: dict[str, Code] = {
    "E101": Code(
        "a package that this feature needs is missing or has an unsupported version",
        "the feature's packages are installed in a version this release was tested with",
        "install the extra named in the message",
    ),
    "E201": Code(
        "argument is not what its docstring describes",
        "each argument has the type, and each tensor the shape, dtype and device, that its docstring names",
        "pass what the rule says, and see the docstring of the function",
    ),
    "E202": Code(
        "unknown cache format",
        "a cache format is one of fp8_ds_mla, plain, fp8 (keys and values) "
        "or indexer_fp8, indexer_mxfp4, plain (indexer keys)",
        "pass one of the formats listed",
    ),
    "E203": Code(
        "cache pages do not have the declared layout",
        "a page holds block_size data rows before block_size scale rows, and pages are stride(0) apart",
        "allocate caches with dsv4_compile.cache, or check strides against dsv4_compile.layout",
    ),
    "E204": Code(
        "batch does not fit the allocated buffers",
        "requests, tokens and sequence lengths stay within the capacities given at allocation",
        "allocate with larger max_batch_size / max_seq_len, or send a smaller batch",
    ),
    "E205": Code(
        "model configuration is not supported",
        "the configuration describes DeepSeek-V4: layer ratios 0, 1, 4 or 128 and one KV head",
        "see the support matrix in the README",
    ),
    "E206": Code(
        "inference-only op called with gradients enabled",
        "DeepSeek-V4 attention ops have no backward pass",
        "wrap the call in torch.inference_mode() or torch.no_grad()",
    ),
    "E207": Code(
        "checkpoint does not match the module",
        "every parameter is present once, with its shape and a supported dtype, and nothing is left over",
        "check that the checkpoint and the configuration belong together",
    ),
    "E208": Code(
        "model call is not supported",
        "a converted model runs inference with its own cache, greedy or sampled, one sequence per row",
        "change the call as the message says, or call dsv4_compile.hf.revert(model) first",
    ),
    "E209": Code(
        "checkpoint folder is incomplete or damaged",
        "a folder has config.json and whole safetensors files, and its index names their tensors",
        "download the folder again, or what the message names",
    ),
    "E210": Code(
        "model does not fit into the device's memory",
        "the device has memory for the weights as they are stored and for the caches of the batch",
        "use a larger device, a smaller batch, or shorter sequences",
    ),
    "E211": Code(
        "request of a running batch failed",
        "every step gives a request logits with a finite largest one, from which its token is chosen",
        "see the message, and the error that caused it; other requests are as they would be without this one",
    ),
    "E301": Code(
        "unknown or invalid backend option",
        'options of backend="dsv4" are dsv4.* options or Inductor config names, with values of the right type',
        "pick one of the names listed",
    ),
    "E302": Code(
        "requested implementation is not available",
        "an implementation that is requested by name is used, or this error is raised; it is never replaced",
        'use dsv4.impl="auto", or one of the implementations listed',
    ),
    "E303": Code(
        "an op has no batch-invariant implementation here",
        "with dsv4.batch_invariant all ops of a graph give a token the same bits whatever else is in the call",
        "change the op in the message, or compile without dsv4.batch_invariant",
    ),
    "E401": Code(
        "batch over the capacity of the persistent buffers",
        "a step has at most max_num_batched_tokens tokens, padding included, and max_num_seqs requests",
        "allocate MetadataBuffers for the largest step, or split the step",
    ),
    "E402": Code(
        "sequence longer than max_model_len",
        "no request, prompt and answer together, is longer than the max_model_len of the buffers",
        "allocate MetadataBuffers with a larger max_model_len, or end the request",
    ),
    "E403": Code(
        "block table does not reach the end of its requests",
        "a block table has a row for each request and a column for each page of the longest request",
        "pass a table of the size in the message",
    ),
    "E404": Code(
        "metadata has not been built",
        "metadata(num_tokens) follows load and a refresh of at least as many rows",
        "call refresh(num_tokens) first",
    ),
    "E420": Code(
        "graphs cannot be captured here",
        "graph capture needs a CUDA device; its stand-in, which replays on the CPU in tests, must be requested",
        "run on a GPU, or without graphs; request the stand-in in tests on a CPU",
    ),
    "E421": Code(
        "captured tensor moved or changed",
        "captured tensors keep their address, shape, strides and dtype",
        "write new values into the captured tensor with copy_, or capture again after the change",
    ),
    "E422": Code(
        "step cannot be captured",
        "a captured step launches work on the current stream and reads nothing back from the device",
        "remove what the message names from the step",
    ),
    "E423": Code(
        "captured step is empty",
        "a captured step launches at least one kernel on the device and stream of the capture",
        "move the step's tensors to the device of the capture, and launch on torch.cuda.current_stream()",
    ),
    "E424": Code(
        "capture inside a capture",
        "a captured step captures no graph itself and replays none",
        'compile the step with dsv4.cudagraph="off", and not with mode="reduce-overhead" or "max-autotune"',
    ),
    "E425": Code(
        "captures are sealed",
        "warm_up captures and allocates everything; after it no capture is added and none grows",
        "choose buckets for all sizes that need a graph before warm_up",
    ),
    "E426": Code(
        "outputs of the step cannot be captured",
        "a captured step returns tensors whose first dim is the step's tokens",
        "return tensors, and reduce over tokens outside the step",
    ),
    "E427": Code(
        "runner has not been warmed up",
        "warm_up comes before the first step: it compiles, measures and captures",
        "call runner.warm_up()",
    ),
    "E428": Code(
        "captured tensor on another device",
        "all tensors that a step reads or writes by address are on the device of the captures",
        "move the tensor in the message to that device",
    ),
    "E429": Code(
        "padding does not hold its pad value",
        "rows after the batch hold the pad value that metadata/buffers.py declares, at every step",
        "rewrite all rows of the bucket in refresh",
    ),
    "E430": Code(
        "something compiles, or is captured, after warm-up",
        'inside debug.compile_log(strict=True), and with dsv4.strict="after_warmup" after warm-up, nothing compiles',
        "make such a call in warm-up (runtime.warming_up), or make it equal to one that was made: see the reason",
    ),
    "E431": Code(
        "step would read a stale buffer",
        "a captured step reads what was written for it, and nothing of an earlier step",
        "write the buffer in the message before the step",
    ),
    "E432": Code(
        "object at fixed addresses was copied, or used after a fork",
        "objects with caches, slots or captured graphs are used in the process that made them, and never copied",
        "make another object of the same arguments, or submit the request again",
    ),
    "E501": Code(
        "compiled folder is damaged",
        "a compiled folder has the files of its manifest, each with its hash, and no others",
        "build it again with `dsv4 build` or hf.save_compiled",
    ),
    "E502": Code(
        "compiled folder is for something else",
        "a compiled folder is used with the versions, machine, model, sizes and options that it was built for",
        "build it again here, or let the model compile: compiled_required=False",
    ),
    "E701": Code(
        "model cannot be split over these ranks",
        "ranks, on a mesh of one dim, have equal numbers of heads, output groups, experts and blocks",
        "use a number of ranks that divides them",
    ),
    "E702": Code(
        "ranks do not do the same",
        "every rank converts with the same options, starts from the same weights and makes the same calls",
        "pass the same arguments on every rank",
    ),
    "E703": Code(
        "collective failed",
        "every rank runs until all have finished the call",
        "see the first error of the rank that ended, and start all ranks again",
    ),
    "E704": Code(
        "captured graph was freed with its process group",
        "a graph with collectives is replayed before destroy_process_group, which frees it",
        "destroy the group last; after it, convert the model again with a new mesh",
    ),
    "E705": Code(
        "rank did not come to an all-reduce",
        "every rank makes the same steps, each within the time in which the others wait for it",
        "see the first error of that rank, and start all ranks again",
    ),
    "E706": Code(
        "rank is gone in the middle of a step",
        "every rank runs until all have finished the step, and leaves the group after it",
        "see the first error of that rank, and start all ranks again",
    ),
    "E801": Code(
        "version of vLLM is not supported",
        "the plug-in runs in vLLM 0.32 and 0.33 on a CPU and 0.26 on an NVIDIA GPU; it knows them by what they have",
        "install one of them, or run vLLM without DSV4_VLLM=1",
    ),
    "E802": Code(
        "configuration of vLLM is not supported",
        "vLLM runs DeepSeek-V4 in bfloat16, on one device, with fp8_ds_mla caches and without drafts",
        "change what the message names, or run vLLM without DSV4_VLLM=1",
    ),
    "E803": Code(
        "caches of vLLM do not have the expected pages",
        "vLLM binds pages of the spec that it was given, contiguous and aligned",
        "report this with the versions that `dsv4 doctor` prints",
    ),
    "W601": Code(
        "ran without a graph",
        "captured sizes are replayed; any other size runs compiled, with the same result",
        "capture a bucket for it, or ignore this warning",
    ),
    "W602": Code(
        "captures hold more memory than was predicted",
        "captures hold at most the memory that plan() predicts",
        "use fewer or smaller buckets, and report the plan",
    ),
    "W603": Code(
        "ran the reference instead of a kernel",
        "a kernel runs the calls that it supports; any other runs the op's reference, slower, with the same result",
        "pass sizes, strides and dtypes within the limit in the message, or ignore this warning",
    ),
}


def printable(text: str, *, lines: bool = False) -> str:
    """Return `text` with escapes for characters that control a terminal; with `lines`, line breaks and tabs stay."""
    if text.isprintable():
        return text
    unescaped = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in unescaped else c.encode("unicode_escape").decode() for c in text)


def _inside(text: str) -> str:
    return printable(text, lines=True).replace("\n", "\n        ")


class DSV4Error(Exception):
    """Base class of all errors of this package. `code` is a key of `CODES`."""

    def __init__(self, code: str, *, got: str, why: str = "", fix: str = "", rule: str = "") -> None:
        entry = CODES[code]
        self.code = code
        self.rule = rule or entry.rule
        self.got = got
        self.why = why
        self.fix = fix or entry.fix
        fields = {"rule": self.rule, "got": got, "why": why, "fix": self.fix, "more": f"dsv4 explain {code}"}
        # Texts of files and libraries are among them: their lines stay inside their field.
        lines = [f"  {name:<4}  {_inside(text)}" for name, text in fields.items() if text or name == "got"]
        super().__init__("\n".join([f"[{code}] {entry.title}", *lines]))


class EnvironmentFault(DSV4Error, ImportError):
    """E1xx: the machine or the installed packages do not support the call."""


class InputError(DSV4Error, ValueError):
    """E2xx: a tensor, a configuration or a call breaks a documented rule."""


class CompileError(DSV4Error, RuntimeError):
    """E3xx: an option or a requested implementation that compilation does not support."""


class GraphError(DSV4Error, RuntimeError):
    """E4xx: a misuse of persistent buffers, or of capture and replay of a graph."""


class CacheError(DSV4Error, RuntimeError):
    """E5xx: a folder of compiled code that is damaged, or made for something else."""


class RankError(DSV4Error, RuntimeError):
    """E7xx: ranks of a split model that do not fit it, that differ, or that have ended."""


class EngineError(DSV4Error, RuntimeError):
    """E8xx: a serving engine, or its configuration, that a plug-in of this package does not run in."""


class DSV4Warning(UserWarning):
    """W6xx: the call did as asked, but in a different way or at a different cost than expected."""


_CLASSES: dict[str, type[DSV4Error]] = {
    "1": EnvironmentFault,
    "2": InputError,
    "3": CompileError,
    "4": GraphError,
    "5": CacheError,
    "7": RankError,
    "8": EngineError,
}


def error(code: str, *, got: str, why: str = "", fix: str = "", rule: str = "") -> DSV4Error:
    """Build (do not raise) the error of `code`; its class follows from the code's range."""
    return _CLASSES[code[1]](code, got=got, why=why, fix=fix, rule=rule)


def fail(code: str, *, got: str, why: str = "", fix: str = "", rule: str = "") -> NoReturn:
    """Raise the error of `code`."""
    raise error(code, got=got, why=why, fix=fix, rule=rule)


def warn(code: str, *, got: str, why: str = "", fix: str = "") -> None:
    """Warn with the text of the error of `code`, at the user's line that led here."""
    entry = CODES[code]
    text = str(DSV4Error(code, got=got, why=why, fix=fix or entry.fix))
    warnings.warn(DSV4Warning(text), stacklevel=_levels_to_the_user())


def _levels_to_the_user() -> int:
    """Return the stack level, for a warning of the caller, of the first frame outside this package and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    return level


def check(condition: bool, code: str, *, got: str, why: str = "", fix: str = "", rule: str = "") -> None:
    """Raise the error of `code` unless `condition` holds. Pass host values only, never a tensor."""
    if not condition:
        fail(code, got=got, why=why, fix=fix, rule=rule)


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    if package in sys.modules:
        return sys.modules[package] is not None
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


@contextmanager
def needs(extra: str, feature: str) -> Iterator[None]:
    """Raise E101 with the extra to install for a package that an import of the block does not find, or too old."""
    try:
        yield
    except ImportError as fault:
        package = (fault.name or "").partition(".")[0]
        if isinstance(fault, DSV4Error) or package in ("dsv4_compile", "torch"):
            raise
        install = f"pip install 'dsv4-compile[{extra}]'"
        fix = "install the triton that your torch build names" if package == "triton" else install
        raise error("E101", got=str(fault), rule=f"{feature} needs {package or extra}", fix=fix) from fault
