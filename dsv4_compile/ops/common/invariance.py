"""Batch invariance: which implementations of an op give a row the same bits in calls of every size.

A row is a token, or in ops of drafts a request. An implementation claims that a row's result is a function of that row
alone: its arguments, and the cache rows that they name. Nothing is claimed by default. `dsv4.batch_invariant` keeps to
implementations with a claim, and `dsv4_compile.testing.check_batch_invariant` checks claims bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from ...cpu.common.invariant import alone, by_kernels

STEP, TOKENS = "step", "tokens"
"""Values of `dsv4.batch_invariant` that switch it on."""
STEP_TOKENS = 2**9
"""Most rows of a call that "step" makes a promise for. Larger ones are prompts."""
_PADDED_TOKENS = STEP_TOKENS + STEP_TOKENS // 2
"""Most rows of such a call after padding to a bucket, which adds less than half (`runtime.bucket_sizes`)."""
AS_IT_IS, PINNED, ALONE = "as it is", "pinned", "alone"
"""Claims of an implementation: in every call; with a plan that does not follow from the number of rows, which
`invariant_<op>` of the kernel's module launches; and if each row is a call."""


class Invariance(NamedTuple):
    """Claims of an op's implementations; "" is none.

    Attributes:
        rows: arguments with one row for each token or request. Other arguments are the same for all rows.
        grouped: arguments with several rows for each token or request.
        exact: all results are integers, copies and comparisons, which have no order of sums: every implementation.
        elementwise: the reference computes each element by separate operations, so on a GPU it is invariant.
        on_cpu: claim of the form for CPUs, AS_IT_IS or ALONE. As it is, its C++ kernels sum each row in a fixed order,
            and rows that no kernel takes run alone.
        kernel: claim of the kernel for GPUs, AS_IT_IS or PINNED.
        why: what results of the kernel depend on besides their row, where it makes no claim.
    """

    rows: Collection[str] = ()
    grouped: Collection[str] = ()
    exact: bool = False
    elementwise: bool = False
    on_cpu: str = ""
    kernel: str = ""
    why: str = ""


EXACT = Invariance(exact=True)
CLAIMS: dict[str, Invariance] = {}
"""Claims of every op that makes some."""
Watcher = Callable[[str, tuple[Any, ...], Any], None]
watchers: list[Watcher] = []
"""Functions that see op, arguments and result of each batch-invariant call; `testing` compares them."""


class OnCpu:
    """Batch-invariant forms for CPUs under the names of their ops, for graphs."""


STEP_ON_CPU, TOKENS_ON_CPU = OnCpu(), OnCpu()
"""Forms by value of `dsv4.batch_invariant`."""


def is_large(level: str, rows: int) -> bool:
    """Return whether a call of `rows` rows, padding included, may depend on their number at this level."""
    return level == STEP and rows > _PADDED_TOKENS


def claim(op: str, claims: Invariance, form: Callable[..., Any], declared: Sequence[Any]) -> None:
    """Record the claims of an op.

    Args:
        form: what runs on a CPU, of unpacked arguments.
        declared: arguments of the op's schema.
    """
    CLAIMS[op] = claims
    if claims.exact or claims.on_cpu:
        for level, forms in ((STEP, STEP_ON_CPU), (TOKENS, TOKENS_ON_CPU)):
            setattr(forms, op, _on_cpu(op, claims, form, declared, level))


def _on_cpu(
    op: str, claims: Invariance, form: Callable[..., Any], declared: Sequence[Any], level: str
) -> Callable[..., Any]:
    places = row_places(op, declared)
    call = alone if claims.on_cpu == ALONE else by_kernels

    def run(*args: Any, **kwargs: Any) -> Any:
        rest = declared[len(args) :]
        args += tuple(kwargs.get(argument.name, argument.default_value) for argument in rest)
        if claims.exact or is_large(level, args[places[0]].shape[0]):
            result = form(*args)
        else:
            result = call(form, args, places, args[places[0]].shape[0])
        for watcher in watchers:
            watcher(op, args, result)
        return result

    return run


def row_places(op: str, declared: Sequence[Any]) -> list[int]:
    """Return the indices of the arguments of `op` that have a row for each token or request."""
    return [i for i, argument in enumerate(declared) if argument.name in CLAIMS[op].rows]
