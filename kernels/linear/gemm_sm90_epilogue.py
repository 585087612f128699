"""Epilogues of the sm_90 GEMMs: store a tile, and combine the partial sums of a tile's splits.

Partial sums are combined in a fixed order, not in the order of arrival: the same call gives the same bits.
Throughout, `out` is a tuple of the result pointer, the pointer to the scales of quantized results (float32
`[G * N / 128, T]`) or None, and the stride of a token; `tile` is tokens, first token, group, number of the block of
rows, and rows per group; `span` is tokens, first token, number of tokens, first column and remaining columns.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ... import layout
from ..hopper.cluster_mailbox import (
    cluster_barrier,
    fetch_words,
    mailbox_bytes,
    open_mailbox,
    read_messages,
    send_messages,
    store_fetched_words,
    wait_mailboxes_open,
    wait_messages,
)
from ..hopper.gluon import thread_barrier
from ..hopper.quant import quantize

ACT_TILE = gl.constexpr(layout.ACT_TILE)


@gluon.jit
def store_sums(y, token, live, out, tokens, first_column, columns, AXIS: gl.constexpr):
    """Store sums whose columns, `columns` at most from `first_column` on, lie along AXIS, for tokens that are `live`.

    Sums to be quantized are a tile of 128 columns.
    """
    p_out, p_out_scale, out_stride = out
    COLUMNS: gl.constexpr = y.shape[AXIS]
    o_m = gl.expand_dims(token, AXIS).to(gl.int64)
    o_n = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(1 - AXIS, y.type.layout)), 1 - AXIS)
    p_tile = p_out + (o_m * out_stride + (first_column + o_n))
    wanted = gl.expand_dims(live, AXIS) & (o_n < columns)
    if p_out_scale is None:
        gl.store(p_tile, y.to(p_out.dtype.element_ty), mask=wanted)
    else:
        gl.static_assert(COLUMNS == ACT_TILE)
        values, scale = quantize(y.to(gl.bfloat16).to(gl.float32), AXIS)
        gl.store(p_tile, values, mask=wanted)
        gl.store(p_out_scale + (first_column // ACT_TILE * tokens + token), scale, mask=live)


@triton.constexpr_function
def _columns_layout(block_n: int, warps: int) -> Any:
    """Return a register layout of results `[tokens, block_n]`: eight neighbouring columns per thread."""
    lanes = min(32, block_n // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def store_tile(acc, out, tile, WARPS: gl.constexpr):
    """Store a tile `[block_n, block_m]`, transposed through shared memory: the results of a token are neighbours."""
    tokens, first_token, group, block, rows = tile
    BLOCK_N: gl.constexpr = acc.shape[0]
    BLOCK_M: gl.constexpr = acc.shape[1]
    ROUNDED: gl.constexpr = out[0].dtype.element_ty if out[1] is None else gl.bfloat16
    BITS: gl.constexpr = 32 if gl.float32 == ROUNDED else 16
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=BITS, rank=2)
    OUT: gl.constexpr = _columns_layout(BLOCK_N, WARPS)
    shared = gl.allocate_shared_memory(ROUNDED, [BLOCK_M, BLOCK_N], SWIZZLED)
    shared.permute((1, 0)).store(acc.to(ROUNDED))
    thread_barrier()
    token = first_token + gl.arange(0, BLOCK_M, gl.SliceLayout(1, OUT))
    first_column = group.to(gl.int64) * rows + block * BLOCK_N
    store_sums(shared.load(OUT), token, token < tokens, out, tokens, first_column, rows - block * BLOCK_N, 1)


@gluon.jit
def combine_in_memory(acc, part, number, tiles, out, partials, tile, SPLITS: gl.constexpr, WARPS: gl.constexpr):
    """Store the partial sums of a tile's split in global memory; the last CTA of the tile to arrive combines them.

    `number` is the tile's, of `tiles`; `partials` is a pointer to float32 `[SPLITS, tiles, block_n * block_m]` and one
    to the arrival counters, which are left at zero.
    """
    p_partial, p_arrived = partials
    ACC: gl.constexpr = acc.type.layout
    BLOCK_N: gl.constexpr = acc.shape[0]
    BLOCK_M: gl.constexpr = acc.shape[1]
    o_m = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, ACC)), 0)
    o_n = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(1, ACC)), 1)
    # In groups of eight tokens, so that the stores of a warp are contiguous.
    p_partial += number.to(gl.int64) * (BLOCK_N * BLOCK_M) + ((o_m // 8 * BLOCK_N + o_n) * 8 + o_m % 8)
    split_stride = tiles.to(gl.int64) * (BLOCK_N * BLOCK_M)
    gl.store(p_partial + part * split_stride, acc)
    # Every thread has stored before one of them announces it.
    thread_barrier()
    if gl.atomic_add(p_arrived + number, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
        acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
        for other in gl.static_range(SPLITS):
            acc += gl.load(p_partial + other * split_stride, cache_modifier=".cg")
        store_tile(acc, out, tile, WARPS)
        gl.store(p_arrived + number, 0)


MAX_SENT_TOKENS = 32
"""Largest tile of tokens that sends partial sums to mailboxes; those of larger tiles are fetched."""
HALF_COMBINERS_TOKENS = range(16, MAX_SENT_TOKENS + 1)
HALF_COMBINERS_K_BLOCKS = 8
"""Tokens of a tile, and most K-blocks of a CTA, for which only half of the CTAs of a cluster combine: the others end
once they have sent, and free their SM for the next launch."""
PAD = 4
"""Words after each token of partial sums that are fetched: the threads of a warp then store to different banks."""

_PAD = gl.constexpr(PAD)


def tokens_per_combiner(splits: int, block_m: int, k_blocks: int) -> int:
    """Return how many tokens a CTA combines, an even number, in a cluster of `splits` CTAs of `k_blocks` K-blocks."""
    half = block_m in HALF_COMBINERS_TOKENS and k_blocks <= HALF_COMBINERS_K_BLOCKS
    return min(block_m, 2 * -(-block_m // (2 * splits)) * (1 + half))


def combine_mailbox_bytes(splits: int, block_m: int, block_n: int, k_blocks: int) -> int:
    """Return the size of a CTA's mailbox for partial sums, 0 if they are fetched."""
    if block_m > MAX_SENT_TOKENS:
        return 0
    return mailbox_bytes(4 * splits * block_n * tokens_per_combiner(splits, block_m, k_blocks))


