"""Scores of compressed entries on Hopper, in Gluon: those of indexer_score.py for e4m3 keys, summed in another order.

A warpgroup scores 64 entries at a time. One warp beside it looks up their pages and has the copy engine bring keys and
scales into a ring of buffers; from there each thread reads 32 neighbouring bytes of a key twice, makes them float16 and
multiplies them from registers. Which dims a thread then holds is another order than that of the matrix unit, in which
the queries are stored likewise: a sum over dims does not mind.

Nothing is read before the kernels in front have ended, and the selection, which is launched early, may start when all
programs of this one have.

On an H200 scores and selection of 4,096 entries take 12.8 us for 32 tokens, 28.5 for 128 and 91 for 512, and took 13.5,
30.8 and 99 with copies of 16 bytes by the warpgroup itself (`dsv4 bench indexer --only op=indexer_topk_slots`). Tried
without gain: three stages or four, 1 and 3 us more for 128 tokens and 2 and 4 for 512; fewer programs; copies that one
of the scoring threads starts between barriers of all, which are as slow as those of 16 bytes.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import PropagateNan
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ... import layout
from ..hopper.gluon import FLAT, reinterpret, thread_barrier
from ..hopper.tma import copy_tile
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments
from .score_triton import INVISIBLE as _INVISIBLE
from .score_triton import NAN_KEY as _NAN_KEY

ENTRIES = 64
STAGES = 2
ALIGN = 16
BRINGER_REGISTERS = 24
"""Of a thread that looks up pages."""

TILE = gl.constexpr(ENTRIES)
D = gl.constexpr(layout.INDEXER_HEAD_DIM)
SCALE = gl.constexpr(layout.INDEXER_FP8.scale)
INVISIBLE = gl.constexpr(_INVISIBLE.value)
NAN_KEY = gl.constexpr(_NAN_KEY.value)
MAGNITUDE = gl.constexpr(0x7FFFFFFF)
PROPAGATE_NAN = gl.constexpr(PropagateNan.ALL)

COPIES = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
# A thread has half of two quarters of rows r and r + 8: 32 bytes in a row, of which the swizzle lets a warp read all.
KEYS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]],
        lane_bases=[[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[ENTRIES, layout.INDEXER_HEAD_DIM],
    )
)
_PAGE_OF_KEYS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=3)
_PAGE_OF_SCALES = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
PAGE_OF_KEYS, PAGE_OF_SCALES = gl.constexpr(_PAGE_OF_KEYS), gl.constexpr(_PAGE_OF_SCALES)
TILE_OF_KEYS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@gluon.jit
def operand(codes):
    """float16 of e4m3 codes `[N, D]`, with the dims that a thread of KEYS holds where the matrix unit expects its own.

    Dim 16 s + 8 h + 2 c + e of an operand is in the c-th of four threads. Here these are dims 32 c + 4 s + 2 h + e.
    """
    N: gl.constexpr = codes.shape[0]
    x = codes.to(gl.float8e4nv, bitcast=True).to(gl.float16)
    x = gl.reshape(x, [N, 4, D // 16, 2, 2]).permute((0, 2, 3, 1, 4))
    return gl.reshape(x, [N, D])


@gluon.jit
def _context(token, p_requests, p_lens, p_table, strides, table_rows, reach):
    """How many entries a token sees, int32, and the row of the table that has their blocks."""
    row_stride, _, request_stride, len_stride = strides
    request = gl.load(p_requests + token * request_stride).to(gl.int64)
    length = gl.load(p_lens + token * len_stride).to(gl.int64)
    known = (request >= 0) & (request < table_rows)
    length = gl.where(known, gl.minimum(gl.maximum(length, 0), reach), 0).to(gl.int32)
    return length, p_table + gl.where(known, request, 0) * row_stride


@gluon.jit
def _block_at(p_row, tile, tiles, strides, BLOCK_SIZE: gl.constexpr):
    """The number of the block that holds a tile; -1 behind the last."""
    p_block = p_row + gl.to_tensor(tile * TILE // BLOCK_SIZE).to(gl.int64) * strides[1]
    return gl.load(p_block, mask=tile < tiles, other=-1)


@gluon.jit
def _bring(
    context, keys_of, scales_of, ring, strides, pages, table_rows, reach, topk,
    BLOCK_SIZE: gl.constexpr, ORDER: gl.constexpr, STAGES: gl.constexpr, DEPENDENT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Have the tiles of a program copied, one after the other, into the buffers of keys and scales in `ring`."""
    if PDL:
        gdc_wait()
    if DEPENDENT:
        # Not before the wait: the selection reads lengths and tables at once.
        gdc_launch_dependents()
    token, p_requests, p_lens, p_table = context
    keys, scales, ready, free = ring
    length, p_row = _context(token, p_requests, p_lens, p_table, strides, table_rows, reach)
    tiles = (length + TILE - 1) // TILE
    if ORDER:
        tiles = gl.where(length <= topk, 0, tiles)
    first, step = gl.program_id(1), gl.num_programs(1)
    ahead = ()
    for early in gl.static_range(STAGES):
        ahead += (_block_at(p_row, first + early * step, tiles, strides, BLOCK_SIZE),)  # type: ignore[assignment]
    for number in range((tiles - first + step - 1) // step):
        tile, slot = first + number * step, number % STAGES
        block = ahead[0]  # type: ignore[misc]
        ahead = ahead[1:]
        ahead += (_block_at(p_row, tile + STAGES * step, tiles, strides, BLOCK_SIZE),)  # type: ignore[assignment]
        mbarrier.wait(free.index(slot), ((number // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(slot), TILE * (D + SCALE))
        # A block that is none is the one behind the last page: zeros.
        page, entry = gl.where((block >= 0) & (block < pages), block, pages), tile * TILE % BLOCK_SIZE
        copy_tile(keys_of, [page, entry, 0], ready.index(slot), keys.index(slot))
        copy_tile(scales_of, [page, entry], ready.index(slot), scales.index(slot))


@gluon.jit
def order_key(logit):
    """As `order_key` of indexer_score.py."""
    bits = gl.where(logit == 0.0, 0.0, logit).to(gl.int32, bitcast=True)
    return gl.where(logit == logit, bits ^ ((bits >> 31) & MAGNITUDE), NAN_KEY)


@gluon.jit
def _score(
    context, p_q, p_weights, p_out, ring, queries, q_strides, weight_strides, out_stride, strides, pages, table_rows,
    reach, width, topk,
    BLOCK_SIZE: gl.constexpr, ORDER: gl.constexpr, HEADS: gl.constexpr, PADDED_HEADS: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Score what `_bring` copies."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PADDED_HEADS, 16]
    )
    if PDL:
        gdc_wait()
    token, p_requests, p_lens, p_table = context
    keys, scales, ready, free = ring
    o_head = gl.arange(0, PADDED_HEADS, gl.SliceLayout(1, COPIES))
    p_heads = p_q + token * q_strides[0] + gl.expand_dims(o_head.to(gl.int64) * q_strides[1], 1)
    p_queries = p_heads + gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, COPIES)), 0)
    m_head, p_queries = gl.broadcast(gl.expand_dims(o_head < HEADS, 1), p_queries)
    codes = gl.load(p_queries, mask=m_head, other=0)
    o_column = gl.arange(0, PADDED_HEADS, gl.SliceLayout(0, ACC))
    p_weight = p_weights + token * weight_strides[0] + o_column.to(gl.int64) * weight_strides[1]
    weight = gl.load(p_weight, mask=o_column < HEADS, other=0.0)
    length, p_row = _context(token, p_requests, p_lens, p_table, strides, table_rows, reach)
    tiles = (length + TILE - 1) // TILE
    first, step = gl.program_id(1), gl.num_programs(1)
    p_row_out = p_out + token * out_stride
    o_entry = gl.arange(0, TILE, gl.SliceLayout(1, ACC))
    if ORDER and length <= topk:
        for tile in range(first, tiles, step):
            block = _block_at(p_row, tile, tiles, strides, BLOCK_SIZE)
            key = gl.where((block >= 0) & (block < pages), 0, INVISIBLE)
            column = tile * TILE + o_entry
            gl.store(p_row_out + column, gl.full([TILE], key, gl.int32, gl.SliceLayout(1, ACC)), mask=column < length)
    else:
        following = _block_at(p_row, first, tiles, strides, BLOCK_SIZE)
        queries.store(operand(codes))
        fence_async_shared()
        zero = gl.zeros([TILE, PADDED_HEADS], gl.float32, ACC)
        mine = (tiles - first + step - 1) // step
        for number in range(mine):
            tile, slot = first + number * step, number % STAGES
            block = following
            following = _block_at(p_row, tile + step, tiles, strides, BLOCK_SIZE)
            mbarrier.wait(ready.index(slot), (number // STAGES) & 1)
            arrived = reinterpret(keys.index(slot), gl.uint8, [TILE, D], TILE_OF_KEYS).load(KEYS)
            scale = reinterpret(scales.index(slot), gl.float32, [TILE], FLAT).load(gl.SliceLayout(1, ACC))
            key = gl.convert_layout(operand(arrived), gl.DotOperandLayout(0, ACC, 2))
            dots = warpgroup_mma(key, queries.permute((1, 0)), zero, use_acc=False, is_async=True)
            dots = warpgroup_mma_wait(0, deps=[dots])
            # Not before: reads of a buffer may go on behind a barrier, and the copy engine does not wait for them.
            thread_barrier()
            mbarrier.arrive(free.index(slot), count=1)
            terms = gl.maximum(dots, 0.0, propagate_nan=PROPAGATE_NAN) * gl.expand_dims(weight, 0)
            if PADDED_HEADS > HEADS:
                # A head that is not there has no weight, but 0 * inf would be NaN.
                terms = gl.where(gl.expand_dims(o_column < HEADS, 0), terms, 0.0)
            logit = gl.sum(terms, 1) * scale
            column = tile * TILE + o_entry
            seen = (column < length) & (block >= 0) & (block < pages)
            if ORDER:
                gl.store(p_row_out + column, gl.where(seen, order_key(logit), INVISIBLE), mask=column < length)
            else:
                gl.store(p_row_out + column, gl.where(seen, logit, float("-inf")), mask=column < width)
        if not ORDER:
            nothing = gl.full([TILE], float("-inf"), gl.float32, gl.SliceLayout(1, ACC))
            for tile in range(first + gl.maximum(mine, 0) * step, (width + TILE - 1) // TILE, step):
                column = tile * TILE + o_entry
                gl.store(p_row_out + column, nothing, mask=column < width)


@gluon.jit(
    do_not_specialize=["pages", "table_rows", "reach", "width", "topk"],
    do_not_specialize_on_alignment=["p_table", "p_requests", "p_lens"],
)
def indexer_score_hopper_kernel(
    p_out,  # [T, width] float32 logits, or int32 order keys with ORDER; contiguous columns
    p_q,  # [T, H, 128] bytes of e4m3, contiguous dims
    p_weights,  # [T, H] float32
    keys_of,  # [pages, BLOCK_SIZE, D] bytes of e4m3, for the copy engine
    scales_of,  # [pages, BLOCK_SIZE] float32, likewise
    p_table,  # [table_rows, >= reach / BLOCK_SIZE] int32
    p_requests,  # [>= T] int
    p_lens,  # [>= T] int
    out_stride,
    q_token_stride,
    q_head_stride,
    weight_token_stride,
    weight_head_stride,
    table_row_stride,
    table_stride,
    request_stride,
    len_stride,
    pages,
    table_rows,
    reach,
    width,
    topk,
    BLOCK_SIZE: gl.constexpr,  # a multiple of TILE
    ORDER: gl.constexpr,
    HEADS: gl.constexpr,
    PADDED_HEADS: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,  # lets the kernel that selects start early
    PDL: gl.constexpr,
    BRINGER_REGISTERS: gl.constexpr,
):
    """Program (p, s) of (T, S) takes every S-th tile of token p, from tile s on. See `indexer_score_kernel`."""
    context = gl.program_id(0).to(gl.int64), p_requests, p_lens, p_table
    keys = gl.allocate_shared_memory(gl.uint8, [STAGES, 1, TILE, D], PAGE_OF_KEYS)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, TILE], PAGE_OF_SCALES)
    queries = gl.allocate_shared_memory(gl.float16, [PADDED_HEADS, D], SWIZZLED)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    thread_barrier()
    ring = keys, scales, ready, free
    strides = table_row_stride, table_stride, request_stride, len_stride
    gl.warp_specialize([
        (_score, (context, p_q, p_weights, p_out, ring, queries, (q_token_stride, q_head_stride),
                  (weight_token_stride, weight_head_stride), out_stride, strides, pages, table_rows, reach, width, topk,
                  BLOCK_SIZE, ORDER, HEADS, PADDED_HEADS, STAGES, PDL)),
        (_bring, (context, keys_of, scales_of, ring, strides, pages, table_rows, reach, topk,
                  BLOCK_SIZE, ORDER, STAGES, DEPENDENT, PDL)),
    ], [1], [BRINGER_REGISTERS])  # fmt: skip


def queries_refused(q: Tensor) -> str:
    """Why queries cannot be read 16 bytes at a time, "" if they can."""
    apart = q.stride(2) == 1 and not any(x % ALIGN for x in (*q.stride()[:2], q.storage_offset()))
    return "" if apart else f"it takes queries {ALIGN} bytes apart"


def refuses(q: Tensor, pages: Tensor, cache_format: str, block_size: int) -> str:
    """Why these queries and pages cannot be scored by this kernel, "" if they can."""
    if cache_format != "indexer_fp8" or block_size % ENTRIES:
        return f"it takes indexer_fp8 in pages of a multiple of {ENTRIES} entries"
    if pages.stride(0) % ALIGN or pages.storage_offset() % ALIGN or pages.shape[0] == 0:
        return f"it takes pages {ALIGN} bytes apart, one at least"
    return queries_refused(q)


def score(
    out: Tensor, q: Tensor, weights: Tensor, pages: Tensor, block_table: Tensor, token_to_req: Tensor,
    context_lens: Tensor, block_size: int, reach: int, width: int, topk: int, splits: int, dependent: bool,
    stages: int = STAGES,
) -> None:  # fmt: skip
    """As `_score` of indexer_logits_topk.py."""
    tokens, heads, columns = q.shape
    padded = max(16, triton.next_power_of_2(heads))
    keys = pages.as_strided((pages.shape[0], block_size, columns), (pages.stride(0), columns, 1))
    scales = pages[:, block_size * columns :].view(torch.float32)[:, :block_size]
    launch_kernel(
        indexer_score_hopper_kernel,
        (tokens, splits),
        out, q, weights,
        TensorDescriptor.from_tensor(keys, [1, ENTRIES, columns], _PAGE_OF_KEYS),
        TensorDescriptor.from_tensor(scales, [1, ENTRIES], _PAGE_OF_SCALES),
        block_table, token_to_req, context_lens,
        out.stride(0), *q.stride()[:2], *weights.stride(), *block_table.stride(), token_to_req.stride(0),
        context_lens.stride(0), pages.shape[0], block_table.shape[0], reach, width, topk,
        BLOCK_SIZE=block_size, ORDER=not out.is_floating_point(), HEADS=heads,
        PADDED_HEADS=padded, STAGES=stages, DEPENDENT=dependent, BRINGER_REGISTERS=BRINGER_REGISTERS,
        # Of a thread, scoring or not: four programs of 64 heads share a multiprocessor.
        maxnreg=max(64, min(128, padded // 2 + 32)), **pdl_arguments(out.device, tokens * splits),
    )  # fmt: skip
