"""Launch of the Hopper kernel for sparse attention over a flat workspace, and which calls it takes."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .. import layout
from .gpu import Gpu
from .launch import launch_kernel
from .sparse_mla_decode_plan import PLAIN, Fusion, Results, results_for
from .sparse_mla_prefill_kernel_hopper import sparse_mla_prefill_hopper_kernel
from .sparse_mla_prefill_portable import Rows, outputs
from .split_softmax import LOG2_E

HEADS = 64
RIGHT_REGISTERS, GATHERER_REGISTERS = 168, 80
FUSED_RIGHT_REGISTERS = 176
"""Of a thread of the right warpgroup, where something is fused; the left one has 8 less for it."""
ROW_ALIGN = 16
"""Bytes that what is copied starts at multiples of; and elements, for Triton looks at strides as they are."""
MOST_ROPE, LIMIT = 64, 2**31
_HEAD_ROWS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


def hopper_refuses(q: Tensor, kv: Tensor, rows: Rows, scale: float, sink: Tensor | None, fusion: Fusion = PLAIN) -> str:
    """Why this kernel cannot take a call that the portable one can, or what `fusion` adds to it; "" if it can."""
    _, heads, head_dim = q.shape
    if q.dtype is not torch.bfloat16 or kv.dtype is not torch.bfloat16 or head_dim != layout.HEAD_DIM or heads == 0:
        return f"it takes bfloat16 vectors of {layout.HEAD_DIM} dims"
    if q.stride(2) != 1 or kv.stride(1) != 1:
        return "it takes queries and keys that are rows"
    if kv.shape[0] == 0 or kv.stride(0) % ROW_ALIGN or kv.data_ptr() % ROW_ALIGN:
        return f"it takes a workspace that has rows, a multiple of {ROW_ALIGN} elements apart"
    apart = _strides(q)
    if min(apart) < head_dim or any(n * q.element_size() % ROW_ALIGN for n in apart) or q.data_ptr() % ROW_ALIGN:
        return f"it takes queries of their own that start at multiples of {ROW_ALIGN} bytes"
    if not scale > 0:
        return "it takes positive scales"
    table = fusion.cos_sin_cache
    if table is not None and (table.shape[1] > MOST_ROPE or table.stride(1) != 1 or table.stride(0) >= LIMIT):
        return f"it turns {MOST_ROPE} columns at most, by a table of rows"
    neighbours = [rows.indices] if sink is None else [rows.indices, sink]
    return "" if all(x.stride(-1) == 1 for x in neighbours) else "it takes indices and sinks that are neighbours"


def _strides(heads: Tensor) -> list[int]:
    """How far apart tokens and heads are. That of one may be anything, and is not used."""
    return [n if size > 1 else layout.HEAD_DIM for n, size in zip(heads.stride(), heads.shape[:2], strict=False)]


def _descriptor(heads: Tensor) -> TensorDescriptor:
    """`[T, H, 512]` in tiles of 64 heads and 256 dims."""
    return TensorDescriptor(
        heads, list(heads.shape), [*_strides(heads), 1], [1, HEADS, layout.HEAD_DIM // 2], _HEAD_ROWS
    )


def launch_hopper(
    q: Tensor, kv: Tensor, rows: Rows, scale: float, sink: Tensor | None, gpu: Gpu
) -> tuple[Tensor, Tensor, Tensor]:
    """`out`, `max_logits` and `lse`, as `launch` of the portable kernel."""
    out, max_logits, lse = outputs(q)
    _launch(Results(out, lse), max_logits, q, kv, rows, scale, sink, gpu, PLAIN)
    return out, max_logits, lse


def launch_fused(
    q: Tensor, kv: Tensor, rows: Rows, scale: float, sink: Tensor | None, gpu: Gpu, fusion: Fusion
) -> tuple[Tensor, Tensor]:
    """`out` and `lse`, or values and scales, with all that `fusion` asks for: as `launch` of the decode kernels."""
    into = results_for(q, fusion)
    _launch(into, None, q, kv, rows, scale, sink, gpu, fusion)
    return into.pair()


def _launch(
    into: Results,
    max_logits: Tensor | None,
    q: Tensor,
    kv: Tensor,
    rows: Rows,
    scale: float,
    sink: Tensor | None,
    gpu: Gpu,
    fusion: Fusion,
) -> None:
    """Into results that are contiguous, but for those that the copy engine stores."""
    tokens, heads, _ = q.shape
    if tokens * heads == 0:
        return
    as_tiles = not fusion.inverse_rope and fusion.n_groups == 0
    if as_tiles and fusion.q_norm_eps is None:
        fusion = PLAIN  # a table that nobody reads is no reason to compile again
    positions, position_stride, table, table_strides, max_pos = fusion.rope()
    items = tokens * layout.cdiv(heads, HEADS)
    launch_kernel(
        sparse_mla_prefill_hopper_kernel,
        (min(items, gpu.processors),),
        _descriptor(q),
        _descriptor(into.out) if as_tiles else None,
        None if as_tiles else into.out,
        into.scale,
        max_logits,
        into.lse,
        kv,
        rows.indices,
        rows.bounds,
        sink,
        positions,
        table,
        scale * LOG2_E.value,
        fusion.q_norm_eps,
        tokens,
        into.padded_tokens(),
        items,
        kv.stride(0),
        0 if rows.ragged else rows.indices.stride(0),
        0 if rows.bounds is None else rows.bounds.stride(0),
        position_stride,
        table_strides[0],
        max_pos,
        rows.width,
        rows.indices.numel(),
        kv.shape[0],
        RAGGED=rows.ragged,
        H=heads,
        RIGHT_REGISTERS=RIGHT_REGISTERS if fusion is PLAIN else FUSED_RIGHT_REGISTERS,
        GATHERER_REGISTERS=GATHERER_REGISTERS,
        num_warps=4,
        # A contracted multiply and add rounds once where the separate ops round twice.
        enable_fp_fusion=False,
        **fusion.constants(),
    )
