"""Few heads on Hopper: which calls sparse_mla_decode_kernel_few_hopper.py takes, and how it is launched."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .. import layout
from .gpu import FIRST_DEPENDENT, Gpu
from .sparse_mla_decode_hopper import PAGE_ALIGN, gather_refuses
from .sparse_mla_decode_kernel_few_hopper import KEYS, sparse_mla_decode_few_hopper_kernel
from .sparse_mla_decode_plan import PLAIN, Fusion, Results, Source, cut_of, outputs
from .split_softmax import LOG2_E, part_buffers, split_softmax

MOST_HEADS = 32
SMALLEST_BLOCK = 8
WIDE = True


class Shape(NamedTuple):
    """Of a program: heads it takes, registers of a producer's threads, and buffers of 64 keys."""

    block_h: int
    registers: int
    buffers: int


# One H200, 128 tokens of 640 keys, in us, 1 us apart from run to run:
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
    into = into or outputs(q)
    tokens, heads, head_dim = q.shape
    if tokens * heads == 0:
        return into.pair()
    # The producer reads the first key in place of none: rows of a cache without pages are empty.
    width0, width1 = (s.indices.shape[1] if s.cache.shape[0] else 0 for s in (window, extra))
    shape = shape or shape_of(heads)
    head_blocks, blocks = layout.cdiv(heads, shape.block_h), layout.cdiv(width0, KEYS) + layout.cdiv(width1, KEYS)
    cut = cut_of(tokens, heads, head_dim, head_blocks, blocks, KEYS, gpu, fusion.batch_invariant, splits)
    parts = part_buffers(cut.tokens, cut.splits, heads, head_dim, q) if cut.splits > 1 else None
    pages0, pages1 = (layout.byte_pages(s.cache, "fp8_ds_mla", s.block_size) for s in (window, extra))
    positions, position_stride, table, table_strides, max_pos = fusion.rope()
    for first in range(0, tokens, cut.tokens):
        end = min(tokens, first + cut.tokens)
        sparse_mla_decode_few_hopper_kernel[((end - first) * head_blocks * cut.splits,)](
            *(parts or into[:2]),
            into.scale,
            q,
            pages0.view(torch.int32),
            pages0.view(torch.int64),
            window.indices,
            window.lens,
            pages1.view(torch.int32),
            pages1.view(torch.int64),
            extra.indices,
            extra.lens,
            sink,
            positions,
            table,
            scale * LOG2_E.value,
            fusion.q_norm_eps,
            cut.splits,
            cut.least,
            first,
            tokens,
            into.padded_tokens(),
            *into.strides(),
            into.lse_stride(),
            q.stride(0),
            q.stride(1),
            pages0.stride(0) // PAGE_ALIGN,
            pages1.stride(0) // PAGE_ALIGN,
            window.indices.stride(0),
            extra.indices.stride(0),
            window.lens.stride(0),
            extra.lens.stride(0),
            position_stride,
            table_strides[0],
            max_pos,
            width0,
            width1,
            pages0.shape[0] * window.block_size,
            pages1.shape[0] * extra.block_size,
            H=heads,
            BLOCK_H=shape.block_h,
            BUFFERS=shape.buffers,
            LOG_PAGE0=window.block_size.bit_length() - 1,
            LOG_PAGE1=extra.block_size.bit_length() - 1,
            PRODUCER_REGISTERS=shape.registers,
            WIDE=WIDE,
            SPLIT=cut.splits > 1,
            num_warps=4,
            # A contracted multiply and add rounds once where the separate ops round twice.
            enable_fp_fusion=False,
            **(fusion if cut.splits == 1 else fusion.front()).constants(),
        )
        if parts is not None:
            split_softmax(into, *parts, sink, fusion, torch.bfloat16, first, end, gpu.capability >= FIRST_DEPENDENT)
    return into.pair()
