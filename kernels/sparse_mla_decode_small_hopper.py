"""Few tokens on Hopper: which calls sparse_mla_decode_kernel_small_hopper.py takes, and how it is launched."""

from __future__ import annotations

from torch import Tensor

from .gpu import Gpu, early_start
from .sparse_mla_decode_kernel_small_hopper import HEADS, KEYS, WARPS, sparse_mla_decode_small_hopper_kernel
from .sparse_mla_decode_launch_hopper import gather_refuses, launch_gathering
from .sparse_mla_decode_plan import PLAIN, Fusion, Results, Source

MOST_TOKENS = 32
WIDE = True


def hopper_refuses(
    q: Tensor, window: Source, extra: Source, cache_format: str, sink: Tensor | None, fusion: Fusion = PLAIN
) -> str:
    """Why this kernel cannot take a call that the portable one can, "" if it can."""
    if q.shape[0] > MOST_TOKENS:
        return f"it takes {MOST_TOKENS} tokens or fewer"
    if fusion.batch_invariant:
        return "its sums are not those of the kernel for more tokens"
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
    trips: int = 1,
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
        (trips,),
        WARPS,
        flat=False,
    )
