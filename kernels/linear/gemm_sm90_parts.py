"""How a program of a product of few tokens on Hopper gets rid of its sums.

How the programs of a cluster add up their parts of a tile of a product: each those of a share of its tokens.

Parts are added in their order, whenever they came, so that a product has the same bits every time.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ... import layout
from ..hopper.cluster_mailbox import (
    await_letters,
    inbox_bytes,
    inboxes_open,
    meet,
    open_inbox,
    put_words,
    received_words,
    send_words,
    words_of,
)
from ..hopper.gluon import thread_barrier
from ..hopper.quant import quantised

STRIP = gl.constexpr(layout.ACT_TILE)


@gluon.jit
def store_sums(y, token, first_column, live, p_out, p_out_scale, out_stride, tokens, rows, AXIS: gl.constexpr):
    """Store a tile whose columns, from `first_column` of all on, lie along AXIS, for those of `token` that are `live`.

    Of sums that are quantised, a tile has one whole strip.
    """
    COLUMNS: gl.constexpr = y.shape[AXIS]
    o_m = gl.expand_dims(token, AXIS).to(gl.int64)
    o_n = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(1 - AXIS, y.type.layout)), 1 - AXIS)
    p_tile = p_out + (o_m * out_stride + (first_column + o_n))
    wanted = gl.expand_dims(live, AXIS) & (o_n < rows)
    if p_out_scale is None:
        gl.store(p_tile, y.to(p_out.dtype.element_ty), mask=wanted)
    else:
        gl.static_assert(COLUMNS == STRIP)
        values, scale = quantised(y.to(gl.bfloat16).to(gl.float32), AXIS)
        gl.store(p_tile, values, mask=wanted)
        gl.store(p_out_scale + (first_column // STRIP * tokens + token), scale, mask=live)


@gluon.jit
def store_tile(
    acc, p_out, p_out_scale, out_stride, tokens, first_token, group, block, rows,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, OUT: gl.constexpr, OUT_TILE: gl.constexpr,
):  # fmt: skip
    """A tile `[BLOCK_N, BLOCK_M]`, turned on its way through shared memory: outputs of a token are neighbours."""
    ROUNDED: gl.constexpr = p_out.dtype.element_ty if p_out_scale is None else gl.bfloat16
    tile = gl.allocate_shared_memory(ROUNDED, [BLOCK_M, BLOCK_N], OUT_TILE)
    tile.permute((1, 0)).store(acc.to(ROUNDED))
    thread_barrier()
    token = first_token + gl.arange(0, BLOCK_M, gl.SliceLayout(1, OUT))
    first_column = group.to(gl.int64) * rows + block * BLOCK_N
    store_sums(
        tile.load(OUT), token, first_column, token < tokens, p_out, p_out_scale, out_stride, tokens,
        rows - block * BLOCK_N, 1,
    )  # fmt: skip


@gluon.jit
def store_parts(
    acc, part, tile, tiles, p_out, p_out_scale, p_part, p_arrived, out_stride, tokens, first_token, group, block, rows,
    SPLITS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, OUT: gl.constexpr, OUT_TILE: gl.constexpr,
):  # fmt: skip
    """A tile of which each of SPLITS programs has a part: the last of them to arrive adds them up, in their order."""
    ACC: gl.constexpr = acc.type.layout
    o_m = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, ACC)), 0)
    o_n = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(1, ACC)), 1)
    # Eight tokens at a time: what a warp stores together lies together.
    p_part += tile.to(gl.int64) * (BLOCK_N * BLOCK_M) + ((o_m // 8 * BLOCK_N + o_n) * 8 + o_m % 8)
    part_stride = tiles.to(gl.int64) * (BLOCK_N * BLOCK_M)
    gl.store(p_part + part * part_stride, acc)
    # Every thread has stored before one announces it.
    thread_barrier()
    if gl.atomic_add(p_arrived + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
        acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
        for other in gl.static_range(SPLITS):
            acc += gl.load(p_part + other * part_stride, cache_modifier=".cg")
        store_tile(
            acc, p_out, p_out_scale, out_stride, tokens, first_token, group, block, rows, BLOCK_M, BLOCK_N, OUT,
            OUT_TILE,
        )  # fmt: skip
        gl.store(p_arrived + tile, 0)


MOST_TOKENS_OF_LETTERS = 32
"""Of a tile whose parts go from registers to where they are added up; those of larger tiles are fetched. Up to 32
tokens, sending takes an H200 0.2 to 1 us less than fetching does, or the copy engine. Of 64, with an inbox of its own,
V4-Flash's wo_a takes 10.3 us instead of 10.0, wo_b as long as fetched, and wq_a and wkv 5.9 instead of 5.8."""
TOKENS_OF_FEW = range(16, MOST_TOKENS_OF_LETTERS + 1)
STRIPS_OF_FEW = 8
"""Tokens of a tile, and most strips of a program, of which half as many programs as could add parts up: the others end
when they have sent, and the next launch has their place. V4-Flash's wq_a and wkv of 32 tokens take 4.5 us instead of
5.4, and 0.5 less in a layer; of 8 tokens 2.9 instead of 2.7. With longer parts a layer of 32 tokens takes 2 us more."""
PAD = 4
"""Words behind each token of a part that is put: the threads of a warp then store to different banks."""

