"""How the programs of a cluster add up their parts of a tile of a product: each those of a share of its tokens.

Parts are added in their order, whenever they came, so that a product has the same bits every time.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .barriers_hopper import thread_barrier
from .cluster_hopper import (
    await_letters,
    meet,
    open_inbox,
    put_words,
    received_pairs,
    received_words,
    send_pairs,
    send_parcels,
    words_of,
)
from .grouped_matmul_store_hopper import store_sums

MOST_TOKENS_OF_LETTERS, MOST_RESULTS_OF_PARCELS = 16, 32 * 64
"""Of a tile whose parts go from registers to where they are added up; and whose parts go there by the copy engine.
Those of larger tiles are fetched. On an H200 32 tokens of V4-Flash's wq_a and wkv beside HCA's rows take a microsecond
longer if they are fetched, and 64 tokens of wo_a one longer if they are sent."""
PAD = 4
"""Words behind each token of a part that is put: the threads of a warp then store to different banks."""

_MOST_TOKENS_OF_LETTERS = gl.constexpr(MOST_TOKENS_OF_LETTERS)
_MOST_RESULTS_OF_PARCELS = gl.constexpr(MOST_RESULTS_OF_PARCELS)
_PAD = gl.constexpr(PAD)


def tokens_of_share(splits: int, block_m: int) -> int:
    """How many of a tile's tokens a program of a cluster of `splits` adds up, an even number."""
    return -(-block_m // (2 * splits)) * 2


def pitch_of(share: int) -> int:
    """Words between two rows of a share that is sent: an odd number of pairs, so that neighbours use all banks."""
    return share + 2 * (share % 4 == 0)


def bytes_used(splits: int, block_m: int, block_n: int) -> int:
    """Shared memory of a program, for what it is sent, and for what it has for others."""
    share = tokens_of_share(splits, block_m)
    if block_m <= MOST_TOKENS_OF_LETTERS:
        return 4 * splits * block_n * pitch_of(share)
    rows = block_m + (splits * share if block_m * block_n <= MOST_RESULTS_OF_PARCELS else 0)
    return 4 * rows * (block_n + PAD)


share_of = triton.constexpr_function(tokens_of_share)
_pitch_of = triton.constexpr_function(pitch_of)


@triton.constexpr_function
def _whole_tokens(block_n: int, warps: int) -> Any:
    """How results `[tokens, block_n]` are spread over threads: four neighbours to each, whole tokens to a warp."""
    lanes = min(32, block_n // 4)
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def await_shares(part, tokens, first_token, SPLITS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """What a program does early: an inbox for the parts of its share of the tokens from `first_token` on."""
    LETTERS: gl.constexpr = BLOCK_M <= _MOST_TOKENS_OF_LETTERS
    inbox = 0
    if LETTERS or BLOCK_M * BLOCK_N <= _MOST_RESULTS_OF_PARCELS:
        SHARE: gl.constexpr = share_of(SPLITS, BLOCK_M)
        WORDS: gl.constexpr = BLOCK_N if LETTERS else BLOCK_N + _PAD
        wanted = (part * SHARE < BLOCK_M) & (first_token + part * SHARE < tokens)
        # Of the last share, the tokens that the tile has.
        count = gl.minimum(BLOCK_M - part * SHARE, SHARE)
        inbox = open_inbox(gl.where(wanted, 4 * SPLITS * WORDS * count, 0))
    return inbox


@gluon.jit
def store_shares(
    acc, part, inbox, p_out, p_out_scale, out_stride, tokens, first_token, group, block, rows,
    SPLITS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Store a tile `[BLOCK_N, BLOCK_M]` of which this program has part `part`, its place in the cluster."""
    SHARE: gl.constexpr = share_of(SPLITS, BLOCK_M)
    PITCH: gl.constexpr = BLOCK_N + _PAD
    begin = part * SHARE
    count = gl.minimum(gl.minimum(SHARE, BLOCK_M - begin), tokens - first_token - begin)
    first_column = group.to(gl.int64) * rows + block * BLOCK_N
    if BLOCK_M <= _MOST_TOKENS_OF_LETTERS:
        meet(False)
        _send(acc, part, inbox, tokens - first_token, SHARE, BLOCK_M, BLOCK_N)
        if count > 0:
            await_letters(inbox)
            _store_received(
                p_out, p_out_scale, out_stride, tokens, first_token + begin, count, first_column,
                rows - block * BLOCK_N, SPLITS, SHARE, BLOCK_N, WARPS,
            )  # fmt: skip
    else:
        # All have multiplied what lies there now.
        thread_barrier()
        _put(acc, BLOCK_M, BLOCK_N)
        if BLOCK_M * BLOCK_N <= _MOST_RESULTS_OF_PARCELS:
            fence_async_shared()
            thread_barrier()
            meet(False)
            receivers = (gl.minimum(BLOCK_M, tokens - first_token) + SHARE - 1) // SHARE
            INBOX: gl.constexpr = 4 * BLOCK_M * PITCH
            send_parcels(inbox, receivers, INBOX + part * (4 * SHARE * PITCH), 4 * SHARE * PITCH, INBOX)
            if count > 0:
                await_letters(inbox)
                _store_parcels(
                    p_out, p_out_scale, out_stride, tokens, first_token + begin, count, first_column,
                    rows - block * BLOCK_N, INBOX, SPLITS, SHARE, BLOCK_N, WARPS,
                )  # fmt: skip
        else:
            meet(True)
            store_fetched(
                p_out, p_out_scale, out_stride, tokens, first_token, begin, count, first_column,
                rows - block * BLOCK_N, SPLITS, SHARE, BLOCK_N, PITCH, WARPS,
            )  # fmt: skip
            # What is stored has been read.
            thread_barrier()
        # Nobody ends before all have what it put: the copy engine reads it, or they do.
        meet(False)


@gluon.jit
def _send(acc, part, inbox, tokens, SHARE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Send a part to the programs whose shares have some of the `tokens` tokens."""
    ACC: gl.constexpr = acc.type.layout
    PITCH: gl.constexpr = _pitch_of(SHARE)
    o_m = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, ACC)), 0)
    o_n = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(1, ACC)), 1)
    owner, offset = o_m // SHARE, 4 * ((part * BLOCK_N + o_n) * PITCH + o_m % SHARE)
    send_pairs(inbox, owner, offset, (owner * SHARE < tokens).to(gl.int32), acc)


