"""Few tokens on Hopper: which calls sparse_mla_decode_kernel_small_hopper.py takes, and how it is launched."""

from __future__ import annotations

from torch import Tensor

from ..layout import cdiv
from .gpu import Gpu, early_start
from .sparse_mla_decode_kernel_small_hopper import HEADS, KEYS, WARPS, sparse_mla_decode_small_hopper_kernel
from .sparse_mla_decode_launch_hopper import gather_refuses, launch_gathering
from .sparse_mla_decode_plan import PLAIN, Fusion, Results, Source

MOST_BLOCKS = 512
"""Of 16 heads and 64 keys. In a row of layers of V4-Flash on an H200, attention of 1, 8 and 32 tokens adds 10, 10 and
13 us to a layer of 128 keys, and 11, 19 and 47 us to one of 640 keys; with the kernel for more tokens 23, 21 and 26 us,
and 22, 28 and 36 us."""
WIDE = True


def hopper_refuses(
    q: Tensor, window: Source, extra: Source, cache_format: str, sink: Tensor | None, fusion: Fusion = PLAIN
) -> str:
    """Why this kernel cannot take a call that the portable one can, "" if it can."""
    keys = cdiv(window.indices.shape[1], KEYS) + cdiv(extra.indices.shape[1], KEYS)
    if q.shape[0] * cdiv(q.shape[1], HEADS) * keys > MOST_BLOCKS:
        return f"it takes {MOST_BLOCKS} blocks of {HEADS} heads and {KEYS} keys or fewer"
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
) -> tuple[Tensor, Tensor]:
    """As `launch` of the portable kernel."""
    return launch_gathering(
        sparse_mla_decode_small_hopper_kernel,
        HEADS,
        KEYS,
        {"WIDE": WIDE, **early_start(True)},
        q,
        window,
        extra,
        scale,
        sink,
        gpu,
        splits,
        fusion,
        into,
        WARPS,
        flat=False,
    )
