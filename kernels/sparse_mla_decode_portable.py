"""Sparse MLA decode on any GPU that Triton has; reference/sparse_mla_decode.py defines it.

A program attends BLOCK_H heads of one token to its share of the token's keys, BLOCK_N of them at a time: the window
cache first, then the compressed one, in one loop. With few tokens the keys of a token are split among programs, so
that all of the GPU works, and a second kernel joins the parts. The grid follows from shapes. Lengths are read on the
device, and the programs of a token share what there is equally.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import PAGE_LAYOUTS, byte_pages, cdiv
from ..reference.sparse_mla_decode import output_dtype
from .gpu import Gpu
from .kv_load import DATA_BYTES, decode_keys, e4m3_value, fetch_keys, valid_slots
from .split_softmax import LOG2_E, finish_softmax, part_buffers, split_softmax

FIRST_DEPENDENT = 90  # compute capability from which a kernel can start before the one it depends on has ended
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _length(p_lens, stride, token, width):
    """int32 number of columns that count in a token's row of indices."""
    length = tl.load(p_lens + token * stride)
    return tl.minimum(tl.maximum(length, 0), width).to(tl.int32)


@triton.jit
def _load_q(p_q, stride_dim, m_head, DTYPE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """DTYPE `[BLOCK_H, BLOCK_D]` from pointers to heads `[BLOCK_H]`; bytes are e4m3."""
    o_dim = tl.arange(0, BLOCK_D)
    m_q = m_head[:, None] & (o_dim < D)[None, :]
    q = tl.load(p_q[:, None] + (o_dim * stride_dim)[None, :], mask=m_q, other=0)
    if p_q.dtype.element_ty == tl.uint8:
        q = e4m3_value(q)
    return q.to(DTYPE)


@triton.jit
def _block_slots(block, end, blocks0, row0, row1, BLOCK_N: tl.constexpr):
    """int32 slots `[BLOCK_N]` of a block of keys, in the cache that the block belongs to; -1 from block `end` on."""
    p_row0, stride_column0, length0, capacity0 = row0
    p_row1, stride_column1, length1, capacity1 = row1
    first = block < blocks0
    o_column = (block - tl.where(first, 0, blocks0)) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Chosen as integers: a choice between these pointers ends Triton 3.6's compilation for AMD GPUs.
    return valid_slots(
        tl.where(first, p_row0.to(tl.int64), p_row1.to(tl.int64)).to(p_row0.dtype),
        tl.where(first, stride_column0, stride_column1),
        o_column,
        tl.where(block < end, tl.where(first, length0, length1), 0),
        tl.where(first, capacity0, capacity1),
    )


@triton.jit
def _fetch_block(
    first,
    slot,
    cache0,
    cache1,
    PAGE0: tl.constexpr,
    PAGE1: tl.constexpr,
    FORMAT: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """What is stored at `slot` `[BLOCK_N]` of the first or of the second cache."""
    p_cache0, stride_page0, stride_row0, stride_dim0 = cache0
    p_cache1, stride_page1, stride_row1, stride_dim1 = cache1
    safe = tl.maximum(slot, 0)
    return fetch_keys(
        tl.where(first, p_cache0, p_cache1),
        tl.where(first, stride_page0, stride_page1).to(tl.int64),
        tl.where(first, stride_row0, stride_row1),
        tl.where(first, stride_dim0, stride_dim1),
        slot,
        tl.where(first, safe // PAGE0, safe // PAGE1),
        tl.where(first, safe % PAGE0, safe % PAGE1),
        tl.where(first, PAGE0, PAGE1) * DATA_BYTES,
        FORMAT,
        D,
        BLOCK_D,
    )


@triton.jit(do_not_specialize=["splits", "capacity0", "capacity1", "width0", "width1"])
def sparse_mla_decode_kernel(
    p_out,  # [T, H, D], or parts [T, splits, H, D] float32; contiguous
    p_lse,  # [T, H] float32, or parts [T, splits, H] in base 2; contiguous
    p_q,  # [T, H, D], e4m3 as uint8
    p_cache0,  # [P, page_bytes] uint8 or [P, S, D]
    p_indices0,  # [T, W] int
    p_lens0,  # [T] int
    p_cache1,
    p_indices1,  # [T, K] int
    p_lens1,
    p_sink,  # [H] float32 or None
    p_kv_scale,  # [1] float32 or None
    scale,  # of the scores, times log2(e)
    splits,
    q_strides,
    cache0_strides,  # of a page, a row and a dim; a byte cache has the first alone
    cache1_strides,
    indices0_strides,
    indices1_strides,
    lens0_stride,
    lens1_stride,
    sink_stride,
    width0,
    width1,
    capacity0,  # slots in the cache
    capacity1,
    H: tl.constexpr,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    PAGE0: tl.constexpr,  # tokens in a page
    PAGE1: tl.constexpr,
    DTYPE: tl.constexpr,  # of the matrix products' operands; they add up in float32
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEYS_FIRST: tl.constexpr,  # scores are [keys, heads] and the sum is [dims, heads], or both the other way round
    PREFETCH: tl.constexpr,  # load the next block of keys before working on this one
    SPLIT: tl.constexpr,
    DEPENDENT: tl.constexpr,  # lets the kernel that joins the parts start early
):
    """Program p takes head block p % HEAD_BLOCKS of part p // HEAD_BLOCKS; the parts of a token are neighbours."""
    HEAD_BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    KEY_AXIS: tl.constexpr = 0 if KEYS_FIRST else 1
    HEAD_AXIS: tl.constexpr = 1 - KEY_AXIS
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0) // HEAD_BLOCKS
    token = (part // splits).to(tl.int64)
    o_head = tl.program_id(0) % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    m_head = o_head < H

    length0 = _length(p_lens0, lens0_stride, token, width0)
    length1 = _length(p_lens1, lens1_stride, token, width1)
    blocks0 = tl.cdiv(length0, BLOCK_N)
    blocks = blocks0 + tl.cdiv(length1, BLOCK_N)
    begin = blocks * (part % splits) // splits
    end = blocks * (part % splits + 1) // splits
    row0 = p_indices0 + token * indices0_strides[0], indices0_strides[1], length0, capacity0
    row1 = p_indices1 + token * indices1_strides[0], indices1_strides[1], length1, capacity1
    cache0 = p_cache0, cache0_strides[0], cache0_strides[1], cache0_strides[2]
    cache1 = p_cache1, cache1_strides[0], cache1_strides[1], cache1_strides[2]

    p_q += token * q_strides[0] + o_head.to(tl.int64) * q_strides[1]
    q = _load_q(p_q, q_strides[2], m_head, DTYPE, D, BLOCK_D)
    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    if KEYS_FIRST:
        q = tl.trans(q)
        acc = tl.zeros((BLOCK_D, BLOCK_H), tl.float32)
    else:
        acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)

    slot = _block_slots(begin, end, blocks0, row0, row1, BLOCK_N)
    live = slot >= 0
    if PREFETCH:
        stored = _fetch_block(begin < blocks0, slot, cache0, cache1, PAGE0, PAGE1, FORMAT, D, BLOCK_D)
        k = decode_keys(stored, p_kv_scale, FORMAT, DTYPE)
        slot = _block_slots(begin + 1, end, blocks0, row0, row1, BLOCK_N)
    for block in tl.range(begin, end, num_stages=1):
        fetched = block + 1 if PREFETCH else block
        stored = _fetch_block(fetched < blocks0, slot, cache0, cache1, PAGE0, PAGE1, FORMAT, D, BLOCK_D)
        fetched_live = slot >= 0
        slot = _block_slots(fetched + 1, end, blocks0, row0, row1, BLOCK_N)
        if not PREFETCH:
            k = decode_keys(stored, p_kv_scale, FORMAT, DTYPE)
            live = fetched_live

        # [BLOCK_N, BLOCK_H] if KEYS_FIRST, else [BLOCK_H, BLOCK_N]
        if KEYS_FIRST:
            scores = tl.dot(k, q, input_precision="ieee")
        else:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where(tl.expand_dims(live, HEAD_AXIS), scores * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, KEY_AXIS))
        # -inf - -inf is NaN: a head without keys so far is shifted by zero.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        rescale = tl.exp2(top - shift)
        weights = tl.exp2(scores - tl.expand_dims(shift, KEY_AXIS))
        total = total * rescale + tl.sum(weights, KEY_AXIS)
        acc *= tl.expand_dims(rescale, KEY_AXIS)
        if KEYS_FIRST:
            acc = tl.dot(tl.trans(k), weights.to(DTYPE), acc, input_precision="ieee")
        else:
            acc = tl.dot(weights.to(DTYPE), k, acc, input_precision="ieee")
        top = new_top
        if PREFETCH:
            k = decode_keys(stored, p_kv_scale, FORMAT, DTYPE)
            live = fetched_live

    o_row = part.to(tl.int64) * H + o_head
    if SPLIT:
        shift = tl.where(top == float("-inf"), 0.0, top)
        lse = tl.where(total == 0, float("-inf"), shift + tl.log2(total))
        factor = tl.where(total == 0, 0.0, 1.0 / total)
    else:
        factor, lse = finish_softmax(top, total, p_sink, sink_stride, o_head, m_head)
    tl.store(p_lse + o_row, lse, mask=m_head)
    o_dim = tl.arange(0, BLOCK_D)
    out = (acc * tl.expand_dims(factor, KEY_AXIS)).to(p_out.dtype.element_ty)
    p_out += tl.expand_dims(o_row * D, KEY_AXIS) + tl.expand_dims(o_dim, HEAD_AXIS)
    tl.store(p_out, out, mask=tl.expand_dims(m_head, KEY_AXIS) & tl.expand_dims(o_dim < D, HEAD_AXIS))


class Tiles(NamedTuple):
    """How a launch is cut up; see the kernel's arguments of these names."""

    block_h: int
    block_n: int
    warps: int
    keys_first: bool = False
    prefetch: bool = False


def choose_tiles(gpu: Gpu, heads: int, dtype: torch.dtype) -> Tiles:
    """Tiles for `heads` heads and operands of `dtype`: no more rows than heads need, within the GPU's shared memory."""
    if dtype is torch.float32:
        return Tiles(16, 16, 4)
    if gpu.backend == "cuda" and gpu.capability // 10 in (9, 10):
        if heads <= 16:
            return Tiles(16, 64, 8, prefetch=True)
        return Tiles(32, 64, 8, keys_first=True, prefetch=True) if heads <= 32 else Tiles(64, 64, 8)
    if heads <= 16:
        return Tiles(16, 32, 4, prefetch=True)
    if gpu.backend == "hip":
        return Tiles(32, 16, 4, prefetch=True) if heads <= 32 else Tiles(64, 16, 8, prefetch=True)
    return Tiles(32, 32, 8, keys_first=True, prefetch=True)


class Source(NamedTuple):
    """One cache, and the slots to read from it."""

    cache: Tensor
    indices: Tensor
    lens: Tensor
    block_size: int

    def tensors(self, cache_format: str) -> tuple[Tensor, Tensor, Tensor]:
        """As the kernel takes them."""
        cache = byte_pages(self.cache, cache_format, self.block_size) if cache_format in PAGE_LAYOUTS else self.cache
        return cache, self.indices, self.lens


def launch(
    q: Tensor,
    window: Source,
    extra: Source,
    cache_format: str,
    scale: float,
    sink: Tensor | None,
    kv_scale: Tensor | None,
    gpu: Gpu,
    tiles: Tiles | None = None,
    splits: int = 0,
) -> tuple[Tensor, Tensor]:
    """`out` `[T, H, D]` and `lse` `[T, H]` by the portable kernel.

    Args:
        gpu: what `q` is on; tiles: None for what `choose_tiles` says.
        splits: into how many parts the keys of a token are cut; 0 fills the GPU once.
    """
    tokens, heads, head_dim = q.shape
    out, lse = outputs(q)
    if lse.numel() == 0:
        return out, lse
    cache0, indices0, lens0 = window.tensors(cache_format)
    cache1, indices1, lens1 = extra.tensors(cache_format)
    dtype = operand_dtype(q, cache0, cache_format)
    tiles = tiles or choose_tiles(gpu, heads, dtype)
    width0, width1 = indices0.shape[1], indices1.shape[1]
    programs = tokens * cdiv(heads, tiles.block_h)
    blocks = cdiv(width0, tiles.block_n) + cdiv(width1, tiles.block_n)
    splits = splits or part_count(programs, blocks, gpu)
    dependent = splits > 1 and gpu.capability >= FIRST_DEPENDENT
    part, part_lse = part_buffers(tokens, splits, heads, head_dim, q) if splits > 1 else (out, lse)
    sparse_mla_decode_kernel[(programs * splits,)](
        part,
        part_lse,
        q.view(torch.uint8) if q.element_size() == 1 else q,
        cache0,
        indices0,
        lens0,
        cache1,
        indices1,
        lens1,
        sink,
        kv_scale,
        scale * LOG2_E.value,
        splits,
        q.stride(),
        (*cache0.stride(), 0, 0)[:3],
        (*cache1.stride(), 0, 0)[:3],
        indices0.stride(),
        indices1.stride(),
        lens0.stride(0),
        lens1.stride(0),
        0 if sink is None else sink.stride(0),
        width0,
        width1,
        cache0.shape[0] * window.block_size,
        cache1.shape[0] * extra.block_size,
        H=heads,
        D=head_dim,
        FORMAT=cache_format,
        PAGE0=window.block_size,
        PAGE1=extra.block_size,
        DTYPE=_DTYPES[dtype],
        BLOCK_H=tiles.block_h,
        BLOCK_N=tiles.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        KEYS_FIRST=tiles.keys_first,
        PREFETCH=tiles.prefetch,
        SPLIT=splits > 1,
        DEPENDENT=dependent,
        num_warps=tiles.warps,
    )
    if splits > 1:
        split_softmax(out, lse, part, part_lse, sink, dependent)
    return out, lse


def operand_dtype(q: Tensor, cache: Tensor, cache_format: str) -> torch.dtype:
    """dtype of the matrix products' operands: the keys' if the queries fit in it, else float32."""
    keys = cache.dtype if cache_format == "plain" else torch.bfloat16
    return keys if q.dtype in (keys, torch.float8_e4m3fn) else torch.float32


def part_count(programs: int, blocks: int, gpu: Gpu) -> int:
    """Into how many parts the `blocks` of a token's keys are cut, so that `programs` fill the GPU at most once."""
    return max(1, min(blocks, gpu.processors // programs))


def outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised `out` and `lse` for the queries `[T, H, D]`."""
    out = torch.empty(q.shape, dtype=output_dtype(q), device=q.device)
    return out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
