"""The kernel of `preprocess_insert`: which program does which job, with device functions that other kernels share.

`preprocess_insert`: the unlike jobs of a layer's preprocessing, side by side in one launch.

The grid is flat. For each chunk of tokens come the programs that pool and store the entries these tokens close, which
take longest, then those that norm their latents, insert their keys/values and save their states. None waits for
another: a pool takes the states of this step from its projection. Chunk by chunk, so that what one job has read is
still in the L2 cache for the next, and that jobs of all kinds share a multiprocessor.

`preprocess_insert_quant`: the launch of `preprocess_insert`, whose programs that norm latents quantise them too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import ACT_TILE, PAGE_LAYOUTS, byte_pages, cdiv, overlap_factor, state_block_size, storage_block_size
from ...reference.common.block_scale import scale_strides
from ...reference.preprocess.preprocess_insert import Compressor, compressors, result_dtype
from ..device.hadamard import HADAMARD_DIMS
from ..device.norm import norm_rows, store_normed, store_quantized
from ..device.quant import why_unsupported_fp8
from ..host.gpu import register_limit
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments, pdl_prologue
from ..host.semaphores import arrival_counters
from .compress_entry import compress_tokens
from .compress_norm_rope_insert import cut_of, dense, together, window_rows
from .kv_rope_insert import insert_rows
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
    PDL: tl.constexpr,
):
    """Programs [c * J, (c + 1) * J) do the J jobs of tokens [c * CHUNK, (c + 1) * CHUNK)."""
    pdl_prologue(PDL)
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
                        store_quantized(q, token, token < tokens, p_q_out, p_q_scale, tokens, Q_SIZE)
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


MAX_LATENT = 4096
"""Longest row of qr: a chunk of them stays in the registers of one program."""
SAVED = 8192
"""Elements of states that a program saves: 32 KiB."""
SHARES = 5
"""Most jobs that a token has beside its pools: one program each."""
REGISTERS, POOL_REGISTERS, FEWER_REGISTERS = 128, 112, 102
"""Most of a thread on NVIDIA GPUs, for four programs of four warps on a multiprocessor, or five. Where pools share an
entry, 112 are 7% faster than 102 for 128 tokens that all close a group, and 3% slower for 512, on an H200 (`dsv4 bench
preprocess_insert_tiles --only kind=hca`)."""


class Tile(NamedTuple):
    """How the work is cut.

    `tokens` that a program norms, inserts or saves; `pooled`, among which it looks for closed groups; `parts` of the
    main entries' channels, a program each; `warps` of a program. Powers of two. `shares`: programs that divide norm,
    insert and saves of `tokens` among them, at most one each. `registers`: most of a thread on NVIDIA GPUs, 0 for any;
    what more does for the pools it undoes by leaving less room for programs.
    """

    tokens: int
    shares: int
    pooled: int
    parts: int
    warps: int
    registers: int


def tile(tokens: int, ratio: int, dim: int) -> Tile:
    """The cut for a step of `tokens`. Only `pooled` and `registers` depend on the step, and no result does."""
    if ratio == 0:
        return Tile(4, SHARES, 4, 1, 4, 0)
    main = cut_of(tokens, ratio, dim)
    if main.parts > 1:
        most = POOL_REGISTERS if main.tokens == 1 else FEWER_REGISTERS
        return Tile(4, SHARES, main.tokens, main.parts, main.warps, most)
    return Tile(2, 3, main.tokens, main.parts, main.warps, REGISTERS)


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
    into: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """See the reference. States are equal bit for bit; norms and pools differ by the order of their sums.

    Results do not depend on the other tokens of the step. `cut` overrides the choice of `tile`. `into` takes the result
    instead, quantised: e4m3 `[T, Lq]` and float32 scales `[n, T]`, contiguous.
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

    out, out_scale = into or (qr.new_empty(qr.shape, dtype=result_dtype(qr, q_weight)), None)
    tokens, latent = qr.shape
    inserted = window_slot_mapping.shape[0]
    cut = cut or tile(tokens, ratio, main_dim)
    main_piece, key_piece = (
        min(SAVED // cut.tokens, triton.next_power_of_2(2 * groups * dim)) for dim in (main_dim, key_dim)
    )
    main_saves, key_saves = (
        0 if c is None else cdiv(2 * groups * dim, piece)
        for c, dim, piece in ((main, main_dim, main_piece), (keys, key_dim, key_piece))
    )
    most = max(tokens, inserted, main_sizes[0], key_sizes[0])
    if most == 0:
        return out
    key_tokens = max(cut.pooled, together(ratio, key_dim)) if keys is not None else 1
    chunk = cut.tokens if main is None else max(cut.tokens, cut.pooled, key_tokens)
    main_pools = 0 if main is None else chunk // cut.pooled * cut.parts
    key_pools = 0 if keys is None else chunk // key_tokens
    shares = min(cut.shares, 2 + main_saves + key_saves)
    jobs = main_pools + key_pools + chunk // cut.tokens * shares
    pooled = arrived = None
    if main is not None and cut.parts > 1:
        pooled = torch.empty((main_sizes[0], main_dim), dtype=torch.float32, device=qr.device)
        arrived = arrival_counters(cdiv(main_sizes[0], cut.pooled), qr.device)
    programs = cdiv(most, chunk) * jobs
    launch_kernel(
        preprocess_insert_kernel,
        (programs,),
        out,
        out_scale,
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
        pooled,
        arrived,
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
        None if main is None else Compressor._make(x.stride() for x in main),
        None if keys is None else Compressor._make(x.stride() for x in keys),
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
        CHUNK=chunk,
        TOKENS=cut.tokens,
        SHARES=shares,
        POOL_TOKENS=cut.pooled,
        TOGETHER=together(ratio, main_dim) if ratio else 1,
        KEY_TOKENS=key_tokens,
        KEYS_TOGETHER=together(ratio, key_dim) if ratio else 1,
        ROWS=window_rows(ratio) if ratio else 1,
        MAIN_POOLS=main_pools,
        MAIN_PARTS=cut.parts,
        MAIN_SAVES=main_saves,
        MAIN_PIECE=main_piece,
        KEY_POOLS=key_pools,
        KEY_SAVES=key_saves,
        KEY_PIECE=key_piece,
        DENSE=all(dense(c.state_cache, ratio, d) for c, d in ((main, main_dim), (keys, key_dim)) if c is not None),
        num_warps=cut.warps,
        **register_limit(qr.device, cut.registers),
        **pdl_arguments(qr.device, programs),
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
    return why_unsupported_fp8(qr.device) if fp8 else ""


def preprocess_insert_quant(qr: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """See the reference. As those of `preprocess_insert`, latents differ by the order of the sums in their norm."""
    tokens, latent = qr.shape
    count = cdiv(latent, ACT_TILE)
    values = torch.empty((tokens, latent), dtype=torch.float8_e4m3fn, device=qr.device)
    by_strip = torch.empty((count, tokens), dtype=torch.float32, device=qr.device)
    preprocess_insert(qr, *args, **options, into=(values, by_strip))
    return values[:, None], by_strip.as_strided((tokens, 1, count), scale_strides(tokens, count))


def preprocess_insert_quant_refuses(qr: Tensor, *args: Any, **options: Any) -> str:
    """Why a call cannot use the kernel, or ""."""
    return why_unsupported_fp8(qr.device) or preprocess_insert_refuses(qr, *args, **options)
