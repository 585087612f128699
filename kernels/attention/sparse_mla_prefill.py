"""Sparse attention over a flat workspace on any GPU that Triton has; reference/sparse_mla_prefill.py defines it.

As many programs as the GPU holds walk over (token, block of heads). Neighbours take the blocks of one token, so that
its keys come from memory once. A program gathers BLOCK_N keys at a time by index, and the next ones while it works on
these.

Launchers of `sparse_mla_prefill` and its list form: on Hopper the kernel made for it where that fits, else the
portable one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import cdiv
from ..host.gpu import Gpu, gpu_of, sm90_module
from ..host.launch import launch_kernel
from .split_combine import LN_2, LOG2_E, finish_softmax

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class Rows(NamedTuple):
    """Which rows of the workspace each token attends: a matrix of indices, or one list of them.

    indices: `[T, A]`, or `[N]` with `ragged`. bounds: lengths `[T]`, or None for A; or with `ragged` offsets `[T + 1]`.
    width: A, or the most entries of a list's row that count.
    """

    indices: Tensor
    bounds: Tensor | None
    width: int
    ragged: bool = False


@triton.jit
def index_row(p_indices, p_bounds, token, index_strides, bound_stride, width, total, RAGGED: tl.constexpr):
    """Pointer to the first index of int64 `token`, the distance of two, and how many there are, int32."""
    if RAGGED:
        begin = tl.load(p_bounds + token * bound_stride).to(tl.int64)
        end = tl.load(p_bounds + (token + 1) * bound_stride).to(tl.int64)
        first = tl.maximum(begin, 0)
        last = tl.minimum(tl.minimum(end, begin + width), total)
        # A row behind the list is empty, and must not be pointed at.
        length = tl.maximum(last - first, 0)
        p_row = p_indices + tl.where(length > 0, first, 0) * index_strides[1]
    else:
        length = tl.full((), width, tl.int64)
        if p_bounds is not None:
            length = tl.minimum(tl.maximum(tl.load(p_bounds + token * bound_stride).to(tl.int64), 0), width)
        p_row = p_indices + token * index_strides[0]
    return p_row, index_strides[1], length.to(tl.int32)


@triton.jit(
    do_not_specialize=["items", "width", "total", "workspace_rows"], do_not_specialize_on_alignment=["p_bounds"]
)
def sparse_mla_prefill_kernel(
    p_out,  # [T, H, D], contiguous
    p_max,  # [T, H] float32, contiguous
    p_lse,  # [T, H] float32, contiguous
    p_q,  # [T, H, D]
    p_kv,  # [workspace_rows, D]
    p_indices,  # [T, width] int, or [total] int
    p_bounds,  # [T] int or None, or [T + 1] int
    p_sink,  # [H] float32 or None
    scale,  # of the scores, times log2(e)
    items,  # tokens times blocks of heads
    q_strides,
    kv_strides,
    index_strides,  # of a token, which a list does not have, and of an index
    bound_stride,
    sink_stride,
    width,
    total,
    workspace_rows,
    RAGGED: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    DTYPE: tl.constexpr,  # of the matrix products' operands; they add up in float32
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program p takes every num_programs-th item from item p on; item i is head block i % HEAD_BLOCKS of a token."""
    HEAD_BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    o_dim = tl.arange(0, BLOCK_D)
    o_key = tl.arange(0, BLOCK_N)
    m_dim = (o_dim < D)[None, :]
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0)):
        token = tl.full((), item // HEAD_BLOCKS, tl.int64)
        o_head = item % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
        m_head = o_head < H
        p_row, stride_index, length = index_row(
            p_indices, p_bounds, token, index_strides, bound_stride, width, total, RAGGED
        )
        p_heads = p_q + token * q_strides[0] + o_head.to(tl.int64) * q_strides[1]
        m_q = m_head[:, None] & m_dim
        # [BLOCK_H, BLOCK_D]
        q = tl.load(p_heads[:, None] + (o_dim * q_strides[2])[None, :], mask=m_q, other=0.0).to(DTYPE)
        top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
        sums = tl.zeros((BLOCK_H,), tl.float32)
        acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
        row = tl.load(p_row + o_key.to(tl.int64) * stride_index, mask=o_key < length, other=-1)
        for start in tl.range(0, length, BLOCK_N, num_stages=STAGES):
            # Indices are there one block before their keys, whose loads are then issued at once.
            o_column = start + BLOCK_N + o_key
            next_row = tl.load(p_row + o_column.to(tl.int64) * stride_index, mask=o_column < length, other=-1)
            live = (row >= 0) & (row < workspace_rows)
            p_keys = p_kv + tl.where(live, row, 0).to(tl.int64) * kv_strides[0]
            m_key = live[:, None] & m_dim
            # [BLOCK_N, BLOCK_D]
            k = tl.load(p_keys[:, None] + (o_dim * kv_strides[1])[None, :], mask=m_key, other=0.0).to(DTYPE)
            # [BLOCK_H, BLOCK_N]
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            scores = tl.where(live[None, :], scores * scale, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            # -inf - -inf is NaN: a head without keys so far is shifted by zero.
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            rescale = tl.exp2(top - shift)
            weights = tl.exp2(scores - shift[:, None])
            sums = sums * rescale + tl.sum(weights, 1)
            acc = tl.dot(weights.to(DTYPE), k, acc * rescale[:, None], input_precision="ieee")
            top, row = new_top, next_row
        factor, lse = finish_softmax(top, sums, p_sink, sink_stride, o_head, m_head)
        o_row = token * H + o_head
        tl.store(p_max + o_row, top * LN_2, mask=m_head)
        tl.store(p_lse + o_row, lse, mask=m_head)
        out = (acc * factor[:, None]).to(p_out.dtype.element_ty)
        tl.store(p_out + o_row[:, None] * D + o_dim[None, :], out, mask=m_q)


class Tiles(NamedTuple):
    """How a launch is cut up; see the kernel's arguments of these names. `resident`: programs a processor holds."""

    block_h: int
    block_n: int
    warps: int
    stages: int
    resident: int = 1


def choose_tiles(gpu: Gpu, heads: int, dtype: torch.dtype) -> Tiles:
    """Tiles for `heads` heads and operands of `dtype`, within the GPU's registers and shared memory."""
    if dtype is torch.float32:
        return Tiles(16, 16, 4, 1)
    few = 16 if heads <= 16 else 32
    if gpu.backend == "cuda" and gpu.capability // 10 in (9, 10):
        if heads <= 32:
            return Tiles(few, 64, 8, 2, 2)
        return Tiles(64, 64, 8, 2) if gpu.capability // 10 == 9 else Tiles(64, 32, 8, 2)
    if gpu.backend == "hip":
        return Tiles(few, 16, 4, 1, 2) if heads <= 32 else Tiles(64, 16, 8, 1)
    return Tiles(few, 16, 4, 2, 2)


def operand_dtype(q: Tensor, kv: Tensor) -> torch.dtype:
    """dtype of the matrix products' operands: the keys' if the queries have it too, else float32."""
    return kv.dtype if q.dtype is kv.dtype else torch.float32


def launch(
    q: Tensor, kv: Tensor, rows: Rows, scale: float, sink: Tensor | None, gpu: Gpu, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`out` `[T, H, D]`, `max_logits` and `lse` `[T, H]` by the portable kernel.

    Args:
        gpu: what `q` is on; tiles: None for what `choose_tiles` says.
    """
    tokens, heads, head_dim = q.shape
    out, max_logits, lse = outputs(q)
    if lse.numel() == 0:
        return out, max_logits, lse
    dtype = operand_dtype(q, kv)
    tiles = tiles or choose_tiles(gpu, heads, dtype)
    items = tokens * cdiv(heads, tiles.block_h)
    launch_kernel(
        sparse_mla_prefill_kernel,
        (min(items, gpu.sms * tiles.resident),),
        out,
        max_logits,
        lse,
        q,
        kv,
        rows.indices,
        rows.bounds,
        sink,
        scale * LOG2_E.value,
        items,
        q.stride(),
        kv.stride(),
        (0, *rows.indices.stride())[-2:],
        0 if rows.bounds is None else rows.bounds.stride(0),
        0 if sink is None else sink.stride(0),
        rows.width,
        rows.indices.numel(),
        kv.shape[0],
        RAGGED=rows.ragged,
        H=heads,
        D=head_dim,
        DTYPE=_DTYPES[dtype],
        BLOCK_H=tiles.block_h,
        BLOCK_N=tiles.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        STAGES=tiles.stages,
        num_warps=tiles.warps,
    )
    return out, max_logits, lse


def outputs(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised `out`, `max_logits` and `lse` for the queries `[T, H, D]`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    max_logits, lse = (torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) for _ in range(2))
    return out, max_logits, lse


MAX_HEAD_DIM = 512
LIMIT = 2**31 - 2**10
"""What is counted in 32 bits, up to some blocks behind the last element."""


def sparse_mla_prefill_refuses(
    q: Tensor, kv: Tensor, indices: Tensor, topk_length: Tensor | None, scale: float, attn_sink: Tensor | None = None
) -> str:
    """Why the kernel cannot take a call, "" if it can."""
    return _why_not(q, kv, indices)


def sparse_mla_prefill(
    q: Tensor, kv: Tensor, indices: Tensor, topk_length: Tensor | None, scale: float, attn_sink: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See the reference. Weights are rounded to the dtype of the keys before they meet them; sums are float32.

    A token's result depends on nothing but its own arguments, to the bit.
    """
    return attend_rows(q, kv, Rows(indices, topk_length, indices.shape[1]), scale, attn_sink)


def sparse_mla_prefill_ragged_refuses(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    indptr: Tensor,
    scale: float,
    attn_sink: Tensor | None = None,
    max_row: int = 0,
) -> str:
    """Why the kernel cannot take a call, "" if it can."""
    return _why_not(q, kv, indices)


def sparse_mla_prefill_ragged(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    indptr: Tensor,
    scale: float,
    attn_sink: Tensor | None = None,
    max_row: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `sparse_mla_prefill`."""
    total = indices.shape[0]
    width = min(max_row, total) if max_row > 0 else total
    return attend_rows(q, kv, Rows(indices, indptr, width, ragged=True), scale, attn_sink)


def _why_not(q: Tensor, kv: Tensor, indices: Tensor) -> str:
    if q.shape[2] > MAX_HEAD_DIM:
        return f"the kernel holds vectors of at most {MAX_HEAD_DIM} dims, these have {q.shape[2]}"
    if max(kv.shape[0], indices.shape[-1], q.shape[0] * q.shape[1]) >= LIMIT:
        return f"the kernel counts fewer than {LIMIT} rows, indices, and heads of all tokens"
    return ""


def attend_rows(q: Tensor, kv: Tensor, rows: Rows, scale: float, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """`out`, `max_logits` and `lse` of either form."""
    gpu = gpu_of(q.device)
    hopper = sm90_module(gpu, "attention.sparse_mla_prefill_sm90")
    if hopper is not None and not hopper.hopper_refuses(q, kv, rows, scale, sink):
        return hopper.launch_hopper(q, kv, rows, scale, sink, gpu)
    return launch(q, kv, rows, scale, sink, gpu)
