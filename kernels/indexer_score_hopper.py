"""Scores of compressed entries on Hopper, in Gluon: those of indexer_score.py for e4m3 keys, summed in another order.

A warpgroup scores 64 entries at a time. Their keys and scales are copied into a ring of buffers, several tiles ahead
and without passing through registers; from there each thread reads 32 neighbouring bytes of a key twice, makes them
float16 and multiplies them from registers. Which dims a thread then holds is another order than that of the matrix
unit, in which the queries are stored likewise: a sum over dims does not mind.

Nothing is read before the kernels in front have ended, and the selection, which is launched early, may start when all
programs of this one have.

On an H200 the entries of 512 tokens, 4,096 each, come at 80% of the rate of a copy. 128 tokens take 24 us where that
rate gives 16.6: two of them are the launch, two the way from a length through a block table to the first keys. Tried
there without gain: copies started behind the products, 24.1; two stages, 24.5, or four, 24.4; 96 registers, so that
five programs share a multiprocessor, 25.4; the next tile made an operand and the last one's scores stored while
products run, 24.9 where this takes 23.4, for three programs share a multiprocessor then. Without any arithmetic the
copies of 128 and 512 tokens take 19.8 and 72 us, with it 23.3 and 80.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.core import PropagateNan
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import layout
from .early import early_launch
from .gather_rows_hopper import copy_elements
from .indexer_score import INVISIBLE as _INVISIBLE
from .indexer_score import NAN_KEY as _NAN_KEY
from .kv_load_hopper import thread_barrier

ENTRIES = 64
STAGES = 3
ALIGN = 16

TILE = gl.constexpr(ENTRIES)
D = gl.constexpr(layout.INDEXER_HEAD_DIM)
SCALE = gl.constexpr(layout.INDEXER_FP8.scale)
INVISIBLE = gl.constexpr(_INVISIBLE.value)
NAN_KEY = gl.constexpr(_NAN_KEY.value)
MAGNITUDE = gl.constexpr(0x7FFFFFFF)
CHUNK = gl.constexpr(ALIGN)
PROPAGATE_NAN = gl.constexpr(PropagateNan.ALL)

COPIES = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
SCALE_COPIES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
RING = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 8, [1, 0]))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
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
def _block_at(p_row, tile, tiles, table_stride, BLOCK_SIZE: gl.constexpr):
    """The number of the block that holds a tile; -1 behind the last."""
    p_block = p_row + gl.to_tensor(tile * TILE // BLOCK_SIZE).to(gl.int64) * table_stride
    return gl.load(p_block, mask=tile < tiles, other=-1)


@gluon.jit
def _fetch(slot, rings, source, block, tile, tiles, BLOCK_SIZE: gl.constexpr):
    """Start the copies of a tile, if it is one. That of a block that is none is of page 0, whose memory is there.

    `rings` are buffers of keys and of scales; `source` is pages, the same as float32, their number, and their distance.
    """
    keys, scales = rings
    p_pages, p_scales, pages, page_chunks = source
    page = gl.where((block >= 0) & (block < pages), block, 0).to(gl.int64) * page_chunks.to(gl.int64)
    offset = tile * TILE % BLOCK_SIZE
    o_entry = gl.arange(0, TILE, gl.SliceLayout(1, COPIES))
    o_key = gl.expand_dims((offset + o_entry) * D, 1) + gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, COPIES)), 0)
    copy_elements(keys.index(slot), p_pages + page * CHUNK + o_key, mask=tile < tiles)
    p_tile_scales = p_scales + page * (CHUNK // SCALE) + (BLOCK_SIZE * D // SCALE + offset)
    copy_elements(scales.index(slot), p_tile_scales + gl.arange(0, TILE, SCALE_COPIES), mask=tile < tiles)
    async_copy.commit_group()


@gluon.jit
def order_key(logit):
    """As `order_key` of indexer_score.py."""
    bits = gl.where(logit == 0.0, 0.0, logit).to(gl.int32, bitcast=True)
    return gl.where(logit == logit, bits ^ ((bits >> 31) & MAGNITUDE), NAN_KEY)


@gluon.jit(
    do_not_specialize=["pages", "table_rows", "reach", "width", "topk"],
    do_not_specialize_on_alignment=["p_table", "p_requests", "p_lens"],
)
def indexer_score_hopper_kernel(
    p_out,  # [T, width] float32 logits, or int32 order keys with ORDER; contiguous columns
    p_q,  # [T, H, 128] bytes of e4m3, contiguous dims
    p_weights,  # [T, H] float32
    p_pages,  # [pages, .] bytes, indexer_fp8
    p_scales,  # the same memory as float32
    p_table,  # [table_rows, >= reach / BLOCK_SIZE] int32
    p_requests,  # [>= T] int
    p_lens,  # [>= T] int
    out_stride,
    q_token_stride,
    q_head_stride,
    weight_token_stride,
    weight_head_stride,
    page_chunks,  # distance of pages in units of CHUNK bytes
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
    EARLY: gl.constexpr,
):
    """Program (p, s) of (T, S) takes every S-th tile of token p, from tile s on. See `indexer_score_kernel`."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PADDED_HEADS, 16]
    )
    if EARLY:
        gdc_wait()
    if DEPENDENT:
        # Not before the wait: the selection reads lengths and tables at once.
        gdc_launch_dependents()
    token = gl.program_id(0).to(gl.int64)
    first = gl.program_id(1)
    step = gl.num_programs(1)
    request = gl.load(p_requests + token * request_stride).to(gl.int64)
    length = gl.load(p_lens + token * len_stride).to(gl.int64)
    o_head = gl.arange(0, PADDED_HEADS, gl.SliceLayout(1, COPIES))
    p_heads = p_q + token * q_token_stride + gl.expand_dims(o_head.to(gl.int64) * q_head_stride, 1)
    p_queries = p_heads + gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, COPIES)), 0)
    m_head, p_queries = gl.broadcast(gl.expand_dims(o_head < HEADS, 1), p_queries)
    codes = gl.load(p_queries, mask=m_head, other=0)
    o_column = gl.arange(0, PADDED_HEADS, gl.SliceLayout(0, ACC))
    p_weight = p_weights + token * weight_token_stride + o_column.to(gl.int64) * weight_head_stride
    weight = gl.load(p_weight, mask=o_column < HEADS, other=0.0)
    known = (request >= 0) & (request < table_rows)
    length = gl.where(known, gl.minimum(gl.maximum(length, 0), reach), 0).to(gl.int32)
    p_row = p_table + gl.where(known, request, 0) * table_row_stride
    p_row_out = p_out + token * out_stride
    tiles = (length + TILE - 1) // TILE
    o_entry = gl.arange(0, TILE, gl.SliceLayout(1, ACC))
    if ORDER and length <= topk:
        for tile in range(first, tiles, step):
            block = _block_at(p_row, tile, tiles, table_stride, BLOCK_SIZE)
            key = gl.where((block >= 0) & (block < pages), 0, INVISIBLE)
            column = tile * TILE + o_entry
            gl.store(p_row_out + column, gl.full([TILE], key, gl.int32, gl.SliceLayout(1, ACC)), mask=column < length)
    else:
        keys = gl.allocate_shared_memory(gl.uint8, [STAGES, TILE, D], RING)
        scales = gl.allocate_shared_memory(gl.float32, [STAGES, TILE], FLAT)
        queries = gl.allocate_shared_memory(gl.float16, [PADDED_HEADS, D], SWIZZLED)
        rings = keys, scales
        source = p_pages, p_scales, pages, page_chunks
        ahead = ()
        for early in gl.static_range(STAGES + 1):
            ahead += (_block_at(p_row, first + early * step, tiles, table_stride, BLOCK_SIZE),)  # type: ignore[assignment]
        # All of these are on their way before the first is used.
        thread_barrier()
        for early in gl.static_range(STAGES - 1):
            _fetch(early, rings, source, ahead[early], first + early * step, tiles, BLOCK_SIZE)
        queries.store(operand(codes))
        fence_async_shared()
        zero = gl.zeros([TILE, PADDED_HEADS], gl.float32, ACC)
        end = length if ORDER else width
        for number in range(((end + TILE - 1) // TILE - first + step - 1) // step):
            tile = first + number * step
            slot = number % STAGES
            async_copy.wait_group(STAGES - 2)
            block = ahead[0]  # type: ignore[misc]
            following = tile + (STAGES - 1) * step
            _fetch((number + STAGES - 1) % STAGES, rings, source, ahead[STAGES - 1], following, tiles, BLOCK_SIZE)
            ahead = ahead[1:]
            ahead += (_block_at(p_row, following + 2 * step, tiles, table_stride, BLOCK_SIZE),)  # type: ignore[assignment]
            key = gl.convert_layout(operand(keys.index(slot).load(KEYS)), gl.DotOperandLayout(0, ACC, 2))
            scale = scales.index(slot).load(gl.SliceLayout(1, ACC))
            dots = warpgroup_mma(key, queries.permute((1, 0)), zero, use_acc=False, is_async=True)
            dots = warpgroup_mma_wait(0, deps=[dots])
            terms = gl.maximum(dots, 0.0, propagate_nan=PROPAGATE_NAN) * gl.expand_dims(weight, 0)
            if PADDED_HEADS > HEADS:
                # A head that is not there has no weight, but 0 * inf would be NaN.
                terms = gl.where(gl.expand_dims(o_column < HEADS, 0), terms, 0.0)
            logit = gl.sum(terms, 1) * scale
            column = tile * TILE + o_entry
            seen = (column < length) & (block >= 0) & (block < pages)
            if ORDER:
                gl.store(p_row_out + column, gl.where(seen, order_key(logit), INVISIBLE), mask=column < end)
            else:
                gl.store(p_row_out + column, gl.where(seen, logit, float("-inf")), mask=column < end)


def queries_refused(q: Tensor) -> str:
    """Why queries cannot be read 16 bytes at a time, "" if they can."""
    apart = q.stride(2) == 1 and not any(x % ALIGN for x in (*q.stride()[:2], q.storage_offset()))
    return "" if apart else f"it takes queries {ALIGN} bytes apart"


def refuses(q: Tensor, pages: Tensor, cache_format: str, block_size: int) -> str:
    """Why these queries and pages cannot be scored by this kernel, "" if they can."""
    if cache_format != "indexer_fp8" or block_size % ENTRIES:
        return f"it takes indexer_fp8 in pages of a multiple of {ENTRIES} entries"
    if pages.stride(0) % ALIGN or pages.storage_offset() % ALIGN:
        return f"it takes pages {ALIGN} bytes apart"
    return queries_refused(q)


def score(
    out: Tensor, q: Tensor, weights: Tensor, pages: Tensor, block_table: Tensor, token_to_req: Tensor,
    context_lens: Tensor, block_size: int, reach: int, width: int, topk: int, splits: int, dependent: bool,
    stages: int = STAGES,
) -> None:  # fmt: skip
    """As `_score` of indexer_logits_topk.py."""
    tokens, heads, _ = q.shape
    indexer_score_hopper_kernel[(tokens, splits)](
        out, q, weights, pages, pages.view(torch.float32), block_table, token_to_req, context_lens,
        out.stride(0), *q.stride()[:2], *weights.stride(), pages.stride(0) // ALIGN, *block_table.stride(),
        token_to_req.stride(0), context_lens.stride(0), pages.shape[0], block_table.shape[0], reach, width, topk,
        BLOCK_SIZE=block_size, ORDER=not out.is_floating_point(), HEADS=heads,
        PADDED_HEADS=max(16, triton.next_power_of_2(heads)), STAGES=stages, DEPENDENT=dependent,
        **early_launch(out.device, tokens * splits),
    )  # fmt: skip
