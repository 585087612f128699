"""`preprocess_insert`: the unlike jobs of a layer's preprocessing, side by side in one launch.

The grid is flat. For each chunk of tokens come the programs that pool and store the entries these tokens close, those
that save their states, first of the main compressor and then of the indexer's, one that inserts their keys/values and
one that norms their latents. None waits for another: a pool takes the states of this step from its projection. Chunk
by chunk, so that what one job has read is still in the L2 cache for the next.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..layout import PAGE_LAYOUTS, byte_pages, cdiv, overlap_factor, state_block_size, storage_block_size
from ..reference.preprocess_insert import Compressor, compressors, result_dtype
from .compress_entry import compress_tokens
from .compress_norm_rope_insert import tile_of
from .hadamard import HADAMARD_DIMS
from .kv_insert import insert_rows
from .norm import norm_rows
from .quant import refuses_fp8
from .save_partial_states import save_rows

MAX_LATENT = 4096
"""Longest row of qr: a chunk of them stays in the registers of one program."""
PIECE_ELEMENTS = 8192
"""Elements of states that a program saves: 32 KiB."""
MANY_TOKENS = 1024
"""From here on a program looks for the closed groups of its whole chunk; below, each token has a program that does."""


@triton.jit
def _compressor_job(
    job, chunk, c, strides, p_requests, p_positions, p_cos_sin, p_kv_scale, eps, request_stride, position_stride,
    cos_sin_strides, tokens, state_pages, num_slots, table_rows, table_columns, max_pos,
    FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr, STATE_BLOCK: tl.constexpr, RATIO: tl.constexpr,
    GROUPS: tl.constexpr, HADAMARD: tl.constexpr, TOKENS: tl.constexpr, POOLS: tl.constexpr, PIECE: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Job p < POOLS of a chunk pools what a part of its tokens close, job POOLS + i saves piece i of its states."""
    if job < POOLS:
        compress_tokens(
            chunk * POOLS + job, c.cache, c.state_cache, c.kv_score, c.ape, c.norm_weight, p_cos_sin, p_kv_scale,
            c.state_slot_mapping, c.state_block_table, p_requests, p_positions, c.slot_mapping, eps, strides.cache,
            strides.state_cache, strides.kv_score, strides.ape, strides.norm_weight[0], cos_sin_strides,
            strides.state_block_table,
            (strides.state_slot_mapping[0], request_stride, position_stride, strides.slot_mapping[0]),
            tokens, state_pages, num_slots, table_rows, table_columns, max_pos, FORMAT, BLOCK_SIZE, STATE_BLOCK,
            RATIO, GROUPS, HADAMARD, TOKENS // POOLS, ROWS, D, ROPE,
        )  # fmt: skip
    else:
        token = chunk.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
        save_rows(
            token, token < tokens, job - POOLS, c.state_cache, c.kv_score, c.ape, c.state_slot_mapping, p_positions,
            strides.state_cache, strides.kv_score, strides.ape, strides.state_slot_mapping[0], position_stride,
            state_pages * STATE_BLOCK, STATE_BLOCK, RATIO, GROUPS * D, PIECE,
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
    TOKENS: tl.constexpr,
    POOLS: tl.constexpr,
    MAIN_JOBS: tl.constexpr,
    MAIN_PIECE: tl.constexpr,
    MAIN_ROWS: tl.constexpr,
    KEY_JOBS: tl.constexpr,
    KEY_PIECE: tl.constexpr,
    KEY_ROWS: tl.constexpr,
):
    """Programs [c * J, (c + 1) * J) do the J jobs of tokens [c * TOKENS, (c + 1) * TOKENS)."""
    JOBS: tl.constexpr = MAIN_JOBS + KEY_JOBS + 2
    chunk, job = tl.program_id(0) // JOBS, tl.program_id(0) % JOBS
    if job < MAIN_JOBS:
        if main is not None:
            _compressor_job(
                job, chunk, main, main_strides, p_requests, p_positions, p_cos_sin, p_kv_scale, eps, request_stride,
                position_stride, cos_sin_strides, main_tokens, main_pages, main_slots, main_rows, main_columns, max_pos,
                FORMAT, BLOCK_SIZE, STATE_BLOCK, RATIO, GROUPS, False, TOKENS, POOLS, MAIN_PIECE, MAIN_ROWS, MAIN_D,
                ROPE,
            )  # fmt: skip
    elif job < MAIN_JOBS + KEY_JOBS:
        if keys is not None:
            _compressor_job(
                job - MAIN_JOBS, chunk, keys, key_strides, p_requests, p_positions, p_cos_sin, None, eps,
                request_stride, position_stride, cos_sin_strides, key_tokens, key_pages, key_slots, key_rows,
                key_columns, max_pos, KEY_FORMAT, BLOCK_SIZE, STATE_BLOCK, RATIO, GROUPS, HADAMARD, TOKENS, POOLS,
                KEY_PIECE, KEY_ROWS, KEY_D, ROPE,
            )  # fmt: skip
    elif job == MAIN_JOBS + KEY_JOBS:
        insert_rows(
            chunk, p_window, p_kv, p_kv_weight, p_window_slots, p_positions, p_cos_sin, p_kv_scale, eps,
            window_strides, kv_strides, kv_weight_stride, window_slot_stride, position_stride, cos_sin_strides,
            inserted, window_slots, max_pos, FORMAT, WINDOW_BLOCK, TOKENS, D, ROPE,
        )  # fmt: skip
    else:
        row = chunk.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
        norm_rows(row, row < tokens, p_q_out, p_qr, p_q_weight, qr_strides, q_weight_stride, eps, Q_SIZE, Q_BLOCK)


