"""Launchers of `sparse_mla_decode` and its `_out` form: on Hopper a kernel made for it where one fits, else the one for
any GPU.

A call has three parts beside its queries: the caches (`Source`), what is fused around attention (`Fusion`), and where
the results go (`Results`).

Launcher of `sparse_mla_decode_quant`; the kernels are those of `sparse_mla_decode`.

`sparse_mla_decode_ragged`: lists become padded rows in one small launch, which the kernel of `sparse_mla_decode`
attends.

The rows are 4 bytes for each of T * max_entries, written once and read once: a thousandth of the keys they select. So
a list gets that kernel's splits and its Hopper form, and costs one launch more.

`sparse_mla_decode_latent` on any GPU that Triton has: scores from all dims of a row, values from its first V.

A program attends one part of a token's keys for a block of its heads, and loads a key once: the V dims that score are
the values too, the others are few. Parts are cut and joined as those of `sparse_mla_decode`.

128 heads over 2048 keys of 576 dims read 2.4 MB and compute 0.57 GFLOP for a token: at 4.8 TB/s and 600 TFLOP/s 0.5 and
0.95 us, so that matrix units are the floor. An H200 takes 429 us for 128 tokens, 170 TFLOP/s (`dsv4 bench
attention_backends`): the sums of 64 heads fill the registers of a multiprocessor, and while a program waits for keys or
weights no other is there to work. Other cuts do not help: 427 to 431 us with two to four stages of 64 keys, 472 with
one, 505 to 547 with 32 keys, 713 and 805 with 16, 625 with 128; 8 warps each, with fewer the sums spill.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import ACT_TILE, PAD_INDEX, PAGE_LAYOUTS, SCALES_PER_WORD, cdiv
from ...reference.attention.sparse_mla_decode import group_heads, output_dtype
from ..device.quant import why_unsupported_fp8
from ..host.gpu import Gpu, gpu_of, sm90_module
from ..host.launch import launch_kernel
from ..host.pdl import pdl_option, pdl_prologue, supports_pdl
from .output_epilogue import DTYPES
from .sparse_mla_decode_by_rows import by_rows_refuses, decode_by_rows
from .sparse_mla_decode_plan import PLAIN, Fusion, Results, Source, cut_of, operand_dtype, outputs
from .sparse_mla_decode_triton import Tiles, choose_tiles, launch
from .split_combine import LOG2_E, finish_softmax, part_buffers, part_softmax, split_softmax

MAX_HEAD_DIM = 512
MAX_SLOTS = 2**31
SMALLEST_TILE = 16
HOPPER_KERNELS = (
    "attention.sparse_mla_decode_sm90_few_tokens",
    "attention.sparse_mla_decode_sm90",
    "attention.sparse_mla_decode_sm90_few_heads",
)


def sparse_mla_decode_refuses(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    block_size: int,
    cache_format: str,
    scale: float,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lens: Tensor | None = None,
    extra_block_size: int = 0,
    kv_scale: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    q_norm_eps: float | None = None,
    inverse_rope: bool = False,
    batch_invariant: bool = False,
) -> str:
    """Why the kernel cannot take a call, "" if it can."""
    caches = [k_cache] if extra_k_cache is None else [k_cache, extra_k_cache]
    blocks = [block_size] if extra_k_cache is None else [block_size, extra_block_size]
    rows = [indices] if extra_indices is None else [indices, extra_indices]
    dim = q.shape[2]
    if dim > MAX_HEAD_DIM:
        return f"the kernel holds vectors of at most {MAX_HEAD_DIM} dims, these have {dim}"
    if (q_norm_eps is not None or inverse_rope) and (dim < SMALLEST_TILE or dim & (dim - 1)):
        return f"the kernel rotates vectors of a power of two of dims, at least {SMALLEST_TILE}, these have {dim}"
    if len({cache.dtype for cache in caches}) > 1 or len({row.dtype for row in rows}) > 1:
        return "the kernel reads two caches of one dtype through indices of one dtype"
    if any(cache.shape[0] * block >= MAX_SLOTS for cache, block in zip(caches, blocks, strict=True)):
        return f"the kernel counts fewer than {MAX_SLOTS} slots"
    if cache_format in PAGE_LAYOUTS and any(c.stride(0) % 4 or c.storage_offset() % 4 for c in caches):
        return f"the kernel reads 4-byte words, and {cache_format} pages here do not start at multiples of 4 bytes"
    return ""


def sparse_mla_decode_out_refuses(
    out: Tensor | None,
    lse: Tensor | None,
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    block_size: int,
    cache_format: str,
    scale: float,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lens: Tensor | None = None,
    extra_block_size: int = 0,
    kv_scale: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    q_norm_eps: float | None = None,
    inverse_rope: bool = False,
    batch_invariant: bool = False,
) -> str:
    """Why the kernel cannot take a call, "" if it can. Buffers that a graph has yet to allocate are contiguous."""
    if any(x is not None and x.stride(-1) != 1 for x in (out, lse)):
        return "the kernel writes dims of out and heads of lse that are neighbours"
    return sparse_mla_decode_refuses(
        q,
        k_cache,
        indices,
        lens,
        block_size,
        cache_format,
        scale,
        attn_sink,
        extra_k_cache,
        extra_indices,
        extra_lens,
        extra_block_size,
        kv_scale,
        positions,
        cos_sin_cache,
        q_norm_eps,
        inverse_rope,
        batch_invariant,
    )


def sparse_mla_decode(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    block_size: int,
    cache_format: str,
    scale: float,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lens: Tensor | None = None,
    extra_block_size: int = 0,
    kv_scale: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    q_norm_eps: float | None = None,
    inverse_rope: bool = False,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """See the reference. Weights are rounded to the dtype of the keys before they meet them; sums are float32.

    The same call gives the same bits, and with `inverse_rope` those of `inv_rope` behind a call without. With another
    number of tokens, a token's keys may be split differently, which changes the order of its sums; `batch_invariant`
    splits them by the token's own lengths.
    """
    fusion = Fusion(positions, cos_sin_cache, q_norm_eps, inverse_rope, batch_invariant)
    caches = sources(k_cache, indices, lens, block_size, extra_k_cache, extra_indices, extra_lens, extra_block_size)
    return launch_best(q, *caches, cache_format, scale, attn_sink, kv_scale, fusion)


def sparse_mla_decode_out(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    block_size: int,
    cache_format: str,
    scale: float,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lens: Tensor | None = None,
    extra_block_size: int = 0,
    kv_scale: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    q_norm_eps: float | None = None,
    inverse_rope: bool = False,
    batch_invariant: bool = False,
) -> None:
    """`sparse_mla_decode` into `out` and `lse`."""
    fusion = Fusion(positions, cos_sin_cache, q_norm_eps, inverse_rope, batch_invariant)
    caches = sources(k_cache, indices, lens, block_size, extra_k_cache, extra_indices, extra_lens, extra_block_size)
    launch_best(q, *caches, cache_format, scale, attn_sink, kv_scale, fusion, Results(out, lse))


def sources(
    k_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    block_size: int,
    extra_k_cache: Tensor | None,
    extra_indices: Tensor | None,
    extra_lens: Tensor | None,
    extra_block_size: int,
) -> tuple[Source, Source]:
    """Both caches; without a second one, the first with rows of no columns."""
    window = Source(k_cache, indices, lens, block_size)
    if extra_k_cache is None or extra_indices is None or extra_lens is None:
        return window, Source(k_cache, indices[:, :0], lens, block_size)
    return window, Source(extra_k_cache, extra_indices, extra_lens, extra_block_size)


def launch_best(
    q: Tensor,
    window: Source,
    extra: Source,
    cache_format: str,
    scale: float,
    sink: Tensor | None,
    kv_scale: Tensor | None,
    fusion: Fusion,
    into: Results | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch a kernel made for this GPU, or the portable one where none fits; over rows, where nobody has said where
    results go."""
    gpu = gpu_of(q.device)
    if into is None and not by_rows_refuses(q, window, extra, cache_format, scale, sink, fusion, gpu):
        return decode_by_rows(q, window, extra, scale, sink, fusion)
    for name in HOPPER_KERNELS:
        hopper = sm90_module(gpu, name)
        if hopper is not None and not hopper.hopper_refuses(q, window, extra, cache_format, sink, fusion):
            return hopper.launch_hopper(q, window, extra, scale, sink, gpu, fusion=fusion, into=into)
    return launch(q, window, extra, cache_format, scale, sink, kv_scale, gpu, fusion=fusion, into=into)


