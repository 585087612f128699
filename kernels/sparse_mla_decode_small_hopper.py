"""Few tokens on Hopper: which calls sparse_mla_decode_kernel_small_hopper.py takes, and how it is launched."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..layout import cdiv
from .gpu import Gpu, early_start
from .sparse_mla_decode_kernel_small_hopper import sparse_mla_decode_small_hopper_kernel
from .sparse_mla_decode_launch_hopper import gather_refuses, launch_gathering
from .sparse_mla_decode_plan import PLAIN, Fusion, Results, Source

WIDE = True


class Shape(NamedTuple):
    """Of a program: heads and keys that it takes at a time, its warps, and when it lets the next kernel start.

    That is when its last keys are here where `late`, so that the weight of a projection does not hold them up; else at
    once.
    """

    block_h: int
    block_n: int
    warps: int
    late: bool = False


FEW = Shape(16, 64, 8)
MOST_BLOCKS = 512
"""Of 16 heads and 64 keys. In a row of layers of V4-Flash on an H200, attention of 1, 8 and 32 tokens adds 10, 10 and
13 us to a layer of 128 keys, and 11, 19 and 47 us to one of 640 keys; with the kernel for more tokens 23, 21 and 26 us,
and 22, 28 and 36 us."""


def shape_of(tokens: int, heads: int, keys: int) -> Shape | None:
    """How to attend rows of at most `keys` keys; None for more than this kernel does well."""
    if tokens * cdiv(heads, FEW.block_h) * cdiv(keys, FEW.block_n) > MOST_BLOCKS:
        return None
    return FEW._replace(late=tokens == 1)


def hopper_refuses(
    q: Tensor, window: Source, extra: Source, cache_format: str, sink: Tensor | None, fusion: Fusion = PLAIN
) -> str:
    """Why this kernel cannot take a call that the portable one can, "" if it can."""
    tokens, heads, _ = q.shape
    keys = window.indices.shape[1] + extra.indices.shape[1]
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
    keys = window.indices.shape[1] + extra.indices.shape[1]
    block_h, block_n, warps, late = shape or shape_of(q.shape[0], q.shape[1], keys) or FEW
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
