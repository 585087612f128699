"""How every kernel of this package is launched, so that a tape (tape.py) can note what a launcher does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from .tape import Tape


class _Noting(threading.local):
    """The tape that notes what this thread does, if one does."""

    tape: Tape | None = None


noting = _Noting()
FUSING = {"enable_fp_fusion": True}
"""What a kernel is compiled with where it says nothing else: left to Triton, an environment variable would decide, and
where that is not set Triton 3.10 is to do the opposite of 3.9."""


def launch_kernel(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """As `kernel[grid](*args, **constants)`, products and sums fused unless `enable_fp_fusion=False` says otherwise."""
    compiled = kernel[grid](*args, **(FUSING | constants))
    if noting.tape is not None:
        note(compiled, grid, [] if compiled is None else bound(kernel, args, constants))


def bound(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> list[Any]:
    """Every argument of a kernel in its order, as a compiled one takes them."""
    rest = kernel.params[len(args) :]
    return [*args, *(constants.get(param.name, param.default) for param in rest)]


def note(compiled: Any, grid: tuple[int, ...], values: list[Any]) -> None:
    """Say that `compiled[grid](*values)` has been launched. A kernel that Triton interprets, or has not compiled, is
    None."""
    if noting.tape is not None:
        noting.tape.launched(compiled, grid, values)


def each_time(make: Callable[..., Tensor], *args: Any) -> Tensor:
    """`make(*args)`, which gives another tensor when a launcher's work is done again."""
    return make(*args) if noting.tape is None else noting.tape.made_each_time(make, args)
