"""`compress_norm_rope_insert`: each program looks for closed groups among a few tokens and stores their entries."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import PAGE_LAYOUTS, byte_pages, cdiv, overlap_factor, state_width
from ...reference.preprocess.compress_norm_rope_insert import CompressArguments
from ..device.hadamard import HADAMARD_DIMS
from ..device.quant import why_unsupported_fp8
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments, pdl_prologue
from ..host.semaphores import arrival_counters
from .compress_entry import Entries, Parts, Tokens, compress_tokens
from .compress_window import STATE_ALIGN, PoolShape, States

POOLED = 4096
"""Elements of a window, positions times channels, that a program pools: 32 KiB with values and scores. For ratio 128
these are 128 bytes of each row, a line of an H200's cache; half a line reads each line twice, and two lines leave room
for fewer programs."""
FEW_COLUMNS = 16
"""Fewest channels of a program: 64 bytes of a row."""
AT_ONCE = 512
"""Programs that an H200 runs side by side. Launches of up to four times as many look at one token each; larger ones at
several, because most find nothing: for ratio 128 a decode step closes one group per 128 tokens. There are few choices,
because each compiles a kernel."""
FEW_TOKENS = 4
"""Tokens of a program in launches of medium size."""
TOGETHER = 4
"""Most tokens per program that pools small windows: one per warp."""


class PoolTiling(NamedTuple):
    """Split of the pools over programs, in powers of two.

    Attributes:
        tokens: among which a program looks for closed groups.
        parts: programs that split the channels of an entry.
        warps: of a program.
    """

    tokens: int
    parts: int
    warps: int


def window_rows(ratio: int) -> int:
    """Return the positions of a window, rounded up to a power of two."""
    return triton.next_power_of_2(overlap_factor(ratio) * ratio)


def together(ratio: int, dim: int) -> int:
    """Return the number of neighbouring tokens per program that pools windows.

    It does not depend on the step, because the order of sums may depend on it.
    """
    return max(1, min(TOGETHER, POOLED // (window_rows(ratio) * dim)))


def pool_tiling(tokens: int, ratio: int, dim: int) -> PoolTiling:
    """Return the tiling of a step of `tokens` and entries of `dim`.

    Only its `tokens` depend on the step, and no result depends on them.
    """
    columns = min(dim, max(FEW_COLUMNS, POOLED // window_rows(ratio)))
    parts = dim // columns
    group, programs = triton.next_power_of_2(ratio), tokens * parts
    looks = 1 if programs <= 4 * AT_ONCE else min(FEW_TOKENS, group) if programs <= 16 * AT_ONCE else group
    return PoolTiling(max(looks, together(ratio, dim)), parts, 4)


class Strides(NamedTuple):
    """Strides of the tensors of a launch; `tokens`: of state slots, requests, positions and slots."""

    cache: tuple[int, ...]
    state: tuple[int, ...]
    table: tuple[int, ...]
    tokens: tuple[int, ...]
    weight: int
    cos_sin: tuple[int, ...]


@triton.jit(
    do_not_specialize=["tokens", "state_pages", "num_slots", "table_rows", "table_columns", "max_pos"],
    do_not_specialize_on_alignment=["p_state_slots", "p_table", "p_requests", "p_positions", "p_slots", "p_kv_scale"],
)
def compress_norm_rope_insert_kernel(
    p_cache,  # pages in SHAPE.fmt
    p_state,  # [state_pages, state_block, 2 * groups * dim] float32
    p_state_slots,  # [T] int64
    p_table,  # [table_rows, table_columns] int32
    p_requests,  # [>= T] int
    p_positions,  # [>= T] int
    p_slots,  # [>= T] int64
    p_weight,  # [dim]
    p_cos_sin,  # [max_pos, rope] float32
    p_kv_scale,  # [1] float32 or None
    parts,
    eps,
    strides,
    tokens,
    state_pages,
    num_slots,
    table_rows,
    table_columns,
    max_pos,
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Take part p % parts of the entries that the (p // parts)-th few tokens close in program p."""
    pdl_prologue(PDL)
    PARTS: tl.constexpr = SHAPE.parts
    compress_tokens(
        tl.program_id(0) // PARTS, tl.program_id(0) % PARTS,
        Tokens(p_state_slots, p_requests, p_positions, p_slots, strides.tokens, tokens),
        States(p_state, strides.state, state_pages, p_table, strides.table, table_rows, table_columns),
        None,
        Entries(
            p_cache, strides.cache, num_slots, p_kv_scale, p_weight, strides.weight, eps, p_cos_sin, strides.cos_sin,
            max_pos,
        ),
        parts, SHAPE,
    )  # fmt: skip


