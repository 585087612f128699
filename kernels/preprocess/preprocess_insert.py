"""`preprocess_insert` and `preprocess_insert_quant`: the jobs of a layer's preprocessing side by side in one launch.

The grid is flat. Each chunk of tokens has first the programs that pool and store the entries that its tokens close,
which take longest, then those that norm latents, insert keys/values and save states. Programs do not wait for each
other: a pool takes the states of this step from the projection. Chunks follow each other, so that what one job has read
is still in the L2 cache for the next, and jobs of all kinds share an SM.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import ACT_TILE, PAGE_LAYOUTS, byte_pages, cdiv, overlap_factor, state_block_size, storage_block_size
from ...reference.common.block_scale import scale_strides
from ...reference.preprocess.preprocess_insert import Compressor, PreprocessArguments
from ..device.norm import Norm, norm_rows, store_normed, store_quantized
from ..device.quant import why_unsupported_fp8
from ..device.rope import Rope
from ..device.strided import Strided
from ..host.gpu import register_limit
from ..host.launch import DTYPES, launch_kernel
from ..host.pdl import pdl_arguments, pdl_prologue
from .compress_entry import Entries, Parts, Tokens, compress_tokens
from .compress_norm_rope_insert import (
    PoolTiling,
    dense,
    parts_of,
    pool_tiling,
    together,
    why_unsupported_entry,
    window_rows,
)
from .compress_window import PoolShape, Projection, States
from .insert_rows import Insert, InsertShape, insert_rows, rounded_dtype
from .save_partial_states import Save, save_rows
from .save_partial_states import Strides as SaveStrides


class Latents(NamedTuple):
    """Latents `[T, q_size]`: results, contiguous, and scales, float32 `[n, T]`, if they are e4m3; rows and weight."""

    p_out: Any
    p_scale: Any
    p_x: Any
    p_weight: Any


class Window(NamedTuple):
    """Pages of the window cache, the key/value vectors `[T, dim]` and the weight of their norm."""

    p_cache: Any
    p_kv: Any
    p_weight: Any


class Strides(NamedTuple):
    """Strides of the tensors of a launch; of a compressor by the names of its tensors, or None."""

    qr: tuple[int, ...]
    q_weight: int
    window: tuple[int, ...]
    kv: tuple[int, ...]
    kv_weight: int
    window_slots: int
    positions: int
    requests: int
    cos_sin: tuple[int, ...]
    main: Any
    keys: Any


class Shape(NamedTuple):
    """Compile-time sizes of a launch.

    Attributes:
        q_size, q_block: length of a latent, and the power of two that holds it.
        window: insert into the window; its rows are the tokens of a program that norms, inserts and saves, and latents
            are rounded to its dtype.
        chunk: tokens whose programs follow each other. splits: programs that split norm, insert and saves.
        main, keys: pools of the compressors.
        main_saves, main_piece, key_saves, key_piece: pieces of a state row, each a job, and their columns.
    """

    q_size: int
    q_block: int
    window: InsertShape
    chunk: int
    splits: int
    main: PoolShape
    keys: PoolShape
    main_pools: int
    main_saves: int
    main_piece: int
    key_pools: int
    key_saves: int
    key_piece: int


class Step(NamedTuple):
    """Arguments common to all jobs of a launch."""

    p_requests: Any
    request_stride: Any
    rope: Any
    eps: Any


class Sizes(NamedTuple):
    """Tokens of a compressor, pages of its states, slots of its entries, rows and columns of its block table."""

    tokens: Any
    pages: Any
    slots: Any
    rows: Any
    columns: Any


@triton.jit
def _pool_job(first, part, c, strides, sizes, step, p_kv_scale, parts, SHAPE: tl.constexpr):
    """Pool one part of the channels for a few tokens from `first` on."""
    rope = step.rope
    compress_tokens(
        first // SHAPE.tokens, part,
        Tokens(
            c.state_slot_mapping, step.p_requests, rope.p_positions, c.slot_mapping,
            (
                strides.state_slot_mapping[0], step.request_stride, rope.position_stride, strides.slot_mapping[0],
            ),
            sizes.tokens,
        ),
        States(
            c.state_cache, strides.state_cache, sizes.pages, c.state_block_table, strides.state_block_table,
            sizes.rows, sizes.columns,
        ),
        Projection(
            c.kv_score, strides.kv_score, c.ape, strides.ape, c.state_slot_mapping, strides.state_slot_mapping[0],
        ),
        Entries(
            c.cache, strides.cache, sizes.slots, p_kv_scale, c.norm_weight, strides.norm_weight[0], step.eps,
            rope.p_table, rope.table_strides, rope.max_pos,
        ),
        parts, SHAPE,
    )  # fmt: skip


@triton.jit
def _save_job(piece, token, c, strides, sizes, rope, PIECE: tl.constexpr, SHAPE: tl.constexpr):
    """Save one piece of the states of `token`."""
    exists = token < sizes.tokens
    save = Save(
        c.state_cache, c.kv_score, c.ape, c.state_slot_mapping, rope.p_positions,
        SaveStrides(
            strides.state_cache, strides.kv_score, strides.ape, strides.state_slot_mapping[0], rope.position_stride,
        ),
        sizes.pages * SHAPE.state_block,
    )  # fmt: skip
    WIDTH: tl.constexpr = SHAPE.groups * SHAPE.dim
    save_rows(token, exists, piece, save, SHAPE.state_block, SHAPE.ratio, WIDTH, PIECE)


@triton.jit
def _norm_job(token, tokens, latents, strides, eps, SHAPE: tl.constexpr):
    """Norm the latents of `token`, and quantise them if there are scales."""
    p_out, p_scale, p_x, p_weight = latents
    WINDOW: tl.constexpr = SHAPE.window
    ROUNDED: tl.constexpr = rounded_dtype(p_x.dtype.element_ty, p_weight.dtype.element_ty, WINDOW.dtype)
    x, norm = Strided(p_x, strides.qr), Norm(p_weight, strides.q_weight, eps)
    q = norm_rows(token, token < tokens, x, norm, ROUNDED, SHAPE.q_size, SHAPE.q_block)
    if p_scale is None:
        store_normed(q, token, token < tokens, p_out, SHAPE.q_size)
    else:
        store_quantized(q, token, token < tokens, p_out, p_scale, tokens, SHAPE.q_size)


@triton.jit(
    do_not_specialize=[
        "tokens", "inserted", "window_slots", "max_pos", "main_tokens", "main_pages", "main_slots", "main_rows",
        "main_columns", "key_tokens", "key_pages", "key_slots", "key_rows", "key_columns",
    ],
    do_not_specialize_on_alignment=["p_window_slots", "p_positions", "p_requests", "p_kv_scale"],
)  # fmt: skip
def preprocess_insert_kernel(
    latents,
    window,
    p_window_slots,  # [inserted] int
    p_positions,  # [>= T] int
    p_requests,  # [>= T] int
    p_cos_sin,  # [max_pos, rope] float32
    p_kv_scale,  # [1] float32 or None
    main,  # tensors of a Compressor, or None
    keys,  # those of the indexer, or None
    parts,
    eps,
    strides,
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
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Do the J jobs of tokens [c * chunk, (c + 1) * chunk) in programs [c * J, (c + 1) * J)."""
    pdl_prologue(PDL)
    WINDOW: tl.constexpr = SHAPE.window
    CHUNK: tl.constexpr = SHAPE.chunk
    TOKENS: tl.constexpr = WINDOW.rows
    SPLITS: tl.constexpr = SHAPE.splits
    MAIN: tl.constexpr = SHAPE.main
    KEYS: tl.constexpr = SHAPE.keys
    MAIN_POOLS: tl.constexpr = SHAPE.main_pools
    MAIN_SAVES: tl.constexpr = SHAPE.main_saves
    MAIN_PARTS: tl.constexpr = MAIN.parts
    POOLS: tl.constexpr = MAIN_POOLS + SHAPE.key_pools
    KINDS: tl.constexpr = 2 + MAIN_SAVES + SHAPE.key_saves
    JOBS: tl.constexpr = POOLS + CHUNK // TOKENS * SPLITS
    # Triton 3.6 loses the constants of tuples within a tuple at a loop or branch, unless the outer one is built here.
    strides = Strides(*strides)
    if main is not None:
        main_strides = Compressor(*strides.main)
    if keys is not None:
        key_strides = Compressor(*strides.keys)
    rope = Rope(p_positions, strides.positions, p_cos_sin, strides.cos_sin, max_pos)
    step = Step(p_requests, strides.requests, rope, eps)
    main_sizes = Sizes(main_tokens, main_pages, main_slots, main_rows, main_columns)
    key_sizes = Sizes(key_tokens, key_pages, key_slots, key_rows, key_columns)
    first, job = tl.program_id(0) // JOBS * CHUNK, tl.program_id(0) % JOBS
    if job < MAIN_POOLS:
        if main is not None:
            start = first + job // MAIN_PARTS * MAIN.tokens
            _pool_job(start, job % MAIN_PARTS, main, main_strides, main_sizes, step, p_kv_scale, parts, MAIN)
    elif job < POOLS:
        if keys is not None:
            start = first + (job - MAIN_POOLS) * KEYS.tokens
            _pool_job(start, 0, keys, key_strides, key_sizes, step, None, Parts(None, None), KEYS)
    else:
        few, split = first // TOKENS + (job - POOLS) // SPLITS, (job - POOLS) % SPLITS
        token = few.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
        for kind in tl.static_range(KINDS):
            if split == kind % SPLITS:
                if kind == 0:
                    _norm_job(token, tokens, latents, strides, eps, SHAPE)
                elif kind == 1:
                    insert = Insert(
                        window.p_cache, strides.window, window.p_kv, strides.kv, p_window_slots, strides.window_slots,
                        p_kv_scale, inserted, window_slots,
                    )  # fmt: skip
                    norm = Norm(window.p_weight, strides.kv_weight, eps)
                    insert_rows(few, insert, norm, rope, WINDOW)
                elif kind < 2 + MAIN_SAVES:
                    _save_job(kind - 2, token, main, main_strides, main_sizes, rope, SHAPE.main_piece, MAIN)
                else:
                    piece = kind - 2 - MAIN_SAVES
                    _save_job(piece, token, keys, key_strides, key_sizes, rope, SHAPE.key_piece, KEYS)


