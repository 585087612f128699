"""Scores of paged e4m3 entries on sm_90, in Gluon; the order of sums differs from that of score_triton.py.

One warpgroup scores 64 entries at a time. A copy warp looks up their pages and has TMA copy keys and scales into a ring
of buffers. From there each thread reads 32 neighbouring bytes of a key twice, converts them to float16 and multiplies
them from registers. The dims that a thread then holds are permuted against those of the tensor core's operand; queries
are stored with the same permutation, which does not change a sum over dims.

Nothing is read before previous kernels have ended (PDL), and the selection may start once all programs of this kernel
have.
"""

from __future__ import annotations

from typing import NamedTuple

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
from ..host.addresses import first_byte
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments
from .score_triton import INVISIBLE as _INVISIBLE
from .score_triton import NAN_KEY as _NAN_KEY
from .score_triton import ScoreCall

ENTRIES = 64
STAGES = 2
ALIGN = 16
"""Bytes at whose multiples queries, pages and gathered keys start, because they are copied 16 bytes at a time."""
MAX_REGISTERS = 128
"""Registers of a scoring thread at most, so that four CTAs of 64 heads fit on an SM."""

COPY_REGISTERS = gl.constexpr(24)  # of a thread of the copy warp
TILE = gl.constexpr(ENTRIES)
D = gl.constexpr(layout.INDEXER_HEAD_DIM)
SCALE = gl.constexpr(layout.INDEXER_FP8.scale)
INVISIBLE = gl.constexpr(_INVISIBLE.value)
NAN_KEY = gl.constexpr(_NAN_KEY.value)
MAGNITUDE = gl.constexpr(0x7FFFFFFF)
PROPAGATE_NAN = gl.constexpr(PropagateNan.ALL)

COPIES = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
# A thread has half of two quarters of rows r and r + 8: 32 contiguous bytes; the swizzle lets a warp read all of them.
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


class Shape(NamedTuple):
    """Compile-time sizes of a launch.

    Attributes:
        block_size: entries of a page, a multiple of TILE. order_keys: whether these are written, not logits.
        heads, padded_heads: heads of a query and columns of the GEMM. stages: buffers of the ring.
        dependent: whether the selection may start early. group: see `ScoreCall`; it divides 16, the rows of a warp.
    """

    block_size: int
    order_keys: bool
    heads: int
    padded_heads: int
    stages: int
    dependent: bool
    group: int = 0


class Strides(NamedTuple):
    """Strides of the kernel's arguments: `tokens` are those of the block table, the requests and the lengths."""

    out: int
    q: tuple[int, ...]
    weights: tuple[int, ...]
    tokens: tuple[int, ...]