_PAD = gl.constexpr(PAD)


def tokens_of_share(splits: int, block_m: int, each: int) -> int:
    """How many of a tile's tokens a program adds up, an even number, in a cluster of `splits` of `each` strips."""
    few = block_m in TOKENS_OF_FEW and each <= STRIPS_OF_FEW
    return min(block_m, 2 * -(-block_m // (2 * splits)) * (1 + few))


def bytes_of_inbox(splits: int, block_m: int, block_n: int, each: int) -> int:
    """What a program has for what it is sent, 0 if sums are fetched."""
    if block_m > MOST_TOKENS_OF_LETTERS:
        return 0
    return inbox_bytes(4 * splits * block_n * tokens_of_share(splits, block_m, each))


def bytes_put(block_m: int, block_n: int) -> int:
    """What a program has for others to fetch, of what its tiles were in; 0 if it sends."""
    return 4 * block_m * (block_n + PAD) if block_m > MOST_TOKENS_OF_LETTERS else 0


@triton.constexpr_function
def _whole_tokens(block_n: int, warps: int) -> Any:
    """How results `[tokens, block_n]` are spread over threads: four neighbours to each, whole tokens to a warp."""
    lanes = min(32, block_n // 4)
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [warps, 1], [1, 0])


@triton.constexpr_function
def _as_sent(block_n: int, width: int, warps: int, whole: bool) -> Any:
    """How results `[block_n, width]` are spread over threads where they come as `_place` says: 16 bytes to each.

    `whole` asks for all columns of a token in one warp.
    """
    columns = [[1 << i, 0] for i in range(6, block_n.bit_length() - 1)]
    tokens = [[0, 1 << i] for i in range(1, width.bit_length() - 1)]
    alone, shared = (columns, tokens) if whole else ([], columns + tokens)
    by_warp = warps.bit_length() - 1
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0], *alone, *shared[by_warp:]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [16, 0], [32, 0]],
        warp_bases=(shared + [[0, 0]] * by_warp)[:by_warp],
        block_bases=[],
        shape=[block_n, width],
    )


