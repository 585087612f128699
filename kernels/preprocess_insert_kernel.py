"""The kernel of `preprocess_insert`: which program does which job, with device functions that other kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

from .compress_entry import compress_tokens
from .early import start
from .kv_insert import insert_rows
from .norm import norm_rows, store_normed, store_quantised
from .save_partial_states import save_rows


@triton.jit
def _pool_job(
    first, part, c, strides, p_pooled, p_arrived, p_requests, p_positions, p_cos_sin, p_kv_scale, eps, request_stride,
    position_stride, cos_sin_strides, tokens, state_pages, num_slots, table_rows, table_columns, max_pos,
    FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr, STATE_BLOCK: tl.constexpr, RATIO: tl.constexpr,
    GROUPS: tl.constexpr, HADAMARD: tl.constexpr, TOKENS: tl.constexpr, TOGETHER: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Pool one part of the channels for the TOKENS tokens from `first` on."""
    compress_tokens(
        first // TOKENS, part, c.cache, c.state_cache, c.kv_score, c.ape,
        c.norm_weight, p_cos_sin, p_kv_scale, p_pooled, p_arrived, c.state_slot_mapping, c.state_block_table,
        p_requests, p_positions, c.slot_mapping, eps, strides.cache, strides.state_cache, strides.kv_score,
        strides.ape, strides.norm_weight[0], cos_sin_strides, strides.state_block_table,
        (strides.state_slot_mapping[0], request_stride, position_stride, strides.slot_mapping[0]),
        tokens, state_pages, num_slots, table_rows, table_columns, max_pos, FORMAT, BLOCK_SIZE, STATE_BLOCK,
        RATIO, GROUPS, HADAMARD, TOKENS, TOGETHER, PARTS, ROWS, D, ROPE, DENSE,
    )  # fmt: skip


