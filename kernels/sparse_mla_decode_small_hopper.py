"""Few tokens on Hopper: which calls sparse_mla_decode_kernel_small_hopper.py takes, and how it is launched."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..layout import cdiv
from .gpu import Gpu, early_start
from .sparse_mla_decode_kernel_small_hopper import sparse_mla_decode_small_hopper_kernel
from .sparse_mla_decode_launch_hopper import gather_refuses, launch_gathering
from .sparse_mla_decode_plan import PLAIN, Fusion, Results, Source

MOST_BLOCKS = 512
"""Of 16 heads and 64 keys. In a row of layers of V4-Flash on an H200, attention of 1, 8 and 32 tokens adds 10, 10 and
13 us to a layer of 128 keys, and 11, 19 and 47 us to one of 640 keys; with the kernel for more tokens 23, 21 and 26 us,
and 22, 28 and 36 us."""
WIDE = True


class Shape(NamedTuple):
    """Of a program: heads and keys that it takes at a time, and its warps."""

    block_h: int
    block_n: int
    warps: int


SHAPE = Shape(16, 64, 8)


def hopper_refuses(
    q: Tensor, window: Source, extra: Source, cache_format: str, sink: Tensor | None, fusion: Fusion = PLAIN
) -> str:
    """Why this kernel cannot take a call that the portable one can, "" if it can."""
    block_h, block_n, _ = SHAPE
    blocks = cdiv(window.indices.shape[1], block_n) + cdiv(extra.indices.shape[1], block_n)
    if q.shape[0] * cdiv(q.shape[1], block_h) * blocks > MOST_BLOCKS:
        return f"it takes {MOST_BLOCKS} blocks of {block_h} heads and {block_n} keys or fewer"
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
    shape: Shape = SHAPE,
    late: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """As `launch` of the portable kernel."""
    block_h, block_n, warps = shape
    late = q.shape[0] == 1 if late is None else late
    return launch_gathering(
        sparse_mla_decode_small_hopper_kernel,
        block_h,
        block_n,
        {"BLOCK_H": block_h, "BLOCK_N": block_n, "WIDE": WIDE, "LATE": late, **early_start(True)},
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
