"""Narrowing of a checkpoint's pieces to the parts that one rank has, so that it reads nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

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
    placement.pieces = list(rank_pieces(placement.pieces, sizes, lambda name: split_of(name, expert_layout), ranks))


def rank_pieces(
    pieces: Iterable[Piece], sizes: Mapping[str, tuple[int, ...]], rule: Callable[[str], Split | None], ranks: Ranks
) -> Iterator[Piece]:
    """Yield what a rank reads of `pieces`, whose targets have `sizes` in the whole model and are split by `rule`."""
    for piece in pieces:
        yield from _parts(piece, sizes[piece.target], rule(piece.target), ranks)


def _parts(piece: Piece, shape: tuple[int, ...], how: Split | None, ranks: Ranks) -> Iterator[Piece]:
    """Yield what a rank reads of `piece`, a part of a tensor of `shape`: nothing, one part, or one of each half."""
    if how is None:
        yield piece
        return
    half = shape[how.dim] // how.halves
    begin, end = ranks.part(half)
    into = (*piece.into, *(slice(0, size) for size in shape[len(piece.into) :]))
    target = into[how.dim]
    for number in range(how.halves):
        first, moved = number * half + begin, number * (end - begin) - number * half - begin
        last = number * half + end
        if isinstance(target, int):
            if first <= target < last:
                yield piece._replace(into=_with(into, how.dim, target + moved))
            continue
        low, high = max(target.start, first), min(target.stop, last)
        if low >= high:
            continue
        # Dims of the stored value are those of the tensor that no single index selects.
        dim = sum(isinstance(index, slice) for index in into[: how.dim])
        stored_part: Index = (*(slice(None),) * dim, slice(low - target.start, high - target.start))
        rank_piece = piece._replace(into=_with(into, how.dim, slice(low + moved, high + moved)))
        # Scales belong to whole matrices, which are dequantised before they are narrowed.
        yield rank_piece._replace(part=stored_part) if piece.scale is None else rank_piece._replace(kept=stored_part)


def _with(into: Index, dim: int, place: int | slice) -> Index:
    return (*into[:dim], place, *into[dim + 1 :])
