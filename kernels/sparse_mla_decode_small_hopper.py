"""Few tokens on Hopper: which calls sparse_mla_decode_kernel_small_hopper.py takes, and how it is launched."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..layout import cdiv
from .gpu import Gpu, early_start
from .sparse_mla_decode_hopper import FEWEST_HEADS
from .sparse_mla_decode_kernel_small_hopper import sparse_mla_decode_small_hopper_kernel
from .sparse_mla_decode_launch_hopper import gather_refuses, launch_gathering
from .sparse_mla_decode_plan import PLAIN, Fusion, Results, Source, part_count

WIDE = True


class Shape(NamedTuple):
    """Of a program: heads and keys that it takes at a time, its warps, and when it lets the next kernel start.

    That is when its last keys are here where `late`, so that the weight of a projection does not hold them up; else at
    once. `once`: it has code of its own for rows that are cut into single blocks.
    """

    block_h: int
    block_n: int
    warps: int
    late: bool = False
    once: bool = False


NARROW = Shape(16, 64, 8)
ONCE = Shape(16, 128, 8, late=True, once=True), Shape(32, 128, 8, late=True, once=True)
MOST_PROGRAMS = 132
"""Of a call whose rows are cut into single blocks: one for each multiprocessor of an H200."""
TILE = 16
SHORT = 256
"""Most keys of a row that is short."""
MOST_TILES, FEWEST_TILES = 256, 4
"""Of rows that are short."""


def shape_of(tokens: int, heads: int, keys: int) -> Shape | None:
    """How to attend rows of at most `keys` keys; None for more than this kernel does well.

    What attention adds to a row of e4m3 projections of V4-Flash, in us on an H200, by NARROW programs, by ONCE, and
    by the kernel for more tokens (`examples/benchmarks/attention_between_projections.py`); between bfloat16
    projections the order is the same:

        tokens  128 keys             256 keys             640 keys
             1   7.4  7.7  9.1 14.9   7.9  8.5  9.9 14.5   8.1  8.7 10.5 15.0
             8   8.0  7.2  8.8 13.3  10.6  9.3 10.8 13.9  16.0 15.0 12.8 17.2
            16  10.0  7.2  8.8 14.1  13.2 10.4 11.9 15.8  23.7 21.3 20.3 18.9
            32   9.8  8.6  8.6 14.4  16.6 14.5 14.8 17.9  37.8 31.4 28.8 21.5
            64  19.5 16.7 11.2 21.1  33.5 28.4 19.5 24.0  76.4 62.1 41.5 30.7
           128  38.4 32.0 20.5 18.3  67.3 55.3 37.3 23.6

    Programs of 16 warps, or of 32 heads and 64 keys, without code of their own for single blocks, are nowhere faster.
    """
    tiles = tokens * cdiv(heads, TILE)
    if keys <= SHORT:
        if tiles <= FEWEST_TILES and keys > ONCE[0].block_n:
            return NARROW
        return ONCE[0] if tiles <= MOST_TILES // 2 else ONCE[1] if tiles <= MOST_TILES else None
    for shape in (NARROW, *ONCE):
        # Where every block of a row has a program, and every program a multiprocessor, none waits for keys twice.
        if tokens * cdiv(heads, shape.block_h) * cdiv(keys, shape.block_n) <= MOST_PROGRAMS:
            return shape
    return None


def hopper_refuses(
    q: Tensor, window: Source, extra: Source, cache_format: str, sink: Tensor | None, fusion: Fusion = PLAIN
) -> str:
    """Why this kernel cannot take a call that the portable one can, "" if it can."""
    tokens, heads, _ = q.shape
    keys = window.indices.shape[1] + extra.indices.shape[1]
    if heads < FEWEST_HEADS:
        return f"it takes {FEWEST_HEADS} heads or more"
    if shape_of(tokens, heads, keys) is None:
        return f"it takes less than {tokens} tokens with {heads} heads and {keys} keys each"
    if fusion.batch_invariant:
        return "its sums are not those of the kernels for more tokens"
    return gather_refuses(q, window, extra, cache_format, sink, fusion)


def launch_hopper(
    q: Tensor,
    window: Source,
    extra: Source,
    scale: float,
    sink: Tensor | None,
    gpu: Gpu,
    splits: int = 0,
    fusion: Fusion = PLAIN,
    into: Results | None = None,
    shape: Shape | None = None,
) -> tuple[Tensor, Tensor]:
    """As `launch` of the portable kernel."""
    tokens, heads, _ = q.shape
    widths = window.indices.shape[1], extra.indices.shape[1]
    block_h, block_n, warps, late, once = shape or shape_of(tokens, heads, sum(widths)) or ONCE[1]
    blocks = sum(cdiv(width, block_n) for width in widths)
    splits = splits or part_count(max(1, tokens * cdiv(heads, block_h)), blocks, gpu)
    constants = {"BLOCK_H": block_h, "BLOCK_N": block_n, "WIDE": WIDE, "ONE": once and splits >= blocks, "LATE": late}
    return launch_gathering(
        sparse_mla_decode_small_hopper_kernel,
        block_h,
        block_n,
        constants | early_start(True),
        q,
        window,
        extra,
        scale,
        sink,
        gpu,
        splits,
        fusion,
        into,
        warps,
        flat=False,
    )