@gluon.jit
def _store_received(
    p_out, p_out_scale, out_stride, tokens, first_token, count, first_column, rows,
    SPLITS: gl.constexpr, SHARE: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Add up what was sent for `count` tokens."""
    PITCH: gl.constexpr = _pitch_of(SHARE)
    WIDTH: gl.constexpr = triton.next_power_of_2(SHARE)
    # What is quantised is a warp's: others would meet in shared memory, where letters may still be unread.
    WARPS_N: gl.constexpr = 1 if p_out_scale is not None else WARPS if BLOCK_N >= 32 * WARPS else BLOCK_N // 32
    OUT: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [WARPS_N, WARPS // WARPS_N], [1, 0])
    token = gl.arange(0, WIDTH, gl.SliceLayout(0, OUT))
    o_m = gl.expand_dims(token, 0)
    o_n = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(1, OUT)), 1)
    # What lies behind a share nobody sent: the first two tokens stand in for it.
    offset = 4 * (o_n * PITCH + gl.where(o_m < count, o_m, o_m % 2))
    total = gl.zeros([BLOCK_N, WIDTH], gl.float32, OUT)
    for part in gl.static_range(SPLITS):
        total += received_pairs(4 * BLOCK_N * PITCH * part + offset)
    store_sums(total, first_token + token, first_column, token < count, p_out, p_out_scale, out_stride, tokens, rows, 0)


@gluon.jit
def _put(acc, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Put a part where the copy engine, or who wants it, takes it from."""
    ACC: gl.constexpr = acc.type.layout
    o_m = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, ACC)), 0)
    o_n = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(1, ACC)), 1)
    put_words(acc, 4 * (o_m * (BLOCK_N + _PAD) + o_n))


@gluon.jit
def _store_parcels(
    p_out, p_out_scale, out_stride, tokens, first_token, count, first_column, rows, INBOX: gl.constexpr,
    SPLITS: gl.constexpr, SHARE: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Add up the parcels for `count` tokens, from bytes INBOX on. A warp has whole tokens."""
    PITCH: gl.constexpr = BLOCK_N + _PAD
    WIDTH: gl.constexpr = triton.next_power_of_2(SHARE)
    OUT: gl.constexpr = _whole_tokens(BLOCK_N, WARPS)
    share = gl.arange(0, WIDTH, gl.SliceLayout(1, OUT))
    o_column = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(0, OUT)), 0)
    # What lies behind a share nobody sent: the first token stands in for it.
    offset = INBOX + 4 * (gl.expand_dims(gl.where(share < count, share, 0), 1) * PITCH + o_column)
    total = gl.zeros([WIDTH, BLOCK_N], gl.float32, OUT)
    for part in gl.static_range(SPLITS):
        total += received_words(4 * SHARE * PITCH * part + offset)
    store_sums(total, first_token + share, first_column, share < count, p_out, p_out_scale, out_stride, tokens, rows, 1)


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
