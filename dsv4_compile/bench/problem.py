"""A problem is one op at one size and the implementations that compete for it: PyTorch, torch.compile, IR, kernels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._compat import maybe_mark_dynamic
from ..backend import dsv4
from ..errors import DSV4Error
from ..ops.common.define import OPS, REFERENCES
from ..ops.common.kernels import launcher
from ..selection.costs import Cost
from .timing import ColdTime

Args = tuple[Any, ...]
Prepare = Callable[[], Callable[..., Any]]
"""Returns an implementation, compiled if it needs to be, ready to be called with the arguments."""
Only = Mapping[str, Collection[str]]
"""Allowed values, as text, by column: `{"tokens": {"1", "8"}, "impl": {"ir"}}`. Other columns are free."""


class Unavailable(RuntimeError):
    """An implementation needs a GPU, a library or a compiler that this machine lacks, or does not support the call."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One op at one size.

    Attributes:
        op: name of the op.
        params: its sizes, as columns of the table; numbers or names.
        make: builds one set of arguments in fresh memory. Sets of one seed are equal.
        written: positions of the arguments that the op mutates.
        cost: bytes and flops that any implementation needs; flops are those of GEMMs, where these may be the limit.
        reference: the definition, which every implementation must agree with.
        implementations: by name.
        published: microseconds of other projects at this size, by name; shown for comparison.
        differs: replaces `gate.disagreement` where the rounding of a result is not defined to the bit.
        cold: whether to measure a cold time, with argument sets in turn.
        time_cold: replaces that: measures the cold time of an implementation that was prepared, given the arguments;
            None where it measures none.
        clock: "" for graph replays on a GPU, "stream" for consecutive calls, host time included: for implementations
            that capture graphs themselves.
        repeats: number of consecutive copies of the problem in one call; times and launches are those of one copy.
        per_kernel: whether to record the time of each kernel of a call too.
        details: facts about an implementation that was timed on a GPU, found by further calls; replaces the count of
            launches. Keys may be added until the scenario is over.
        arrange: makes the arguments of an implementation from the op's, by name, for those that want weights in a
            different form; neither compared nor timed.
        uncaptured: implementations that wait for the device, which no graph can hold: consecutive calls are timed.
        differs_of: replaces `differs` for implementations that round more than the reference, by name.
    """

    op: str
    params: Mapping[str, int | str]
    make: Callable[[int], Args]
    written: tuple[int, ...]
    cost: Cost
    reference: Callable[..., Any]
    implementations: Mapping[str, Prepare]
    published: Mapping[str, float]
    differs: Callable[..., str] | None = None
    cold: bool = True
    time_cold: Callable[[Callable[..., Any], Args], ColdTime | None] | None = None
    clock: str = ""
    repeats: int = 1
    per_kernel: bool = False
    details: Callable[[Callable[[], Any]], dict[str, Any]] | None = None
    arrange: Mapping[str, Callable[[Args], Args]] = field(default_factory=dict)
    uncaptured: Collection[str] = ()
    differs_of: Mapping[str, Callable[..., str]] = field(default_factory=dict)

    def arranged(self, impl: str, args: Args) -> Args:
        """Return the arguments of the implementation `impl` for the op's arguments."""
        return self.arrange[impl](args) if impl in self.arrange else args


def keep(only: Only, **columns: int | str) -> bool:
    """Return whether a row with these columns is wanted."""
    return all(str(value) in only[name] for name, value in columns.items() if name in only)


_count = itertools.count()


def compiled(
    function: Callable[..., Any], backend: Any, typical: Callable[[], Args], tokens: Sequence[int], **options: Any
) -> Callable[..., Any]:
    """Return `function` compiled for arguments of a middle size with a dynamic token dim; see `implementations`."""

    def run(*args: Any) -> Any:
        return function(*args)

    # Dynamo keys compiled code and the sizes it has seen by code object and name; unique ones start anew and leave
    # other functions as they are.
    run.__code__ = run.__code__.replace(co_name=f"compiled_{next(_count)}")
    call = torch.compile(run, backend=backend, fullgraph=True, options=options or None)
    args = typical()
    for index in tokens:
        assert isinstance(args[index], Tensor)
        maybe_mark_dynamic(args[index], 0)
    call(*args)
    return call


def implementations(op: str, typical: Callable[[], Args], tokens: Sequence[int]) -> Mapping[str, Prepare]:
    """Return four implementations: `eager` and `inductor` run the reference, `ir` and `triton` the op.

    Each is prepared once, however often it is asked for.

    Args:
        typical: builds arguments of a middle size. Code is compiled for these with a dynamic token dim and serves every
            size; torch compiles once more for one token.
        tokens: positions of the arguments with tokens as first dim.
    """

    def through_op(*args: Any) -> Any:
        return OPS[op](*args)

    return {
        "eager": lambda: REFERENCES[op],
        "inductor": functools.cache(lambda: compiled(REFERENCES[op], "inductor", typical, tokens)),
        "ir": functools.cache(lambda: compiled(through_op, dsv4, typical, tokens, **{f"dsv4.impl.{op}": "ir"})),
        "triton": lambda: on_gpu(launcher(op)),
    }


def on_gpu(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call`, which launches a kernel of this package; raise `Unavailable` if there is no GPU."""
    if not torch.cuda.is_available():
        raise Unavailable("hand-written kernels run on GPUs")
    return call


def deepseek_v4() -> Any:
    """Return transformers' modules of DeepSeek-V4; raise `Unavailable` if there are none."""
    try:
        from transformers.models.deepseek_v4 import modeling_deepseek_v4
    except ImportError as missing:
        raise Unavailable(f"no transformers with DeepSeek-V4: {missing}") from missing
    return modeling_deepseek_v4


def status_of(fault: Exception) -> tuple[str, str]:
    """Return status and note of a row after its implementation raised `fault`.

    "unavailable" is for a missing library, compiler or GPU, and for a call that is unsupported; anything else is
    "failed", with the type of the exception.
    """
    chain: list[BaseException] = []
    cause: BaseException | None = fault
    while cause is not None and cause not in chain:
        chain.append(cause)
        # torch.compile wraps what a backend raises.
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    for cause in chain:
        ours = isinstance(cause, DSV4Error) and cause.code == "E302"
        if ours or isinstance(cause, (Unavailable, ImportError, NotImplementedError)) or _no_compiler(cause):
            return "unavailable", _reason(cause)
    return "failed", f"{type(fault).__name__}: {_reason(fault)}"


def _no_compiler(fault: BaseException) -> bool:
    """Return whether Inductor found no C++ compiler; torch's class for that is private."""
    return type(fault).__name__ == "InvalidCxxCompiler"


def _reason(fault: BaseException) -> str:
    """Return the line of a message that says most: the "why" of this package's errors, otherwise the first."""
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()] or [type(fault).__name__]
    return next((line.removeprefix("why").strip() for line in lines if line.startswith("why ")), lines[0])