def combine_fetched_bytes(block_m: int, block_n: int) -> int:
    """Return the size of the partial sums that a CTA stores for others to fetch, 0 if they are sent."""
    return 4 * block_m * (block_n + PAD) if block_m > MAX_SENT_TOKENS else 0


@triton.constexpr_function
def _tokens_layout(block_n: int, warps: int) -> Any:
    """Return a register layout of results `[tokens, block_n]`: four neighbours per thread, whole tokens per warp."""
    lanes = min(32, block_n // 4)
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [warps, 1], [1, 0])


@triton.constexpr_function
def _mailbox_layout(block_n: int, width: int, warps: int, by_warp: bool) -> Any:
    """Return the register layout of results `[block_n, width]` in the order of `_mailbox_offset`, 16 bytes per thread.

    `by_warp` asks for all columns of a token in one warp.
    """
    columns = [[1 << i, 0] for i in range(6, block_n.bit_length() - 1)]
    tokens = [[0, 1 << i] for i in range(1, width.bit_length() - 1)]
    inside, across = (columns, tokens) if by_warp else ([], columns + tokens)
    bits = warps.bit_length() - 1
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0], *inside, *across[bits:]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [16, 0], [32, 0]],
        warp_bases=(across + [[0, 0]] * bits)[:bits],
        block_bases=[],
        shape=[block_n, width],
    )


