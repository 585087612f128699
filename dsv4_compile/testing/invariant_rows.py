"""Rows of a function, alone and among others: bit for bit the same, whatever the other rows are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from .generate import poison_

SIZES = (3, 65, 17, 1, 130, 2, 33, 16, 64, 7)
"""Rows of random calls: at and around the limits of implementations."""
Args = Sequence[Any]


def check_rows(
    run: Callable[..., Any],
    args: Args,
    rows: Collection[int],
    *,
    grouped: Collection[int] = (),
    written: Collection[int] = (),
    compositions: int = 20,
    generator: torch.Generator,
    label: str,
) -> None:
    """Raise AssertionError for the first row of `run(*args)` with bits that depend on other rows.

    Args:
        run: returns a tensor, or tensors, with a row for each row of the arguments.
        rows: indices of arguments with a row each. Their first dims are equal; a longer one ends in unused rows.
        grouped: indices of arguments with several rows for each.
        written: indices of arguments that `run` writes. With these every row comes once, in its order.
        compositions: random calls.
        label: named in the message.
    """
    rows = [i for i in rows if i < len(args)]
    tensors = [args[i] for i in rows if isinstance(args[i], Tensor)]
    count = min(x.shape[0] for x in tensors)
    if count == 0 or any(x.dim() == 0 for x in tensors):
        return
    if written:
        _check_writes(run, args, rows, written, count, compositions, generator, label)
        return

    def call(indices: list[int], *, nan: bool = False) -> list[Tensor]:
        """Run rows `indices`, and after them a row of NaN."""
        chosen = torch.tensor(indices + indices[:1] * nan)
        values = list(args)
        for i in (*rows, *grouped):
            if isinstance(args[i], Tensor):
                values[i] = _taken(args[i], chosen, args[i].shape[0] // count if i in grouped else 1)
                if nan and values[i].dtype.is_floating_point:
                    poison_(values[i][-1:])
        return _tensors(run(*values))

    alone = [call([row]) for row in range(count)]
    for number in range(compositions):
        size = SIZES[number % len(SIZES)]
        indices = torch.randint(count, (size,), generator=generator).tolist()
        results = call(indices, nan=number % 4 == 3)
        for position, row in enumerate(indices):
            for which, (got, want) in enumerate(zip(results, alone[row], strict=True)):
                if not _equal(got[position : position + 1], want):
                    where = (
                        f"row {row} in position {position} of {size}, result {which}: {_first(got[position], want[0])}"
                    )
                    raise AssertionError(f"{label}: {where}, and other bits alone")


def _check_writes(
    run: Callable[..., Any],
    args: Args,
    rows: Collection[int],
    written: Collection[int],
    count: int,
    compositions: int,
    generator: torch.Generator,
    label: str,
) -> None:
    """Compare what calls of parts of the rows have written, in the order of the rows, with calls of one row each."""

    def wrote(starts: list[int]) -> list[Tensor]:
        values = [arg.clone() if i in written and isinstance(arg, Tensor) else arg for i, arg in enumerate(args)]
        results: list[list[Tensor]] = []
        for start, end in zip(starts, [*starts[1:], count], strict=True):
            for i in rows:
                if isinstance(args[i], Tensor):
                    values[i] = args[i][start:end].clone()
            results.append(_tensors(run(*values)))
        returned = [torch.cat(parts) for parts in zip(*results, strict=True)]
        return returned + [values[i] for i in written if isinstance(values[i], Tensor)]

    alone = wrote(list(range(count)))
    for number in range(compositions):
        cuts = [0] if number == 0 else sorted({0, *torch.randint(count, (number % 4,), generator=generator).tolist()})
        for which, (got, want) in enumerate(zip(wrote(cuts), alone, strict=True)):
            if not _equal(got, want):
                raise AssertionError(f"{label}: calls of the rows from {cuts} on, result {which}: {_first(got, want)}")


def _taken(x: Tensor, rows: Tensor, each: int) -> Tensor:
    """Return rows of `x`, `each` of them for a number in `rows`."""
    numbers = (rows[:, None] * each + torch.arange(each)).flatten().to(x.device)
    if x.element_size() == 1 and x.dtype.is_floating_point:
        return x.view(torch.uint8).index_select(0, numbers).view(x.dtype)
    return x.index_select(0, numbers)


def _tensors(returned: Any) -> list[Tensor]:
    return [] if returned is None else [returned] if isinstance(returned, Tensor) else list(returned)


def _bits(x: Tensor) -> Tensor:
    dense = x.clone(memory_format=torch.contiguous_format).flatten()  # .contiguous() keeps odd strides of one element
    return dense.view(torch.uint8) if x.numel() else dense.to(torch.uint8)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _first(got: Tensor, want: Tensor) -> str:
    """Return the first element that differs, and the number of them."""
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)}, not {tuple(want.shape)}"
    size = got.element_size()
    different = (_bits(got).view(-1, size) != _bits(want).view(-1, size)).any(1)
    first = int(different.to(torch.uint8).argmax())
    values = [x.flatten()[first].float().item() for x in (got, want)]
    count = f"{int(different.sum())} of {got.numel()} elements differ"
    return f"{count}, the first is {first}: {values[0]!r}, not {values[1]!r}"