@gluon.jit
def operand(codes):
    """Convert e4m3 codes `[N, D]` to float16, with the dims of a thread of KEYS where the tensor core expects its own.

    Dim 16 s + 8 h + 2 c + e of an operand is in the c-th of four threads. Here these are dims 32 c + 4 s + 2 h + e.
    """
    N: gl.constexpr = codes.shape[0]
    x = codes.to(gl.float8e4nv, bitcast=True).to(gl.float16)
    x = gl.reshape(x, [N, 4, D // 16, 2, 2]).permute((0, 2, 3, 1, 4))
    return gl.reshape(x, [N, D])


@gluon.jit
def _load_context(context, strides, table_rows, reach):
    """Return how many entries a token sees, int32, and a pointer to its row of the block table."""
    token, p_requests, p_lens, p_table = context
    row_stride, _, request_stride, len_stride = strides
    request = gl.load(p_requests + token * request_stride).to(gl.int64)
    length = gl.load(p_lens + token * len_stride).to(gl.int64)
    known = (request >= 0) & (request < table_rows)
    length = gl.where(known, gl.minimum(gl.maximum(length, 0), reach), 0).to(gl.int32)
    return length, p_table + gl.where(known, request, 0) * row_stride


@gluon.jit
def _load_block(p_row, tile, tiles, strides, BLOCK_SIZE: gl.constexpr):
    """Load the number of the block that holds a tile; -1 past the last tile."""
    p_block = p_row + gl.to_tensor(tile * TILE // BLOCK_SIZE).to(gl.int64) * strides[1]
    return gl.load(p_block, mask=tile < tiles, other=-1)


@gluon.jit
def _copy_tiles(context, sources, ring, strides, sizes, SHAPE: gl.constexpr, PDL: gl.constexpr):
    """Copy the tiles of a program, one after the other, into the buffers of keys and scales in `ring`."""
    if PDL:
        gdc_wait()
    if SHAPE.dependent:
        # After the wait, because the selection reads lengths and tables at once.
        gdc_launch_dependents()
    source_keys, source_scales = sources
    keys, scales, ready, free = ring
    pages, table_rows, reach, topk = sizes
    BLOCK_SIZE: gl.constexpr = SHAPE.block_size
    STAGES: gl.constexpr = SHAPE.stages
    length, p_row = _load_context(context, strides, table_rows, reach)
    tiles = (length + TILE - 1) // TILE
    if SHAPE.order_keys:
        tiles = gl.where(length <= topk, 0, tiles)
    first, step = gl.program_id(1), gl.num_programs(1)
    ahead = ()
    for stage in gl.static_range(STAGES):
        ahead += (_load_block(p_row, first + stage * step, tiles, strides, BLOCK_SIZE),)  # type: ignore[assignment]
    for number in range((tiles - first + step - 1) // step):
        tile, slot = first + number * step, number % STAGES
        block = ahead[0]  # type: ignore[misc]
        ahead = ahead[1:]
        ahead += (_load_block(p_row, tile + STAGES * step, tiles, strides, BLOCK_SIZE),)  # type: ignore[assignment]
        mbarrier.wait(free.index(slot), ((number // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(slot), TILE * (D + SCALE))
        # An illegal block is the one past the last page, which TMA fills with zeros.
        page, entry = gl.where((block >= 0) & (block < pages), block, pages), tile * TILE % BLOCK_SIZE
        copy_tile(source_keys, [page, entry, 0], ready.index(slot), keys.index(slot))
        copy_tile(source_scales, [page, entry], ready.index(slot), scales.index(slot))


@gluon.jit
def order_key(logit):
    """Return int32 in the order of float32 `logit`. Both zeros have one key; NaN comes before -inf."""
    bits = gl.where(logit == 0.0, 0.0, logit).to(gl.int32, bitcast=True)
    return gl.where(logit == logit, bits ^ ((bits >> 31) & MAGNITUDE), NAN_KEY)


@gluon.jit
def _score_tiles(context, tensors, ring, queries, strides, sizes, width, SHAPE: gl.constexpr, PDL: gl.constexpr):
    """Score the tiles that `_copy_tiles` copies."""
    p_out, p_best, p_q, p_weights = tensors
    pages, table_rows, reach, topk = sizes
    BLOCK_SIZE: gl.constexpr = SHAPE.block_size
    ORDER_KEYS: gl.constexpr = SHAPE.order_keys
    HEADS: gl.constexpr = SHAPE.heads
    PADDED_HEADS: gl.constexpr = SHAPE.padded_heads
    STAGES: gl.constexpr = SHAPE.stages
    GROUP: gl.constexpr = SHAPE.group
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PADDED_HEADS, 16]
    )
    if PDL:
        gdc_wait()
    token = context[0]
    keys, scales, ready, free = ring
    o_head = gl.arange(0, PADDED_HEADS, gl.SliceLayout(1, COPIES))
    p_heads = p_q + token * strides.q[0] + gl.expand_dims(o_head.to(gl.int64) * strides.q[1], 1)
    p_queries = p_heads + gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, COPIES)), 0)
    m_head, p_queries = gl.broadcast(gl.expand_dims(o_head < HEADS, 1), p_queries)
    codes = gl.load(p_queries, mask=m_head, other=0)
    o_column = gl.arange(0, PADDED_HEADS, gl.SliceLayout(0, ACC))
    p_weight = p_weights + token * strides.weights[0] + o_column.to(gl.int64) * strides.weights[1]
    weight = gl.load(p_weight, mask=o_column < HEADS, other=0.0)
    length, p_row = _load_context(context, strides.tokens, table_rows, reach)
    tiles = (length + TILE - 1) // TILE
    first, step = gl.program_id(1), gl.num_programs(1)
    p_row_out = p_out + token * strides.out
    o_entry = gl.arange(0, TILE, gl.SliceLayout(1, ACC))
    if ORDER_KEYS and length <= topk:
        for tile in range(first, tiles, step):
            block = _load_block(p_row, tile, tiles, strides.tokens, BLOCK_SIZE)
            key = gl.where((block >= 0) & (block < pages), 0, INVISIBLE)
            column = tile * TILE + o_entry
            gl.store(p_row_out + column, gl.full([TILE], key, gl.int32, gl.SliceLayout(1, ACC)), mask=column < length)
    else:
        following = _load_block(p_row, first, tiles, strides.tokens, BLOCK_SIZE)
        queries.store(operand(codes))
        fence_async_shared()
        zero = gl.zeros([TILE, PADDED_HEADS], gl.float32, ACC)
        mine = (tiles - first + step - 1) // step
        for number in range(mine):
            tile, slot = first + number * step, number % STAGES
            block = following
            following = _load_block(p_row, tile + step, tiles, strides.tokens, BLOCK_SIZE)
            mbarrier.wait(ready.index(slot), (number // STAGES) & 1)
            arrived = reinterpret(keys.index(slot), gl.uint8, [TILE, D], TILE_OF_KEYS).load(KEYS)
            scale = reinterpret(scales.index(slot), gl.float32, [TILE], FLAT).load(gl.SliceLayout(1, ACC))
            key = gl.convert_layout(operand(arrived), gl.DotOperandLayout(0, ACC, 2))
            dots = warpgroup_mma(key, queries.permute((1, 0)), zero, use_acc=False, is_async=True)
            dots = warpgroup_mma_wait(0, deps=[dots])
            # After the GEMM: reads of a buffer may go on after a barrier, and TMA copies do not wait for them.
            thread_barrier()
            mbarrier.arrive(free.index(slot), count=1)
            terms = gl.maximum(dots, 0.0, propagate_nan=PROPAGATE_NAN) * gl.expand_dims(weight, 0)
            if PADDED_HEADS > HEADS:
                # The weight of a padding head is 0, but 0 * inf would be NaN.
                terms = gl.where(gl.expand_dims(o_column < HEADS, 0), terms, 0.0)
            logit = gl.sum(terms, 1) * scale
            column = tile * TILE + o_entry
            seen = (column < length) & (block >= 0) & (block < pages)
            if ORDER_KEYS:
                gl.store(p_row_out + column, gl.where(seen, order_key(logit), INVISIBLE), mask=column < length)
                if GROUP > 0:
                    # [TILE / GROUP]; rows of a group are in one warp.
                    order = gl.where(seen, order_key(logit), INVISIBLE)
                    largest = gl.max(gl.reshape(order, [TILE // GROUP, GROUP]), 1)
                    group = tile * (TILE // GROUP) + gl.arange(0, TILE // GROUP, largest.type.layout)
                    p_row_best = p_best + token * (strides.out // GROUP)
                    gl.store(p_row_best + group, largest, mask=group * GROUP < length)
            else:
                gl.store(p_row_out + column, gl.where(seen, logit, float("-inf")), mask=column < width)
        if not ORDER_KEYS:
            nothing = gl.full([TILE], float("-inf"), gl.float32, gl.SliceLayout(1, ACC))
            for tile in range(first + gl.maximum(mine, 0) * step, (width + TILE - 1) // TILE, step):
                column = tile * TILE + o_entry
                gl.store(p_row_out + column, nothing, mask=column < width)


@gluon.jit(
    do_not_specialize=["pages", "table_rows", "reach", "width", "topk"],
    do_not_specialize_on_alignment=["p_table", "p_requests", "p_lens"],
)
def indexer_score_sm90_kernel(
    p_out,  # [T, width] float32 logits, or int32 order keys; contiguous columns
    queries,  # bytes of e4m3 [T, H, 128], contiguous dims, and weights float32 [T, H]
    source_keys,  # TMA descriptor of bytes of e4m3 [pages, block_size, D]
    source_scales,  # TMA descriptor of float32 [pages, block_size]
    p_table,  # [table_rows, >= reach / block_size] int32
    p_requests,  # [>= T] int
    p_lens,  # [>= T] int
    strides,
    pages,
    table_rows,
    reach,
    width,
    topk,
    p_best,  # [T, columns of p_out / SHAPE.group] int32, contiguous; None without groups
    SHAPE: gl.constexpr,
    PDL: gl.constexpr,
):
    """Score every S-th tile of token p, from tile s on, in program (p, s) of (T, S).

    Logits are written for the whole row, -inf where nothing is visible. Order keys are written for the entries of the
    context only, and a context of up to topk entries is not scored.
    """
    p_q, p_weights = queries
    STAGES: gl.constexpr = SHAPE.stages
    context = gl.program_id(0).to(gl.int64), p_requests, p_lens, p_table
    sizes = pages, table_rows, reach, topk
    keys = gl.allocate_shared_memory(gl.uint8, [STAGES, 1, TILE, D], PAGE_OF_KEYS)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, TILE], PAGE_OF_SCALES)
    q_tile = gl.allocate_shared_memory(gl.float16, [SHAPE.padded_heads, D], SWIZZLED)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    thread_barrier()
    ring = keys, scales, ready, free
    gl.warp_specialize([
        (_score_tiles, (context, (p_out, p_best, p_q, p_weights), ring, q_tile, strides, sizes, width, SHAPE, PDL)),
        (_copy_tiles, (context, (source_keys, source_scales), ring, strides.tokens, sizes, SHAPE, PDL)),
    ], [1], [COPY_REGISTERS])  # fmt: skip


def why_unsupported_queries(q: Tensor) -> str:
    """Return why queries cannot be copied 16 bytes at a time, "" if they can."""
    steps = *q.stride()[:2], first_byte(q)
    if q.stride(2) == 1 and not any(x % ALIGN for x in steps):
        return ""
    return f"queries have contiguous dims and start at multiples of {ALIGN} bytes, these have strides {q.stride()}"


def why_unsupported(call: ScoreCall) -> str:
    """Return why the kernel does not support a call, "" if it does."""
    op = call.op
    if op.cache_format != "indexer_fp8" or op.block_size % ENTRIES:
        got = f"{op.cache_format} in pages of {op.block_size}"
        return f"it scores indexer_fp8 in pages of a multiple of {ENTRIES} entries, this is {got}"
    pages = call.pages
    if pages.stride(0) % ALIGN or first_byte(pages) % ALIGN:
        at = f"these start at byte {first_byte(pages)}, {pages.stride(0)} bytes apart"
        return f"pages start at multiples of {ALIGN} bytes, {at}"
    return "the cache has at least 1 page, this has 0" if pages.shape[0] == 0 else why_unsupported_queries(op.q)


def score(call: ScoreCall, splits: int, stages: int = STAGES) -> None:
    """Launch the kernel; the tiles of a token are split among `splits` programs."""
    op, out, pages = call.op, call.out, call.pages
    tokens, heads, columns = op.q.shape
    padded = max(16, triton.next_power_of_2(heads))
    keys = pages.as_strided((pages.shape[0], op.block_size, columns), (pages.stride(0), columns, 1))
    scales = pages[:, op.block_size * columns :].view(torch.float32)[:, : op.block_size]
    launch_kernel(
        indexer_score_sm90_kernel,
        (tokens, splits),
        out,
        (op.q.view(torch.uint8), op.weights),
        TensorDescriptor.from_tensor(keys, [1, ENTRIES, columns], _PAGE_OF_KEYS),
        TensorDescriptor.from_tensor(scales, [1, ENTRIES], _PAGE_OF_SCALES),
        op.block_table,
        op.token_to_req,
        op.context_lens,
        Strides(
            out.stride(0), op.q.stride()[:2], op.weights.stride(),
            (*op.block_table.stride(), op.token_to_req.stride(0), op.context_lens.stride(0)),
        ),
        pages.shape[0],
        op.block_table.shape[0],
        call.visible_width,
        call.width,
        call.topk,
        call.best,
        SHAPE=Shape(op.block_size, call.order_keys, heads, padded, stages, call.dependent, call.group),
        # Scoring threads and those of the copy warp alike.
        maxnreg=max(64, min(MAX_REGISTERS, padded // 2 + 32)),
        **pdl_arguments(out.device, tokens * splits),
    )  # fmt: skip