def dense(state_cache: Tensor, ratio: int, dim: int) -> bool:
    """Return whether the state rows of a page are adjacent, and values and scores of each are aligned."""
    page, row, column = state_cache.stride()
    aligned = all(n * state_cache.element_size() % STATE_ALIGN == 0 for n in (page, row // 2, dim))
    return row == state_width(ratio, dim) and column == 1 and aligned and state_cache.data_ptr() % STATE_ALIGN == 0


def parts_of(tokens: int, dim: int, tiling: PoolTiling, device: torch.device) -> Parts:
    """Return memory for programs that split entries."""
    if tiling.parts == 1:
        return Parts(None, None)
    pooled = torch.empty((tokens, dim), dtype=torch.float32, device=device)
    return Parts(pooled, arrival_counters(cdiv(tokens, tiling.tokens), device))


def why_unsupported_entry(dim: int, hadamard: bool, what: str = "entries") -> str:
    """Return why kernels do not support entries of `dim` elements, "" if they do."""
    if dim < 2 or dim & (dim - 1):
        return f"{what} have {dim} dims, which is not a power of two of at least 2"
    if hadamard and dim not in HADAMARD_DIMS:
        return f"a Hadamard transform has {dim} dims, supported are {HADAMARD_DIMS}"
    return ""


def why_unsupported_compress_norm_rope_insert(call: CompressArguments) -> str:
    """Return why the kernel does not support a call, "" if it does."""
    fp8 = call.cache_format in ("fp8_ds_mla", "fp8", "indexer_fp8")
    reason = why_unsupported_entry(call.norm_weight.shape[0], call.hadamard)
    return reason or (why_unsupported_fp8(call.state_cache.device) if fp8 else "")


def compress_norm_rope_insert(call: CompressArguments, *, tiling: PoolTiling | None = None) -> None:
    """Store the reference's entries, up to the order of the sums.

    A stored value next to a rounding boundary may be its neighbour. After the RMS norm, rounding is the reference's.
    Results do not depend on the batch. `tiling` overrides the choice of `pool_tiling`.
    """
    tokens, dim, ratio = call.state_slot_mapping.shape[0], call.norm_weight.shape[0], call.ratio
    if tokens == 0:
        return
    states, table, fmt, block = call.state_cache, call.cos_sin_cache, call.cache_format, call.block_size
    tiling = tiling or pool_tiling(tokens, ratio, dim)
    pages = byte_pages(call.k_cache, fmt, block) if fmt in PAGE_LAYOUTS else call.k_cache
    per_token = (call.state_slot_mapping, call.token_to_req, call.positions, call.slot_mapping)
    programs = cdiv(tokens, tiling.tokens) * tiling.parts
    launch_kernel(
        compress_norm_rope_insert_kernel,
        (programs,),
        pages,
        states,
        call.state_slot_mapping,
        call.state_block_table,
        call.token_to_req,
        call.positions,
        call.slot_mapping,
        call.norm_weight,
        table,
        call.kv_scale,
        parts_of(tokens, dim, tiling, states.device),
        call.eps,
        Strides(
            pages.stride(),
            states.stride(),
            call.state_block_table.stride(),
            tuple(value.stride(0) for value in per_token),
            call.norm_weight.stride(0),
            table.stride(),
        ),
        tokens,
        states.shape[0],
        pages.shape[0] * block,
        *call.state_block_table.shape,
        table.shape[0],
        SHAPE=PoolShape(
            fmt=fmt,
            block_size=block,
            state_block=call.state_block_size,
            ratio=ratio,
            groups=overlap_factor(ratio),
            hadamard=call.hadamard,
            tokens=tiling.tokens,
            together=together(ratio, dim),
            parts=tiling.parts,
            rows=window_rows(ratio),
            dim=dim,
            rope=table.shape[1],
            dense=dense(states, ratio, dim),
        ),
        num_warps=tiling.warps,
        # A contracted multiply and add rounds once where the reference rounds twice.
        enable_fp_fusion=False,
        **pdl_arguments(states.device, programs),
    )
