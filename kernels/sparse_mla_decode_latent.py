"""`sparse_mla_decode_latent` on any GPU that Triton has: scores from all dims of a row, values from its first V.

A program attends one part of a token's keys for a block of its heads, and loads a key once: the V dims that score are
the values too, the others are few. Parts are cut and joined as those of `sparse_mla_decode`.

128 heads over 2048 keys of 576 dims read 2.4 MB and compute 0.57 GFLOP for a token: at 4.8 TB/s and 600 TFLOP/s 0.5 and
0.95 us, so that matrix units are the floor. An H200 takes 429 us for 128 tokens, 170 TFLOP/s (`dsv4 bench
attention_backends`): the sums of 64 heads fill the registers of a multiprocessor, and while a program waits for keys or
weights no other is there to work. Other cuts do not help: 427 to 431 us with two to four stages of 64 keys, 472 with
one, 505 to 547 with 32 keys, 713 and 805 with 16, 625 with 128; 8 warps each, with fewer the sums spill.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import cdiv
from ..reference.sparse_mla_decode import output_dtype
from .attention_rows import DTYPES
from .gpu import Gpu, gpu_of
from .launch import launch_kernel
from .sparse_mla_decode_plan import PLAIN, cut_of, operand_dtype, outputs
from .sparse_mla_decode_portable import Tiles, choose_tiles
from .split_softmax import LOG2_E, finish_softmax, part_buffers, part_softmax, split_softmax

MAX_VALUE_DIM = 512
MAX_SLOTS = 2**31


@triton.jit(do_not_specialize=["splits", "least", "first", "width", "slots"], do_not_specialize_on_alignment=["p_lens"])
def sparse_mla_decode_latent_kernel(
    p_out,  # [T, H, V], contiguous; with SPLIT [tokens of this launch, splits, H, V] float32
    p_lse,  # [T, H] float32, contiguous; with SPLIT [tokens of this launch, splits, H] in base 2
    p_q,  # [T, H, D]
    p_cache,  # [P, PAGE, D]
    p_indices,  # [>= T, width] int
    p_lens,  # [>= T] int
    scale,  # of the scores, times log2(e)
    splits,
    least,  # blocks of keys in a part
    first,  # token of this launch
    q_strides,
    cache_strides,
    index_strides,
    len_stride,
    width,
    slots,
    H: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,  # D - V
    PAGE: tl.constexpr,
    DTYPE: tl.constexpr,  # of the matrix products' operands; they add up in float32
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Program p takes part p % splits of head block p // splits % HEAD_BLOCKS of a token."""
    HEAD_BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    part = tl.program_id(0) % splits
    item = tl.program_id(0) // splits
    local = (item // HEAD_BLOCKS).to(tl.int64)
    token = first + local
    o_head = item % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    m_head = o_head < H
    o_value, o_rest = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_R)
    m_value, m_rest = (o_value < V)[None, :], (o_rest < R)[None, :]
    length = tl.minimum(tl.maximum(tl.load(p_lens + token * len_stride), 0), width).to(tl.int32)
    blocks = tl.cdiv(length, BLOCK_N)
    parts = tl.minimum(splits, tl.cdiv(blocks, least))
    size = tl.cdiv(blocks, tl.maximum(parts, 1))
    begin = part * size * BLOCK_N
    end = tl.minimum(begin + size * BLOCK_N, length)

    p_heads = (p_q + token * q_strides[0] + o_head.to(tl.int64) * q_strides[1])[:, None]
    # [BLOCK_H, BLOCK_V] and [BLOCK_H, BLOCK_R]
    q = tl.load(p_heads + (o_value * q_strides[2])[None, :], mask=m_head[:, None] & m_value, other=0.0).to(DTYPE)
    p_q_rest = p_heads + ((V + o_rest) * q_strides[2])[None, :]
    q_rest = tl.load(p_q_rest, mask=m_head[:, None] & m_rest, other=0.0).to(DTYPE)
    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_V), tl.float32)
    for start in range(begin, end, BLOCK_N):
        o_column = start + tl.arange(0, BLOCK_N)
        p_column = p_indices + token * index_strides[0] + o_column.to(tl.int64) * index_strides[1]
        slot = tl.load(p_column, mask=o_column < end, other=-1).to(tl.int64)
        live = (slot >= 0) & (slot < slots)
        slot = tl.where(live, slot, 0)
        p_key = (p_cache + slot // PAGE * cache_strides[0] + slot % PAGE * cache_strides[1])[:, None]
        # [BLOCK_N, BLOCK_V] and [BLOCK_N, BLOCK_R]
        k = tl.load(p_key + (o_value * cache_strides[2])[None, :], mask=live[:, None] & m_value, other=0.0).to(DTYPE)
        p_k_rest = p_key + ((V + o_rest) * cache_strides[2])[None, :]
        k_rest = tl.load(p_k_rest, mask=live[:, None] & m_rest, other=0.0).to(DTYPE)
        # [BLOCK_H, BLOCK_N]
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        scores = tl.where(live[None, :], scores * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # -inf - -inf is NaN: a head without keys so far is shifted by zero.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        rescale = tl.exp2(top - shift)
        weights = tl.exp2(scores - shift[:, None])
        total = total * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(DTYPE), k, acc * rescale[:, None], input_precision="ieee")
        top = new_top
    if SPLIT:
        factor, lse = part_softmax(top, total)
        o_row = (local * splits + part) * H + o_head
    else:
        factor, lse = finish_softmax(top, total, None, 0, o_head, m_head)
        o_row = token * H + o_head
    tl.store(p_lse + o_row, lse, mask=m_head)
    out = (acc * factor[:, None]).to(p_out.dtype.element_ty)
    tl.store(p_out + o_row[:, None] * V + o_value[None, :], out, mask=m_head[:, None] & m_value)


def choose_latent_tiles(gpu: Gpu, heads: int, dtype: torch.dtype) -> Tiles:
    """Tiles for `heads` heads and operands of `dtype`."""
    tiles = choose_tiles(gpu, heads, dtype)
    if gpu.capability // 10 == 10 and tiles.block_h == 64:
        # Operands pass through shared memory there more often: 64 keys would need 345 KiB of its 227.
        return tiles._replace(block_n=32)
    return tiles


def sparse_mla_decode_latent_refuses(
    q: Tensor, k_cache: Tensor, indices: Tensor, lens: Tensor, block_size: int, scale: float, value_dim: int
) -> str:
    """Why the kernel cannot take a call, "" if it can."""
    if value_dim > MAX_VALUE_DIM or q.shape[2] - value_dim > MAX_VALUE_DIM:
        return f"the kernel holds {MAX_VALUE_DIM} dims of values and as many others, of {value_dim} and {q.shape[2]}"
    if k_cache.shape[0] * block_size >= MAX_SLOTS:
        return f"the kernel counts fewer than {MAX_SLOTS} slots"
    return ""


def sparse_mla_decode_latent(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    block_size: int,
    scale: float,
    value_dim: int,
    tiles: Tiles | None = None,
    splits: int = 0,
) -> tuple[Tensor, Tensor]:
    """See the reference. Weights are rounded to the dtype of the keys before they meet them; sums are float32.

    The same call gives the same bits. `tiles` and `splits` overrule what is chosen for the GPU.
    """
    tokens, heads, head_dim = q.shape
    into = outputs(q[..., :value_dim])
    if tokens * heads == 0:
        return into.pair()
    gpu, dtype = gpu_of(q.device), operand_dtype(q, k_cache, "plain")
    tiles = tiles or choose_latent_tiles(gpu, heads, dtype)
    width, head_blocks = indices.shape[1], cdiv(heads, tiles.block_h)
    blocks = cdiv(width, tiles.block_n)
    cut = cut_of(tokens, heads, value_dim, head_blocks, blocks, tiles.block_n, gpu, False, splits)
    parts = part_buffers(cut, heads, value_dim, q) if cut.splits > 1 else None
    for first in range(0, tokens, cut.tokens):
        end = min(tokens, first + cut.tokens)
        launch_kernel(
            sparse_mla_decode_latent_kernel,
            ((end - first) * head_blocks * cut.splits,),
            *(parts or into)[:2],
            q,
            k_cache,
            indices,
            lens,
            scale * LOG2_E.value,
            cut.splits,
            cut.least,
            first,
            q.stride(),
            k_cache.stride(),
            indices.stride(),
            lens.stride(0),
            width,
            k_cache.shape[0] * block_size,
            H=heads,
            V=value_dim,
            R=head_dim - value_dim,
            PAGE=block_size,
            DTYPE=DTYPES[dtype],
            BLOCK_H=tiles.block_h,
            BLOCK_N=tiles.block_n,
            BLOCK_V=max(16, triton.next_power_of_2(value_dim)),
            BLOCK_R=max(16, triton.next_power_of_2(head_dim - value_dim)),
            SPLIT=cut.splits > 1,
            num_warps=tiles.warps,
        )
        if parts is not None:
            split_softmax(into, parts, None, PLAIN, output_dtype(q), first, end, False)
    return into.pair()