MAX_LATENT = 4096
"""Longest row of qr: a chunk of rows stays in the registers of one program."""
SAVED = 8192
"""Elements of states that a program saves: 32 KiB."""
MAX_SPLITS = 5
"""Most jobs of a token that get separate programs, in addition to its pools."""
REGISTERS, POOL_REGISTERS, FEWER_REGISTERS = 128, 112, 102
"""Register limits on NVIDIA GPUs, for four programs of four warps on an SM, or five. Where programs split an entry,
112 are faster than 102 if all tokens of a small step close a group, and slower for larger steps."""


class Tiling(NamedTuple):
    """Split of the work over programs, in powers of two.

    Attributes:
        tokens: that a program norms, inserts or saves.
        splits: programs that split norm, insert and saves of `tokens`, at most one for each of these jobs.
        pooled: tokens among which a program looks for closed groups.
        parts: programs that split the channels of a main entry.
        warps: of a program.
        registers: limit of a thread on NVIDIA GPUs, 0 for none. With more registers pools are faster, but fewer
            programs fit an SM.
    """

    tokens: int
    splits: int
    pooled: int
    parts: int
    warps: int
    registers: int


def tiling_of(tokens: int, ratio: int, dim: int) -> Tiling:
    """Return the tiling of a step of `tokens`.

    Only `pooled` and `registers` depend on the step, and no result depends on them.
    """
    if ratio == 0:
        return Tiling(4, MAX_SPLITS, 4, 1, 4, 0)
    main = pool_tiling(tokens, ratio, dim)
    if main.parts > 1:
        most = POOL_REGISTERS if main.tokens == 1 else FEWER_REGISTERS
        return Tiling(4, MAX_SPLITS, main.tokens, main.parts, main.warps, most)
    return Tiling(2, 3, main.tokens, main.parts, main.warps, REGISTERS)