@triton.jit
def _save_job(
    piece, token, c, strides, p_positions, position_stride, tokens, state_pages,
    STATE_BLOCK: tl.constexpr, RATIO: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Save one piece of the states of `token`."""
    save_rows(
        token, token < tokens, piece, c.state_cache, c.kv_score, c.ape, c.state_slot_mapping, p_positions,
        strides.state_cache, strides.kv_score, strides.ape, strides.state_slot_mapping[0], position_stride,
        state_pages * STATE_BLOCK, STATE_BLOCK, RATIO, WIDTH, PIECE,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "tokens", "inserted", "window_slots", "max_pos", "main_tokens", "main_pages", "main_slots", "main_rows",
        "main_columns", "key_tokens", "key_pages", "key_slots", "key_rows", "key_columns",
    ],
    do_not_specialize_on_alignment=["p_window_slots", "p_positions", "p_requests", "p_kv_scale"],
)  # fmt: skip
def preprocess_insert_kernel(
    p_q_out,  # [T, Q_SIZE] contiguous
    p_q_scale,  # of e4m3, float32 [strips, T], contiguous; or None
    p_qr,  # [T, Q_SIZE]
    p_q_weight,  # [Q_SIZE]
    p_window,  # pages in FORMAT
    p_kv,  # [T, D]
    p_kv_weight,  # [D]
    p_window_slots,  # [inserted] int
    p_positions,  # [>= T] int
    p_requests,  # [>= T] int
    p_cos_sin,  # [max_pos, ROPE] float32
    p_kv_scale,  # [1] float32 or None
    main,  # the tensors of a Compressor, or None
    keys,  # likewise, of the indexer
    p_pooled,  # [T, MAIN_D] float32, or None where a program pools all channels
    p_arrived,  # [>= T / POOL_TOKENS] int32, zero before and after, or None
    eps,
    qr_strides,
    q_weight_stride,
    window_strides,
    kv_strides,
    kv_weight_stride,
    window_slot_stride,
    position_stride,
    request_stride,
    cos_sin_strides,
    main_strides,  # by the name of the tensor
    key_strides,
    tokens,
    inserted,
    window_slots,
    max_pos,
    main_tokens,
    main_pages,
    main_slots,
    main_rows,
    main_columns,
    key_tokens,
    key_pages,
    key_slots,
    key_rows,
    key_columns,
    Q_SIZE: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    KEY_FORMAT: tl.constexpr,
    HADAMARD: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    RATIO: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    MAIN_D: tl.constexpr,
    KEY_D: tl.constexpr,
    ROPE: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    SHARES: tl.constexpr,
    POOL_TOKENS: tl.constexpr,
    TOGETHER: tl.constexpr,
    KEY_TOKENS: tl.constexpr,
    KEYS_TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    MAIN_POOLS: tl.constexpr,
    MAIN_PARTS: tl.constexpr,
    MAIN_SAVES: tl.constexpr,
    MAIN_PIECE: tl.constexpr,
    KEY_POOLS: tl.constexpr,
    KEY_SAVES: tl.constexpr,
    KEY_PIECE: tl.constexpr,
    DENSE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs [c * J, (c + 1) * J) do the J jobs of tokens [c * CHUNK, (c + 1) * CHUNK)."""
    start(EARLY)
    POOLS: tl.constexpr = MAIN_POOLS + KEY_POOLS
    KINDS: tl.constexpr = 2 + MAIN_SAVES + KEY_SAVES
    # As `result_dtype`.
    WIDE: tl.constexpr = p_qr.dtype.element_ty == tl.float32
    Q_ROUNDED: tl.constexpr = p_q_weight.dtype.element_ty if WIDE else p_qr.dtype.element_ty
    JOBS: tl.constexpr = POOLS + CHUNK // TOKENS * SHARES
    first, job = tl.program_id(0) // JOBS * CHUNK, tl.program_id(0) % JOBS
    if job < MAIN_POOLS:
        if main is not None:
            _pool_job(
                first + job // MAIN_PARTS * POOL_TOKENS, job % MAIN_PARTS, main, main_strides, p_pooled, p_arrived,
                p_requests, p_positions, p_cos_sin, p_kv_scale, eps, request_stride, position_stride, cos_sin_strides,
                main_tokens, main_pages, main_slots, main_rows, main_columns, max_pos, FORMAT, BLOCK_SIZE, STATE_BLOCK,
                RATIO, GROUPS, False, POOL_TOKENS, TOGETHER, MAIN_PARTS, ROWS, MAIN_D, ROPE,
                DENSE,
            )  # fmt: skip
    elif job < POOLS:
        if keys is not None:
            _pool_job(
                first + (job - MAIN_POOLS) * KEY_TOKENS, 0, keys, key_strides, None, None, p_requests, p_positions,
                p_cos_sin, None, eps, request_stride, position_stride, cos_sin_strides, key_tokens, key_pages,
                key_slots, key_rows, key_columns, max_pos, KEY_FORMAT, BLOCK_SIZE, STATE_BLOCK, RATIO, GROUPS, HADAMARD,
                KEY_TOKENS, KEYS_TOGETHER, 1, ROWS, KEY_D, ROPE, DENSE,
            )  # fmt: skip
    else:
        few, share = first // TOKENS + (job - POOLS) // SHARES, (job - POOLS) % SHARES
        token = few.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
        for kind in tl.static_range(KINDS):
            if share == kind % SHARES:
                if kind == 0:
                    q = norm_rows(
                        token, token < tokens, p_qr, p_q_weight, qr_strides, q_weight_stride, eps, Q_ROUNDED, Q_SIZE,
                        Q_BLOCK,
                    )  # fmt: skip
                    if p_q_scale is None:
                        store_normed(q, token, token < tokens, p_q_out, Q_SIZE)
                    else:
                        store_quantised(q, token, token < tokens, p_q_out, p_q_scale, tokens, Q_SIZE)
                elif kind == 1:
                    insert_rows(
                        few, p_window, p_kv, p_kv_weight, p_window_slots, p_positions, p_cos_sin, p_kv_scale, eps,
                        window_strides, kv_strides, kv_weight_stride, window_slot_stride, position_stride,
                        cos_sin_strides, inserted, window_slots, max_pos, FORMAT, WINDOW_BLOCK, TOKENS, D, ROPE,
                    )  # fmt: skip
                elif kind < 2 + MAIN_SAVES:
                    _save_job(
                        kind - 2, token, main, main_strides, p_positions, position_stride, main_tokens, main_pages,
                        STATE_BLOCK, RATIO, GROUPS * MAIN_D, MAIN_PIECE,
                    )  # fmt: skip
                else:
                    _save_job(
                        kind - 2 - MAIN_SAVES, token, keys, key_strides, p_positions, position_stride, key_tokens,
                        key_pages, STATE_BLOCK, RATIO, GROUPS * KEY_D, KEY_PIECE,
                    )  # fmt: skip