def sparse_mla_decode_quant_refuses(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    block_size: int,
    cache_format: str,
    scale: float,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lens: Tensor | None = None,
    extra_block_size: int = 0,
    kv_scale: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    q_norm_eps: float | None = None,
    inverse_rope: bool = True,
    batch_invariant: bool = False,
    n_groups: int = 1,
    heads_per_group: int = 0,
    packed_scales: bool = False,
) -> str:
    """Why the kernel cannot take a call, "" if it can."""
    strip = ACT_TILE * (SCALES_PER_WORD if packed_scales else 1)
    if q.shape[2] % strip != 0:
        return f"the kernel quantises heads of a multiple of {strip} dims, these have {q.shape[2]}"
    return why_unsupported_fp8(q.device) or sparse_mla_decode_refuses(
        q,
        k_cache,
        indices,
        lens,
        block_size,
        cache_format,
        scale,
        attn_sink,
        extra_k_cache,
        extra_indices,
        extra_lens,
        extra_block_size,
        kv_scale,
        positions,
        cos_sin_cache,
        q_norm_eps,
        inverse_rope,
        batch_invariant,
    )


def sparse_mla_decode_quant(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    block_size: int,
    cache_format: str,
    scale: float,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lens: Tensor | None = None,
    extra_block_size: int = 0,
    kv_scale: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    q_norm_eps: float | None = None,
    inverse_rope: bool = True,
    batch_invariant: bool = False,
    n_groups: int = 1,
    heads_per_group: int = 0,
    packed_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    """`sparse_mla_decode`, quantised: bit for bit `inv_rope_fp8_quant` behind a call of it."""
    size = group_heads(q.shape[1], n_groups, heads_per_group)
    caches = sources(k_cache, indices, lens, block_size, extra_k_cache, extra_indices, extra_lens, extra_block_size)
    where = positions, cos_sin_cache, q_norm_eps, inverse_rope, batch_invariant
    fusion = Fusion(*where, n_groups, size, packed_scales)
    return launch_best(q, *caches, cache_format, scale, attn_sink, kv_scale, fusion)


COLUMNS = 256
"""Columns of a row that a program writes."""
MAX_ROWS_NUMEL = 2**28
MOST_EARLY = 32
"""Programs up to which rows start early: attention of so few tokens is launched while they are written, which takes 0.6
us off a call on an H200. Behind more of them attention starts when they have ended, and took 1.5 us longer."""
PAD = tl.constexpr(PAD_INDEX)
LAST_INDEX = tl.constexpr(torch.iinfo(torch.int32).max)


@triton.jit
def _write_row(
    p_rows, p_lens, p_indices, p_indptr, index_stride, indptr_stride, capacity, width, token, block,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Columns `block * COLUMNS` and on of row `token`, and its length."""
    begin = tl.load(p_indptr + token * indptr_stride).to(tl.int64)
    end = tl.load(p_indptr + (token + 1) * indptr_stride).to(tl.int64)
    o_column = block * COLUMNS + tl.arange(0, COLUMNS)
    m_column = o_column < width
    place = begin + o_column
    inside = m_column & (place >= 0) & (place < capacity) & (place < end)
    slot = tl.load(p_indices + tl.where(inside, place, 0) * index_stride, mask=inside, other=PAD).to(tl.int64)
    slot = tl.where((slot >= 0) & (slot <= LAST_INDEX), slot, PAD)
    tl.store(p_rows + token * width + o_column, slot.to(tl.int32), mask=m_column)
    length = tl.minimum(tl.maximum(end - begin, 0), width)
    tl.store(p_lens + token, length.to(tl.int32), mask=block == 0)


@triton.jit(
    do_not_specialize=["capacity0", "capacity1", "width0", "width1", "blocks0", "blocks"],
    do_not_specialize_on_alignment=["p_indptr0", "p_indptr1"],
)
def dense_rows_kernel(
    p_rows0,  # [T, width0] int32, contiguous
    p_lens0,  # [T] int32, contiguous
    p_rows1,  # [T, width1] int32, contiguous
    p_lens1,  # [T] int32, contiguous
    p_indices0,  # [capacity0] int
    p_indptr0,  # [> T] int
    p_indices1,  # [capacity1] int
    p_indptr1,  # [> T] int
    index_stride0,
    indptr_stride0,
    index_stride1,
    indptr_stride1,
    capacity0,
    capacity1,
    width0,
    width1,
    blocks0,  # programs of a token that write the first list's row; the others write the second's
    blocks,  # programs of a token
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p writes block p % blocks of token p // blocks, blocks of the first list in front."""
    pdl_prologue(PDL)  # attention may be launched while rows are written: it waits before it reads them
    token = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    if block < blocks0:
        _write_row(
            p_rows0, p_lens0, p_indices0, p_indptr0, index_stride0, indptr_stride0, capacity0, width0, token, block,
            COLUMNS,
        )  # fmt: skip
    else:
        _write_row(
            p_rows1, p_lens1, p_indices1, p_indptr1, index_stride1, indptr_stride1, capacity1, width1, token,
            block - blocks0, COLUMNS,
        )  # fmt: skip


def dense_rows(
    tokens: int, first: tuple[Tensor, Tensor, int], second: tuple[Tensor, Tensor, int] | None
) -> tuple[Tensor, ...]:
    """Rows int32 `[T, W]` and lengths int32 `[T]` of one or two lists, each `indices`, `indptr` and the width W."""
    made = [
        (indices.new_empty((tokens, width), dtype=torch.int32), indices.new_empty((tokens,), dtype=torch.int32))
        for indices, _, width in ((first,) if second is None else (first, second))
    ]
    if tokens > 0:
        lists = (first, first if second is None else second)
        blocks = [max(1, cdiv(width, COLUMNS)) for _, _, width in lists]
        programs = blocks[0] + (0 if second is None else blocks[1])
        early = tokens * programs <= MOST_EARLY and supports_pdl(gpu_of(made[0][0].device))
        # One dimension: the others of a grid end at 65,535.
        launch_kernel(
            dense_rows_kernel,
            (tokens * programs,),
            *made[0],
            *made[-1],
            *(tensor for indices, indptr, _ in lists for tensor in (indices, indptr)),
            *(tensor.stride(0) for indices, indptr, _ in lists for tensor in (indices, indptr)),
            *(indices.shape[0] for indices, _, _ in lists),
            *(width for _, _, width in lists),
            blocks[0],
            programs,
            COLUMNS=COLUMNS,
            num_warps=2,
            PDL=early,
            **pdl_option(early),
        )
    return tuple(tensor for pair in made for tensor in pair)


def sparse_mla_decode_ragged_refuses(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    indptr: Tensor,
    block_size: int,
    cache_format: str,
    scale: float,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_indptr: Tensor | None = None,
    extra_block_size: int = 0,
    kv_scale: Tensor | None = None,
    max_entries: int = 0,
    extra_max_entries: int = 0,
) -> str:
    """Why the kernel cannot take a call, "" if it can."""
    widths = [max_entries or indices.shape[0]]
    if extra_indices is not None:
        widths.append(extra_max_entries or extra_indices.shape[0])
    if q.shape[0] * max(widths) >= MAX_ROWS_NUMEL:
        return f"{q.shape[0]} rows of up to {max(widths)} entries: give max_entries, the most a row has"
    return sparse_mla_decode_refuses(
        q, k_cache, indices, indptr, block_size, cache_format, scale, attn_sink,
        extra_k_cache, None if extra_indices is None else indices, extra_indptr, extra_block_size, kv_scale,
    )  # fmt: skip


def sparse_mla_decode_ragged(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    indptr: Tensor,
    block_size: int,
    cache_format: str,
    scale: float,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_indptr: Tensor | None = None,
    extra_block_size: int = 0,
    kv_scale: Tensor | None = None,
    max_entries: int = 0,
    extra_max_entries: int = 0,
) -> tuple[Tensor, Tensor]:
    """See the reference. The bits are those of `sparse_mla_decode` for the padded rows."""
    second = None
    if extra_indices is not None and extra_indptr is not None:
        second = (extra_indices, extra_indptr, extra_max_entries or extra_indices.shape[0])
    rows: tuple[Any, ...] = dense_rows(q.shape[0], (indices, indptr, max_entries or indices.shape[0]), second)
    extra: tuple[Any, ...] = (None, None) if second is None else rows[2:]
    attend: tuple[Any, ...] = (block_size, cache_format, scale, attn_sink)
    attend += (extra_k_cache, *extra, extra_block_size, kv_scale)
    return sparse_mla_decode(q, k_cache, *rows[:2], *attend)


MAX_VALUE_DIM = 512


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
