"""Sparse attention over a flat workspace: the launchers of `sparse_mla_prefill`, and the Triton kernel for any GPU.

As many programs as the GPU holds walk over (token, block of heads). Neighbours take the blocks of one token, so that
its keys come from memory once. A program gathers BLOCK_N keys at a time by index, and prefetches the next ones while
it works on these. On sm_90 the kernel of sparse_mla_prefill_sm90.py runs where it supports the call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import cdiv
from ...reference.attention.sparse_mla_prefill import PrefillArguments, RaggedPrefillArguments
from ..host.gpu import Gpu, gpu_of, sm90_module
from ..host.launch import DTYPES, launch_kernel
from .common import operand_dtype
from .split_combine import LN_2, LOG2_E, finish_softmax

MAX_HEAD_DIM = 512
COUNT_LIMIT = 2**31 - 2**10
"""Bound of 32-bit counters in kernels, which step a few blocks past the last element."""


class IndexRows(NamedTuple):
    """Rows of the workspace that each token attends: a matrix of indices, or one list of them.

    Attributes:
        indices: `[T, A]`, or `[N]` with `ragged`.
        bounds: lengths `[T]`, or None for A; with `ragged`, offsets `[T + 1]`.
        width: A, or the largest number of entries that count of a list's row.
    """

    indices: Tensor
    bounds: Tensor | None
    width: int
    ragged: bool = False


class PrefillCall(NamedTuple):
    """A call of `sparse_mla_prefill` or of its list form.

    Attributes:
        kv: the workspace, `[R, D]`. more: rows `[S, D]` from index R on, for kernels that take them.
    """

    q: Tensor
    kv: Tensor
    rows: IndexRows
    scale: float
    sink: Tensor | None = None
    more: Tensor | None = None


@triton.jit
def index_row(p_indices, p_bounds, token, index_strides, bound_stride, width, total, RAGGED: tl.constexpr):
    """Return the pointer to the first index of int64 `token`, the stride of indices, and their number, int32."""
    if RAGGED:
        begin = tl.load(p_bounds + token * bound_stride).to(tl.int64)
        end = tl.load(p_bounds + (token + 1) * bound_stride).to(tl.int64)
        first = tl.maximum(begin, 0)
        last = tl.minimum(tl.minimum(end, begin + width), total)
        # A row past the list is empty, and its address must not be computed.
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
    DTYPE: tl.constexpr,  # of the operands of both GEMMs, which accumulate in float32
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend every num_programs-th item from item p on; item i is head block i % HEAD_BLOCKS of a token."""
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
            # Indices are loaded one block ahead, so that the loads of their keys are issued at once.
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
    """Tiling of a launch; see the kernel's arguments of these names. `resident`: programs per SM."""

    block_h: int
    block_n: int
    warps: int
    stages: int
    resident: int = 1


def choose_tiles(gpu: Gpu, heads: int, dtype: torch.dtype) -> Tiles:
    """Return tiles for `heads` heads and operands of `dtype` that fit the GPU's registers and shared memory."""
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


def launch(call: PrefillCall, gpu: Gpu, tiles: Tiles | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Run the Triton kernel on `gpu`; return `out` `[T, H, D]`, `max_logits` and `lse` `[T, H]`.

    `tiles` overrule `choose_tiles`.
    """
    assert call.more is None, "the kernel for sm_90 alone reads rows of two tensors"
    q, kv, rows, sink = call.q, call.kv, call.rows, call.sink
    tokens, heads, head_dim = q.shape
    out, max_logits, lse = new_outputs(q)
    if lse.numel() == 0:
        return out, max_logits, lse
    dtype = operand_dtype(q, kv, "plain")
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
        call.scale * LOG2_E.value,
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
        DTYPE=DTYPES[dtype],
        BLOCK_H=tiles.block_h,
        BLOCK_N=tiles.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        STAGES=tiles.stages,
        num_warps=tiles.warps,
    )
    return out, max_logits, lse


def new_outputs(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate `out`, `max_logits` and `lse` for the queries `[T, H, D]`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    max_logits, lse = (torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) for _ in range(2))
    return out, max_logits, lse


def why_unsupported_sparse_mla_prefill(op: PrefillArguments | RaggedPrefillArguments) -> str:
    """Return why the kernels do not support a call, "" if they do."""
    if op.q.shape[2] > MAX_HEAD_DIM:
        return f"heads have at most {MAX_HEAD_DIM} dims, these have {op.q.shape[2]}"
    most = max(op.kv.shape[0], op.indices.shape[-1], op.q.shape[0] * op.q.shape[1])
    if most >= COUNT_LIMIT:
        return f"rows, indices, and heads of all tokens are fewer than {COUNT_LIMIT} each, the most are {most}"
    return ""


why_unsupported_sparse_mla_prefill_ragged = why_unsupported_sparse_mla_prefill


def sparse_mla_prefill(op: PrefillArguments) -> tuple[Tensor, Tensor, Tensor]:
    """Launch `sparse_mla_prefill`. Weights are rounded to the dtype of the keys; sums are float32.

    The bits of a token's result depend on nothing but its own arguments.
    """
    rows = IndexRows(op.indices, op.topk_length, op.indices.shape[1])
    return attend_rows(PrefillCall(op.q, op.kv, rows, op.scale, op.attn_sink))


def sparse_mla_prefill_ragged(op: RaggedPrefillArguments) -> tuple[Tensor, Tensor, Tensor]:
    """Launch `sparse_mla_prefill_ragged`, with the guarantees of `sparse_mla_prefill`."""
    rows = IndexRows(op.indices, op.indptr, op.width(), ragged=True)
    return attend_rows(PrefillCall(op.q, op.kv, rows, op.scale, op.attn_sink))


def attend_rows(call: PrefillCall) -> tuple[Tensor, Tensor, Tensor]:
    """Run the best kernel for a call; return `out`, `max_logits` and `lse`."""
    gpu = gpu_of(call.q.device)
    sm90 = sm90_module(gpu, "attention.sparse_mla_prefill_sm90")
    if sm90 is not None and not sm90.why_unsupported(call):
        return sm90.launch(call, gpu)
    return launch(call, gpu)
