"""Few heads on Hopper: which calls sparse_mla_decode_kernel_few_hopper.py takes, and how it is launched."""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor

from .gpu import Gpu, early_start
from .sparse_mla_decode_kernel_few_hopper import KEYS, sparse_mla_decode_few_hopper_kernel
from .sparse_mla_decode_launch_hopper import gather_refuses, launch_gathering
from .sparse_mla_decode_plan import PLAIN, Fusion, Results, Source

MOST_HEADS = 32
SMALLEST_BLOCK = 8
WIDE = True


class Shape(NamedTuple):
    """Of a program: heads it takes, registers of a producer's threads, and buffers of 64 keys."""

    block_h: int
    registers: int
    buffers: int


# One H200, 128 tokens of 640 keys back to back, in us, 1 us apart from run to run, with a producer for each half:
#  8 heads 24.8; two buffers 23.9, 176 registers 26.0, 152 registers 30.1
# 16 heads 27.4; two buffers 28.1, 168 registers 29.7
# 32 heads 32.8; 136 registers 33.0, 152 registers 41.6; three buffers do not fit
# Keys brought into the L2 cache two or three blocks ahead make 24.8 longer: 26 to 27 line by line, 35 to 38 in bulk.
SHAPES = {8: Shape(8, 168, 3), 16: Shape(16, 160, 3), MOST_HEADS: Shape(MOST_HEADS, 144, 2)}


def shape_of(heads: int) -> Shape:
    """The smallest program that takes `heads` heads."""
    return SHAPES[max(SMALLEST_BLOCK, triton.next_power_of_2(heads))]


def hopper_refuses(
    q: Tensor, window: Source, extra: Source, cache_format: str, sink: Tensor | None, fusion: Fusion = PLAIN
) -> str:
    """Why this kernel cannot take a call that the portable one can, "" if it can."""
    if q.shape[1] > MOST_HEADS:
        return f"it takes {MOST_HEADS} heads or fewer"
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
    block_h, registers, buffers = shape or shape_of(q.shape[1])
    constants = {"BLOCK_H": block_h, "BUFFERS": buffers, "PRODUCER_REGISTERS": registers, "WIDE": WIDE}
    return launch_gathering(
        sparse_mla_decode_few_hopper_kernel,
        block_h,
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
    )