def _pages(cache: Tensor, fmt: str, block_size: int) -> Tensor:
    return byte_pages(cache, fmt, block_size) if fmt in PAGE_LAYOUTS else cache


class _Pools(NamedTuple):
    """A compressor as the kernel takes it, without one `tensors` and `strides` are None."""

    tensors: Compressor | None = None
    strides: Any = None
    sizes: Sizes = Sizes(0, 0, 0, 0, 0)
    shape: PoolShape = PoolShape()
    pools: int = 0
    saves: int = 0
    piece: int = 1


def _pools_of(call: PreprocessArguments, c: Compressor | None, tiling: Tiling, fmt: str, of_indexer: bool) -> _Pools:
    """Return a compressor of `call` as the kernel takes it; its number of pools depends on the chunk."""
    rope = call.cos_sin_cache.shape[1]
    if c is None:
        return _Pools(shape=PoolShape(state_block=state_block_size(call.ratio), rope=rope))
    ratio, block, dim = call.ratio, storage_block_size(call.ratio), c.norm_weight.shape[0]
    c = c._replace(cache=_pages(c.cache, fmt, block))
    columns = 2 * overlap_factor(ratio) * dim
    piece = min(SAVED // tiling.tokens, triton.next_power_of_2(columns))
    shape = PoolShape(
        fmt=fmt,
        block_size=block,
        state_block=state_block_size(ratio),
        ratio=ratio,
        groups=overlap_factor(ratio),
        hadamard=of_indexer and call.hadamard,
        tokens=max(tiling.pooled, together(ratio, dim)) if of_indexer else tiling.pooled,
        together=together(ratio, dim),
        parts=1 if of_indexer else tiling.parts,
        rows=window_rows(ratio),
        dim=dim,
        rope=rope,
    )
    sizes = Sizes(
        c.state_slot_mapping.shape[0], c.state_cache.shape[0], c.cache.shape[0] * block, *c.state_block_table.shape
    )
    return _Pools(c, Compressor._make(x.stride() for x in c), sizes, shape, 0, cdiv(columns, piece), piece)


def preprocess_insert(
    call: PreprocessArguments, *, tiling: Tiling | None = None, into: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Return the reference's result, up to the order of the sums of norms and pools; states are equal bit for bit.

    Results do not depend on the other tokens of the step. `tiling` overrides the choice of `tiling_of`. `into` takes
    the result instead, quantised: e4m3 `[T, Lq]` and float32 scales `[n, T]`, contiguous.
    """
    main_given, keys_given = call.compressors()
    qr, slots = call.qr, call.window_slot_mapping
    tokens, latent = qr.shape
    main_dim = 1 if main_given is None else main_given.norm_weight.shape[0]
    tiling = tiling or tiling_of(tokens, call.ratio, main_dim)
    main = _pools_of(call, main_given, tiling, call.cache_format, False)
    keys = _pools_of(call, keys_given, tiling, call.indexer_cache_format, True)
    pages = _pages(call.window_cache, call.cache_format, call.window_block_size)

    out, out_scale = into or (qr.new_empty(qr.shape, dtype=call.result_dtype()), None)
    most = max(tokens, slots.shape[0], main.sizes.tokens, keys.sizes.tokens)
    if most == 0:
        return out
    chunk = tiling.tokens if main.tensors is None else max(tiling.tokens, main.shape.tokens, keys.shape.tokens)
    if main.tensors is not None:
        # One flag for both compressors.
        flat = all(dense(pool.tensors.state_cache, call.ratio, pool.shape.dim) for pool in (main, keys) if pool.tensors)
        main = main._replace(shape=main.shape._replace(dense=flat), pools=chunk // main.shape.tokens * main.shape.parts)
        if keys.tensors is not None:
            keys = keys._replace(shape=keys.shape._replace(dense=flat), pools=chunk // keys.shape.tokens)
    splits = min(tiling.splits, 2 + main.saves + keys.saves)
    jobs = main.pools + keys.pools + chunk // tiling.tokens * splits
    pooled = PoolTiling(tiling.pooled, 1 if main.tensors is None else tiling.parts, tiling.warps)
    programs = cdiv(most, chunk) * jobs
    launch_kernel(
        preprocess_insert_kernel,
        (programs,),
        Latents(out, out_scale, qr, call.q_weight),
        Window(pages, call.kv, call.kv_weight),
        slots,
        call.positions,
        call.token_to_req,
        call.cos_sin_cache,
        call.kv_scale,
        main.tensors,
        keys.tensors,
        parts_of(main.sizes.tokens, main_dim, pooled, qr.device),
        call.eps,
        Strides(
            qr.stride(),
            call.q_weight.stride(0),
            pages.stride(),
            call.kv.stride(),
            call.kv_weight.stride(0),
            slots.stride(0),
            call.positions.stride(0),
            call.token_to_req.stride(0),
            call.cos_sin_cache.stride(),
            main.strides,
            keys.strides,
        ),
        tokens,
        slots.shape[0],
        pages.shape[0] * call.window_block_size,
        call.cos_sin_cache.shape[0],
        *main.sizes,
        *keys.sizes,
        SHAPE=Shape(
            q_size=latent,
            q_block=triton.next_power_of_2(latent),
            window=InsertShape(
                call.cache_format,
                call.window_block_size,
                rows=tiling.tokens,
                dim=call.kv.shape[1],
                rope=call.cos_sin_cache.shape[1],
                dtype=None if call.dtype is None else DTYPES[call.dtype],
            ),
            chunk=chunk,
            splits=splits,
            main=main.shape,
            keys=keys.shape,
            main_pools=main.pools,
            main_saves=main.saves,
            main_piece=main.piece,
            key_pools=keys.pools,
            key_saves=keys.saves,
            key_piece=keys.piece,
        ),
        num_warps=tiling.warps,
        **register_limit(qr.device, tiling.registers),
        **pdl_arguments(qr.device, programs),
        # A contracted multiply and add rounds once where the reference rounds twice.
        enable_fp_fusion=False,
    )
    return out


def why_unsupported_preprocess_insert(call: PreprocessArguments) -> str:
    """Return why the kernel does not support a call, "" if it does."""
    latent = call.qr.shape[1]
    if isinstance(latent, int) and not 0 < latent <= MAX_LATENT:
        return f"latents have {latent} elements, supported are 1 to {MAX_LATENT}"
    vectors = {"keys": call.kv.shape[1]}
    if call.norm_weight is not None:
        vectors["entries"] = call.norm_weight.shape[0]
    if call.indexer_norm_weight is not None:
        vectors["indexer keys"] = call.indexer_norm_weight.shape[0]
    for what, dim in vectors.items():
        if reason := why_unsupported_entry(dim, call.hadamard and what == "indexer keys", what):
            return reason
    fp8 = call.cache_format != "plain" or call.indexer_cache_format == "indexer_fp8"
    return why_unsupported_fp8(call.qr.device) if fp8 else ""


def preprocess_insert_quant(call: PreprocessArguments) -> tuple[Tensor, Tensor]:
    """Return the reference's results, up to the order of the sums in the norm of the latents."""
    tokens, latent = call.qr.shape
    count = cdiv(latent, ACT_TILE)
    values = torch.empty((tokens, latent), dtype=torch.float8_e4m3fn, device=call.qr.device)
    scales = torch.empty((count, tokens), dtype=torch.float32, device=call.qr.device)
    preprocess_insert(call, into=(values, scales))
    return values[:, None], scales.as_strided((tokens, 1, count), scale_strides(tokens, count))


def why_unsupported_preprocess_insert_quant(call: PreprocessArguments) -> str:
    """Return why the kernel does not support a call, "" if it does."""
    return why_unsupported_fp8(call.qr.device) or why_unsupported_preprocess_insert(call)
