"""Batch-invariant calls on a CPU: each row gets the bits that it gets alone, whatever else is in the call.

The C++ kernels sum each row in an order that follows from its length. torch and its libraries choose an order by the
number of rows, so forms say before they sum with torch, and the call then runs each row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_required: ContextVar[bool] = ContextVar("dsv4_invariant", default=False)


class SumsByTorch(Exception):
    """Raised where rows of a batch-invariant call would be summed in an order that torch chooses."""


def is_required() -> bool:
    """Return whether the rows of this call must not depend on each other."""
    return _required.get()


def before_sums_by_torch() -> None:
    """Raise `SumsByTorch` inside a batch-invariant call. Forms call this where no kernel takes their call."""
    if _required.get():
        raise SumsByTorch


@contextmanager
def required() -> Iterator[None]:
    """Let calls in this block sum each row in a fixed order, or raise `SumsByTorch`."""
    token = _required.set(True)
    try:
        yield
    finally:
        _required.reset(token)


def by_kernels(form: Callable[..., Any], args: tuple[Any, ...], places: Collection[int], count: int) -> Any:
    """Call `form` so that its rows are independent: by C++ kernels, or where these do not take the call as `alone`."""
    try:
        with required():
            return form(*args)
    except SumsByTorch:
        return alone(form, args, places, count)


def alone(form: Callable[..., Any], args: tuple[Any, ...], places: Collection[int], count: int) -> Any:
    """Call `form` for each of `count` rows of the arguments at `places`, and return the rows of all results."""

    def row(number: int) -> list[Any]:
        # A copy has the alignment of every other row, since libraries choose instructions by alignment.
        taken = [i in places and isinstance(arg, Tensor) for i, arg in enumerate(args)]
        return [arg[number : number + 1].clone() if t else arg for arg, t in zip(args, taken, strict=True)]

    if count == 0:
        return form(*args)
    results = [form(*row(number)) for number in range(count)]
    first = results[0]
    if isinstance(first, Tensor):
        return torch.cat(results)
    return tuple(map(torch.cat, zip(*results, strict=True))) if isinstance(first, tuple) else None
