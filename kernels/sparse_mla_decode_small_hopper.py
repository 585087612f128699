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


NARROW, LONG, WIDER = Shape(16, 64, 8), Shape(16, 128, 16, late=True), Shape(32, 64, 8)
ONCE = Shape(16, 128, 8, late=True, once=True), Shape(32, 128, 8, late=True, once=True)
MOST_PROGRAMS = 132
"""Of a call whose rows are cut into single blocks: one for each multiprocessor of an H200."""
TILE = 16
SHORT = 256
"""Most keys of a row that is short."""
MOST_TILES, MOST_TILES_SHORT = 64, 256
MOST_KEYS = 64 * 640
"""Of all tiles together, where rows are long."""


def shape_of(tokens: int, heads: int, keys: int) -> Shape | None:
    """How to attend rows of at most `keys` keys; None for more than this kernel does well.

    What attention adds to a row of projections of V4-Flash, in us on an H200, by NARROW, LONG and WIDER programs and by
    the kernel for more tokens; 1 token of 640 keys between e4m3 projections, all others between bfloat16 ones
    (`examples/benchmarks/attention_between_projections.py`):

        tokens  128 keys             256 keys             640 keys
             1   8.9  7.9 10.2 22.5                        8.2  7.0  9.1 23.4
             8   9.7  8.1 10.7 21.6  12.4 11.9 12.1 23.4  17.2 20.0 17.3 27.9
            16                                            25.1 26.7 22.8 31.1
            32  10.5 10.8 14.2 25.9  17.5 16.4 19.1 31.3  40.0 35.1 31.6 35.6
            64  20.1 19.1 13.7 32.3  35.7 33.3 22.2 37.0

    32 tokens of 640 keys are left to the other, which gains most where nothing comes between two of its launches. Its
    times are of before its code was shortened: 1 token of 128 keys takes 17 now, 32 of 640 keys 22.

    Where every block of a row has a program, and every program a multiprocessor, none waits for keys twice: 8 tokens of
    640 keys, by NARROW programs 14 us with the join behind them, take 10.9 (`dsv4 bench sparse_mla_decode`).
    """
    tiles = tokens * cdiv(heads, TILE)
    if keys > SHORT:
        for shape in (NARROW, *ONCE):
            if tokens * cdiv(heads, shape.block_h) * cdiv(keys, shape.block_n) <= MOST_PROGRAMS:
                return shape
    if keys <= SHORT:
        return LONG if tiles <= MOST_TILES_SHORT // 2 else WIDER if tiles <= MOST_TILES_SHORT else None
    if tiles > MOST_TILES or tiles * keys > MOST_KEYS:
        return None
    return LONG if tiles <= MOST_TILES // 4 else NARROW if tiles <= MOST_TILES // 2 else WIDER


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
    block_h, block_n, warps, late, once = shape or shape_of(tokens, heads, sum(widths)) or WIDER
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