class Tile(NamedTuple):
    """How the work is cut: tokens of a chunk, programs that pool in it, window positions that a pool reads at a time
    (main, indexer), and warps of a program."""

    tokens: int
    pools: int
    main_rows: int
    key_rows: int
    warps: int


def tile(tokens: int, ratio: int, dim: int, key_dim: int) -> Tile:
    """The cut for a step of `tokens`. Only `pools` depends on the step, and no result does."""
    if ratio == 0:
        return Tile(4, 1, 1, 1, 4)
    rows, warps = tile_of(ratio, dim)
    return Tile(warps, 1 if tokens > MANY_TOKENS else warps, rows, tile_of(ratio, key_dim)[0] if key_dim else 1, warps)


def _pages(cache: Tensor, fmt: str, block_size: int) -> Tensor:
    return byte_pages(cache, fmt, block_size) if fmt in PAGE_LAYOUTS else cache


def _sizes(c: Compressor | None, block_size: int) -> tuple[int, ...]:
    """Tokens, state pages, slots, and the block table's rows and columns."""
    if c is None:
        return (0,) * 5
    return (
        c.state_slot_mapping.shape[0],
        c.state_cache.shape[0],
        c.cache.shape[0] * block_size,
        *c.state_block_table.shape,
    )


def preprocess_insert(
    qr: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    token_to_req: Tensor,
    eps: float,
    cache_format: str,
    window_cache: Tensor,
    window_slot_mapping: Tensor,
    window_block_size: int,
    kv_score: Tensor | None = None,
    ape: Tensor | None = None,
    norm_weight: Tensor | None = None,
    state_cache: Tensor | None = None,
    state_slot_mapping: Tensor | None = None,
    state_block_table: Tensor | None = None,
    compressed_cache: Tensor | None = None,
    compressed_slot_mapping: Tensor | None = None,
    ratio: int = 0,
    indexer_kv_score: Tensor | None = None,
    indexer_ape: Tensor | None = None,
    indexer_norm_weight: Tensor | None = None,
    indexer_state_cache: Tensor | None = None,
    indexer_state_slot_mapping: Tensor | None = None,
    indexer_state_block_table: Tensor | None = None,
    indexer_cache: Tensor | None = None,
    indexer_slot_mapping: Tensor | None = None,
    indexer_cache_format: str = "",
    hadamard: bool = False,
    kv_scale: Tensor | None = None,
    *,
    cut: Tile | None = None,
) -> Tensor:
    """See the reference. States are equal bit for bit; norms and pools differ by the order of their sums.

    Results do not depend on the other tokens of the step. `cut` overrides the choice of `tile`.
    """
    main, keys = compressors(
        (
            kv_score,
            ape,
            norm_weight,
            state_cache,
            state_slot_mapping,
            state_block_table,
            compressed_cache,
            compressed_slot_mapping,
        ),
        (
            indexer_kv_score,
            indexer_ape,
            indexer_norm_weight,
            indexer_state_cache,
            indexer_state_slot_mapping,
            indexer_state_block_table,
            indexer_cache,
            indexer_slot_mapping,
        ),
    )
    block = storage_block_size(ratio) if ratio else 1
    if main is not None:
        main = main._replace(cache=_pages(main.cache, cache_format, block))
    if keys is not None:
        keys = keys._replace(cache=_pages(keys.cache, indexer_cache_format, block))
    window = _pages(window_cache, cache_format, window_block_size)
    main_sizes, key_sizes = _sizes(main, block), _sizes(keys, block)
    main_dim, key_dim = (1 if c is None else c.norm_weight.shape[0] for c in (main, keys))
    groups = overlap_factor(ratio)

    out = qr.new_empty(qr.shape, dtype=result_dtype(qr, q_weight))
    tokens, latent = qr.shape
    inserted = window_slot_mapping.shape[0]
    cut = cut or tile(tokens, ratio, main_dim, key_dim if keys is not None else 0)
    main_piece, key_piece = (
        min(PIECE_ELEMENTS // cut.tokens, triton.next_power_of_2(2 * groups * dim)) for dim in (main_dim, key_dim)
    )
    main_jobs, key_jobs = (
        0 if c is None else cut.pools + cdiv(2 * groups * dim, piece)
        for c, dim, piece in ((main, main_dim, main_piece), (keys, key_dim, key_piece))
    )
    chunks = cdiv(max(tokens, inserted, main_sizes[0], key_sizes[0]), cut.tokens)
    if chunks == 0:
        return out
    preprocess_insert_kernel[(chunks * (main_jobs + key_jobs + 2),)](
        out,
        qr,
        q_weight,
        window,
        kv,
        kv_weight,
        window_slot_mapping,
        positions,
        token_to_req,
        cos_sin_cache,
        kv_scale,
        main,
        keys,
        eps,
        qr.stride(),
        q_weight.stride(0),
        window.stride(),
        kv.stride(),
        kv_weight.stride(0),
        window_slot_mapping.stride(0),
        positions.stride(0),
        token_to_req.stride(0),
        cos_sin_cache.stride(),
        None if main is None else Compressor(*(x.stride() for x in main)),
        None if keys is None else Compressor(*(x.stride() for x in keys)),
        tokens,
        inserted,
        window.shape[0] * window_block_size,
        cos_sin_cache.shape[0],
        *main_sizes,
        *key_sizes,
        Q_SIZE=latent,
        Q_BLOCK=triton.next_power_of_2(latent),
        FORMAT=cache_format,
        KEY_FORMAT=indexer_cache_format,
        HADAMARD=hadamard,
        WINDOW_BLOCK=window_block_size,
        BLOCK_SIZE=block,
        STATE_BLOCK=state_block_size(ratio),
        RATIO=ratio,
        GROUPS=groups,
        D=kv.shape[1],
        MAIN_D=main_dim,
        KEY_D=key_dim,
        ROPE=cos_sin_cache.shape[1],
        TOKENS=cut.tokens,
        POOLS=cut.pools,
        MAIN_JOBS=main_jobs,
        MAIN_PIECE=main_piece,
        MAIN_ROWS=cut.main_rows,
        KEY_JOBS=key_jobs,
        KEY_PIECE=key_piece,
        KEY_ROWS=cut.key_rows,
        num_warps=cut.warps,
        # A contracted multiply and add rounds once where the reference rounds twice.
        enable_fp_fusion=False,
    )
    return out


def preprocess_insert_refuses(
    qr: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    token_to_req: Tensor,
    eps: float,
    cache_format: str,
    window_cache: Tensor,
    window_slot_mapping: Tensor,
    window_block_size: int,
    kv_score: Tensor | None = None,
    ape: Tensor | None = None,
    norm_weight: Tensor | None = None,
    state_cache: Tensor | None = None,
    state_slot_mapping: Tensor | None = None,
    state_block_table: Tensor | None = None,
    compressed_cache: Tensor | None = None,
    compressed_slot_mapping: Tensor | None = None,
    ratio: int = 0,
    indexer_kv_score: Tensor | None = None,
    indexer_ape: Tensor | None = None,
    indexer_norm_weight: Tensor | None = None,
    indexer_state_cache: Tensor | None = None,
    indexer_state_slot_mapping: Tensor | None = None,
    indexer_state_block_table: Tensor | None = None,
    indexer_cache: Tensor | None = None,
    indexer_slot_mapping: Tensor | None = None,
    indexer_cache_format: str = "",
    hadamard: bool = False,
    kv_scale: Tensor | None = None,
) -> str:
    """Why a call cannot use the kernel, or ""."""
    if isinstance(qr.shape[1], int) and not 0 < qr.shape[1] <= MAX_LATENT:
        return f"latents of {qr.shape[1]} elements, it takes 1 to {MAX_LATENT}"
    dims = {"keys": kv.shape[1]}
    if norm_weight is not None:
        dims["entries"] = norm_weight.shape[0]
    if indexer_norm_weight is not None:
        dims["indexer keys"] = indexer_norm_weight.shape[0]
    for what, dim in dims.items():
        if dim < 2 or dim & (dim - 1):
            return f"{what} of {dim} dims, which is not a power of two"
    if hadamard and dims["indexer keys"] not in HADAMARD_DIMS:
        return f"a Hadamard transform of {dims['indexer keys']} dims, built for {HADAMARD_DIMS}"
    fp8 = cache_format != "plain" or indexer_cache_format == "indexer_fp8"
    return refuses_fp8(qr.device) if fp8 else ""