@gluon.jit
def open_combine_mailbox(
    mailbox, part, tokens, first_token,
    SPLITS: gl.constexpr, COMBINE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Open the mailbox of CTA `part` of a cluster for the partial sums of the COMBINE tokens that it combines."""
    wanted = (part * COMBINE < BLOCK_M) & (first_token + part * COMBINE < tokens)
    # The last CTA gets the tokens that the tile has left.
    count = gl.minimum(BLOCK_M - part * COMBINE, COMBINE)
    open_mailbox(mailbox, gl.where(wanted, 4 * SPLITS * BLOCK_N * count, 0))


@gluon.jit
def combine_in_cluster(
    acc, part, mailbox, out, tile,
    SPLITS: gl.constexpr, COMBINE: gl.constexpr, SENT: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Combine and store a tile whose partial sums `[block_n, block_m]` this CTA has as number `part` of its cluster."""
    tokens, first_token, group, block, rows = tile
    BLOCK_N: gl.constexpr = acc.shape[0]
    BLOCK_M: gl.constexpr = acc.shape[1]
    begin = part * COMBINE
    count = gl.minimum(gl.minimum(COMBINE, BLOCK_M - begin), tokens - first_token - begin)
    first_column = group.to(gl.int64) * rows + block * BLOCK_N
    if SENT:
        wait_mailboxes_open()
        _send(acc, part, mailbox, tokens - first_token, COMBINE)
        if count > 0:
            wait_messages(mailbox)
            span = tokens, first_token + begin, count, first_column, rows - block * BLOCK_N
            _store_received(mailbox, out, span, SPLITS, COMBINE, BLOCK_N, WARPS)
    else:
        thread_barrier()
        _store_to_fetch(acc)
        cluster_barrier(True)
        span = tokens, first_token, count, first_column, rows - block * BLOCK_N
        store_fetched(out, span, begin, SPLITS, COMBINE, BLOCK_N, BLOCK_N + _PAD, WARPS)
        # No CTA ends before the others have fetched its partial sums.
        thread_barrier()
        cluster_barrier(False)


@gluon.jit
def _mailbox_offset(part, column, token, COMBINE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return the byte offset of partial sums `part`: columns `column` and `column` + 8 of `token` and the next one.

    A warp holds 8 such columns for 4 such pairs of tokens of an MMA result: its pieces of 128 bytes are contiguous.
    """
    return 16 * (((part * (COMBINE // 2) + token // 2) * (BLOCK_N // 16) + column // 16) * 8 + column % 8)


@gluon.jit
def _send(acc, part, mailbox, tokens, COMBINE: gl.constexpr):
    """Send partial sums, as the MMA leaves them in registers, to the CTAs that combine any of the `tokens` tokens."""
    ACC: gl.constexpr = acc.type.layout
    BLOCK_N: gl.constexpr = acc.shape[0]
    BLOCK_M: gl.constexpr = acc.shape[1]
    o_m = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, ACC)), 0)
    o_n = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(1, ACC)), 1)
    owner = o_m // COMBINE
    offset = _mailbox_offset(part, o_n, o_m % COMBINE, COMBINE, BLOCK_N)
    send_messages(mailbox, owner, offset, (owner * COMBINE < tokens).to(gl.int32), acc)


@gluon.jit
def _store_received(
    mailbox, out, span, SPLITS: gl.constexpr, COMBINE: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Combine and store the partial sums in the mailbox."""
    tokens, first_token, count, first_column, columns = span
    WIDTH: gl.constexpr = triton.next_power_of_2(COMBINE)
    # To be quantized, a token is within a warp: its maximum would otherwise go through shared memory.
    OUT: gl.constexpr = _mailbox_layout(BLOCK_N, WIDTH, WARPS, out[1] is not None)
    token = gl.arange(0, WIDTH, gl.SliceLayout(0, OUT))
    o_m = gl.expand_dims(token, 0)
    o_n = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(1, OUT)), 1)
    # Nothing was sent for tokens past the last one; the first two are read instead.
    offset = _mailbox_offset(0, o_n, gl.where(o_m < count, o_m, o_m % 2), COMBINE, BLOCK_N)
    total = gl.zeros([BLOCK_N, WIDTH], gl.float32, OUT)
    for part in gl.static_range(SPLITS):
        total += read_messages(mailbox, 4 * BLOCK_N * COMBINE * part + offset)
    store_sums(total, first_token + token, token < count, out, tokens, first_column, columns, 0)


@gluon.jit
def _store_to_fetch(acc):
    """Store partial sums where the other CTAs of the cluster fetch them."""
    ACC: gl.constexpr = acc.type.layout
    BLOCK_N: gl.constexpr = acc.shape[0]
    BLOCK_M: gl.constexpr = acc.shape[1]
    o_m = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, ACC)), 0)
    o_n = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(1, ACC)), 1)
    store_fetched_words(acc, 4 * (o_m * (BLOCK_N + _PAD) + o_n))


@gluon.jit
def store_fetched(
    out, span, begin, SPLITS: gl.constexpr, COMBINE: gl.constexpr, BLOCK_N: gl.constexpr, PITCH: gl.constexpr,
    WARPS: gl.constexpr, unsplit=None,
):  # fmt: skip
    """Fetch, combine and store the partial sums of the tokens from `begin` on, PITCH words per token.

    `unsplit` is None, or whether this CTA has all of its tile's sums, and its number in the cluster: there is nothing
    to combine then, but the code is the same.
    """
    tokens, first_token, count, first_column, columns = span
    WIDTH: gl.constexpr = triton.next_power_of_2(COMBINE)
    OUT: gl.constexpr = _tokens_layout(BLOCK_N, WARPS)
    own = gl.arange(0, WIDTH, gl.SliceLayout(1, OUT))
    o_m = gl.expand_dims(own, 1)
    o_n = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(0, OUT)), 0)
    wanted = ((o_m < count) & (o_n < columns)).to(gl.int32)
    offset = 4 * ((begin + o_m) * PITCH + o_n)
    total = gl.zeros([WIDTH, BLOCK_N], gl.float32, OUT)
    for part in gl.static_range(SPLITS):
        if unsplit is None:
            total += fetch_words(part, offset, wanted)
        else:
            alone, rank = unsplit
            total += fetch_words(gl.where(alone, rank, part), offset, gl.where(alone & (part > 0), 0, wanted))
    store_sums(total, first_token + begin + own, own < count, out, tokens, first_column, columns, 1)