@gluon.jit
def await_shares(
    inbox, part, tokens, first_token,
    SPLITS: gl.constexpr, SHARE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """What a program with an inbox does early: it waits for the parts of its share of the tokens from `first_token`."""
    wanted = (part * SHARE < BLOCK_M) & (first_token + part * SHARE < tokens)
    # Of the last share, the tokens that the tile has.
    count = gl.minimum(BLOCK_M - part * SHARE, SHARE)
    open_inbox(inbox, gl.where(wanted, 4 * SPLITS * BLOCK_N * count, 0))


@gluon.jit
def store_shares(
    acc, part, inbox, p_out, p_out_scale, out_stride, tokens, first_token, group, block, rows,
    SPLITS: gl.constexpr, SHARE: gl.constexpr, SENT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Store a tile `[BLOCK_N, BLOCK_M]` of which this program has part `part`, its place in the cluster."""
    begin = part * SHARE
    count = gl.minimum(gl.minimum(SHARE, BLOCK_M - begin), tokens - first_token - begin)
    first_column = group.to(gl.int64) * rows + block * BLOCK_N
    if SENT:
        inboxes_open()
        _send(acc, part, inbox, tokens - first_token, SHARE, BLOCK_M, BLOCK_N)
        if count > 0:
            await_letters(inbox)
            _store_received(
                inbox, p_out, p_out_scale, out_stride, tokens, first_token + begin, count, first_column,
                rows - block * BLOCK_N, SPLITS, SHARE, BLOCK_N, WARPS,
            )  # fmt: skip
    else:
        thread_barrier()
        _put(acc, BLOCK_M, BLOCK_N)
        meet(True)
        store_fetched(
            p_out, p_out_scale, out_stride, tokens, first_token, begin, count, first_column,
            rows - block * BLOCK_N, SPLITS, SHARE, BLOCK_N, BLOCK_N + _PAD, WARPS,
        )  # fmt: skip
        # What is stored has been read, and nobody ends before all have what it put.
        thread_barrier()
        meet(False)


@gluon.jit
def _place(part, column, token, SHARE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Bytes in front of part `part` of columns `column` and 8 further, for tokens `token` and the next, of a share.

    A warp of the matrix unit has 8 such columns for 4 such pairs of tokens: 128 bytes at a time lie together.
    """
    return 16 * (((part * (SHARE // 2) + token // 2) * (BLOCK_N // 16) + column // 16) * 8 + column % 8)


@gluon.jit
def _send(acc, part, inbox, tokens, SHARE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Send a part to the programs whose shares have some of the `tokens` tokens, as the matrix unit leaves it."""
    ACC: gl.constexpr = acc.type.layout
    o_m = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, ACC)), 0)
    o_n = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(1, ACC)), 1)
    owner = o_m // SHARE
    send_words(inbox, owner, _place(part, o_n, o_m % SHARE, SHARE, BLOCK_N), (owner * SHARE < tokens).to(gl.int32), acc)


@gluon.jit
def _store_received(
    inbox, p_out, p_out_scale, out_stride, tokens, first_token, count, first_column, rows,
    SPLITS: gl.constexpr, SHARE: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Add up what was sent for `count` tokens."""
    WIDTH: gl.constexpr = triton.next_power_of_2(SHARE)
    # What is quantised is a warp's: others would meet in shared memory.
    OUT: gl.constexpr = _as_sent(BLOCK_N, WIDTH, WARPS, p_out_scale is not None)
    token = gl.arange(0, WIDTH, gl.SliceLayout(0, OUT))
    o_m = gl.expand_dims(token, 0)
    o_n = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(1, OUT)), 1)
    # What lies behind a share nobody sent: the first two tokens stand in for it.
    offset = _place(0, o_n, gl.where(o_m < count, o_m, o_m % 2), SHARE, BLOCK_N)
    total = gl.zeros([BLOCK_N, WIDTH], gl.float32, OUT)
    for part in gl.static_range(SPLITS):
        total += received_words(inbox, 4 * BLOCK_N * SHARE * part + offset)
    store_sums(total, first_token + token, first_column, token < count, p_out, p_out_scale, out_stride, tokens, rows, 0)


@gluon.jit
def _put(acc, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Put a part where who wants it takes it from."""
    ACC: gl.constexpr = acc.type.layout
    o_m = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, ACC)), 0)
    o_n = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(1, ACC)), 1)
    put_words(acc, 4 * (o_m * (BLOCK_N + _PAD) + o_n))


@gluon.jit
def store_fetched(
    p_out, p_out_scale, out_stride, tokens, first_token, begin, count, first_column, rows,
    SPLITS: gl.constexpr, SHARE: gl.constexpr, BLOCK_N: gl.constexpr, PITCH: gl.constexpr, WARPS: gl.constexpr,
    alone=None, rank=None,
):  # fmt: skip
    """Add up the parts of `count` tokens of the tile, PITCH words apart, from `begin` on. A warp has whole tokens.

    Where `alone`, program `rank` of the cluster has all of the tile, and there is nothing to add.
    """
    WIDTH: gl.constexpr = triton.next_power_of_2(SHARE)
    OUT: gl.constexpr = _whole_tokens(BLOCK_N, WARPS)
    share = gl.arange(0, WIDTH, gl.SliceLayout(1, OUT))
    o_share = gl.expand_dims(share, 1)
    o_column = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(0, OUT)), 0)
    wanted = ((o_share < count) & (o_column < rows)).to(gl.int32)
    offset = 4 * ((begin + o_share) * PITCH + o_column)
    total = gl.zeros([WIDTH, BLOCK_N], gl.float32, OUT)
    for part in gl.static_range(SPLITS):
        if alone is None:
            total += words_of(part, offset, wanted)
        else:
            total += words_of(gl.where(alone, rank, part), offset, gl.where(alone & (part > 0), 0, wanted))
    store_sums(
        total, first_token + begin + share, first_column, share < count, p_out, p_out_scale, out_stride, tokens, rows, 1
    )
