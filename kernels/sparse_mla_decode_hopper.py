"""Sparse MLA decode on Hopper: which calls sparse_mla_decode_kernel_hopper.py takes, and how it is launched."""

from __future__ import annotations

from torch import Tensor

from .attention_rows_hopper import BLOCK_H
from .gpu import Gpu, early_start
from .sparse_mla_decode_few_hopper import MOST_HEADS
from .sparse_mla_decode_kernel_hopper import KEYS, sparse_mla_decode_hopper_kernel
from .sparse_mla_decode_launch_hopper import gather_refuses, launch_gathering
from .sparse_mla_decode_plan import PLAIN, Fusion, Results, Source

HEADS = BLOCK_H.value
FEWEST_HEADS = MOST_HEADS + 1  # fewer have a kernel of their own
# H200, 64 heads, 128 / 512 tokens of 640 keys: 38.2 / 142 us (`dsv4 bench sparse_mla_decode`); 4% more with 136
RIGHT_REGISTERS, PRODUCER_REGISTERS = 160, 144
WIDE = True


def hopper_refuses(
    q: Tensor, window: Source, extra: Source, cache_format: str, sink: Tensor | None, fusion: Fusion = PLAIN
) -> str:
    """Why this kernel cannot take a call that the portable one can, "" if it can."""
    if q.shape[1] < FEWEST_HEADS:
        return f"it takes {FEWEST_HEADS} heads or more"
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
    constants = {"RIGHT_REGISTERS": RIGHT_REGISTERS, "PRODUCER_REGISTERS": PRODUCER_REGISTERS, "WIDE": WIDE}
    return launch_gathering(
        sparse_mla_decode_hopper_kernel,
        HEADS,
        KEYS,
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
        packs=True,
    )
