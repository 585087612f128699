"""Narrowing of a checkpoint's pieces to the parts that one rank has, so that it reads nothing else."""

from __future__ import annotations

from collections.abc import Iterator

from ...checkpoints.reader import Index
from ...parallel import Ranks, split_of
from ...parallel.split import Split
from ..model.split import keep_part
from .placement import Piece, Placement, targets


def split_placement(placement: Placement, ranks: Ranks, expert_layout: str) -> None:
    """Let the model of `placement`, on the meta device, be this rank's part, and its pieces what fills that.

    Raises E701 if the ranks do not divide the model.
    """
    sizes = {name: tensor.shape for name, tensor in targets(placement.model)}
    keep_part(placement.model, ranks, expert_layout)
    placement.pieces = [
        part
        for piece in placement.pieces
        for part in _parts(piece, sizes[piece.target], split_of(piece.target, expert_layout), ranks)
    ]


def _parts(piece: Piece, shape: tuple[int, ...], how: Split | None, ranks: Ranks) -> Iterator[Piece]:
    """Yield what a rank reads of `piece`, a part of a tensor of `shape`: nothing, one part, or one of each half."""
    if how is None:
        yield piece
        return
    half = shape[how.dim] // how.halves
    begin, end = ranks.part(half)
    into = (*piece.into, *(slice(0, size) for size in shape[len(piece.into) :]))
    place = into[how.dim]
    for number in range(how.halves):
        first, moved = number * half + begin, number * (end - begin) - number * half - begin
        last = number * half + end
        if isinstance(place, int):
            if first <= place < last:
                yield piece._replace(into=_with(into, how.dim, place + moved))
            continue
        low, high = max(place.start, first), min(place.stop, last)
        if low >= high:
            continue
        # Dims of the stored value are those of the tensor that no single index selects.
        dim = sum(isinstance(each, slice) for each in into[: how.dim])
        kept: Index = (*(slice(None),) * dim, slice(low - place.start, high - place.start))
        found = piece._replace(into=_with(into, how.dim, slice(low + moved, high + moved)))
        # Scales belong to whole matrices, which are dequantised before they are narrowed.
        yield found._replace(part=kept) if piece.scale is None else found._replace(kept=kept)


def _with(into: Index, dim: int, place: int | slice) -> Index:
    return (*into[:dim], place, *into[dim + 1 :])
