"""`compress_norm_rope_insert`: each program looks for closed groups among a few tokens and stores their entries.

The work is in compress_entry.py. Beside what is moved, a launch takes what its reads wait for each other: a token's
places, the block of its window, its states, and, of parts of an entry, what the others pooled. Of ratio 128 that is 3
to 4 us on an H200, as one token shows, which moves half a megabyte; a chunk of a prompt, which closes few groups, has
it too (`dsv4 bench indexer --only op=compress_norm_rope_insert`). The 67 MB of 128 tokens take 20.4 to 21.9 us, and
16.5 where a kernel only reads them. A program that pools 2 or 4 pieces of an entry, one after the other, takes 20.6 or
22.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import PAGE_LAYOUTS, byte_pages, cdiv, overlap_factor, state_width
from ..device.hadamard import HADAMARD_DIMS
from ..device.quant import why_unsupported_fp8
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments, pdl_prologue
from ..host.semaphores import arrival_counters
from .compress_entry import compress_tokens
from .compress_window import STATE_ALIGN

POOLED = 4096
"""Elements of a window, positions times channels, that a program pools: 32 KiB with values and scores. Of ratio 128
these are 128 bytes of each row, a line of an H200's cache. Where each token closes a group, pieces of 64 bytes take 1.6
times as long, and pieces of 256, which leave room for fewer programs, 1.3 times (`dsv4 bench preprocess_insert_tiles
--only kind=hca`)."""
FEW_COLUMNS = 16
"""Least channels of a program: 64 bytes of a row."""
AT_ONCE = 512
"""Programs that an H200 runs side by side. Up to four times as many, each looks at one token; more look at a few, since
most find nothing: of ratio 128 a decode step closes one group for 128 tokens. Where all close theirs, one token each
would be faster, with its parts read at one time. Few choices, each a kernel to compile."""
FEW_TOKENS = 4
TOGETHER = 4
"""Most tokens whose small windows a program pools at once: a warp each."""


class Cut(NamedTuple):
    """How pools are cut up, powers of two: `tokens` among which a program looks for closed groups, `parts` of an
    entry's channels, a program each, and `warps` of a program."""

    tokens: int
    parts: int
    warps: int


def window_rows(ratio: int) -> int:
    """Positions of a window, rounded up to a power of two."""
    return triton.next_power_of_2(overlap_factor(ratio) * ratio)


def together(ratio: int, dim: int) -> int:
    """Neighbouring tokens whose windows a program pools at once. It does not depend on the step, as the order of sums
    may depend on it."""
    return max(1, min(TOGETHER, POOLED // (window_rows(ratio) * dim)))


def cut_of(tokens: int, ratio: int, dim: int) -> Cut:
    """The cut for a step of `tokens` and entries of `dim`. Only its `tokens` depend on the step, and no result does."""
    columns = min(dim, max(FEW_COLUMNS, POOLED // window_rows(ratio)))
    parts = dim // columns
    group, programs = triton.next_power_of_2(ratio), tokens * parts
    looks = 1 if programs <= 4 * AT_ONCE else min(FEW_TOKENS, group) if programs <= 16 * AT_ONCE else group
    return Cut(max(looks, together(ratio, dim)), parts, 4)


@triton.jit(
    do_not_specialize=["tokens", "state_pages", "num_slots", "table_rows", "table_columns", "max_pos"],
    do_not_specialize_on_alignment=["p_state_slots", "p_table", "p_requests", "p_positions", "p_slots", "p_kv_scale"],
)
def compress_norm_rope_insert_kernel(
    p_cache,  # pages in FORMAT
    p_state,  # [state_pages, STATE_BLOCK, 2 * GROUPS * D] float32
    p_state_slots,  # [T] int64
    p_table,  # [table_rows, table_columns] int32
    p_requests,  # [>= T] int
    p_positions,  # [>= T] int
    p_slots,  # [>= T] int64
    p_weight,  # [D]
    p_cos_sin,  # [max_pos, ROPE] float32
    p_kv_scale,  # [1] float32 or None
    p_pooled,  # [T, D] float32, or None where PARTS is 1
    p_arrived,  # [>= T / TOKENS] int32, zero before and after, or None
    eps,
    cache_strides,
    state_strides,
    table_strides,
    token_strides,  # of state slots, requests, positions, slots
    weight_stride,
    cos_sin_strides,
    tokens,
    state_pages,
    num_slots,
    table_rows,
    table_columns,
    max_pos,
    FORMAT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    RATIO: tl.constexpr,
    GROUPS: tl.constexpr,
    HADAMARD: tl.constexpr,
    TOKENS: tl.constexpr,
    TOGETHER: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    DENSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p takes part p % PARTS of the entries that the (p // PARTS)-th TOKENS tokens close."""
    pdl_prologue(PDL)
    compress_tokens(
        tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, p_cache, p_state, None, None, p_weight, p_cos_sin,
        p_kv_scale, p_pooled, p_arrived, p_state_slots, p_table, p_requests, p_positions, p_slots, eps, cache_strides,
        state_strides, None, None, weight_stride, cos_sin_strides, table_strides, token_strides, tokens, state_pages,
        num_slots, table_rows, table_columns, max_pos, FORMAT, BLOCK_SIZE, STATE_BLOCK, RATIO, GROUPS, HADAMARD,
        TOKENS, TOGETHER, PARTS, ROWS, D, ROPE, DENSE,
    )  # fmt: skip


def dense(state_cache: Tensor, ratio: int, dim: int) -> bool:
    """Whether the state rows of a page follow each other, and values and scores of each are aligned."""
    page, row, column = state_cache.stride()
    aligned = all(n * state_cache.element_size() % STATE_ALIGN == 0 for n in (page, row // 2, dim))
    return row == state_width(ratio, dim) and column == 1 and aligned and state_cache.data_ptr() % STATE_ALIGN == 0


def compress_norm_rope_insert_refuses(
    state_cache: Tensor,
    state_slot_mapping: Tensor,
    state_block_table: Tensor,
    token_to_req: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    norm_weight: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor | None,
    eps: float,
    ratio: int,
    state_block_size: int,
    block_size: int,
    cache_format: str,
    hadamard: bool = False,
    kv_scale: Tensor | None = None,
) -> str:
    """Why a call cannot use the kernel, or ""."""
    dim = norm_weight.shape[0]
    if dim < 2 or dim & (dim - 1):
        return f"entries of {dim} dims, which is not a power of two"
    if hadamard and dim not in HADAMARD_DIMS:
        return f"a Hadamard transform of {dim} dims, built for {HADAMARD_DIMS}"
    return why_unsupported_fp8(state_cache.device) if cache_format in ("fp8_ds_mla", "fp8", "indexer_fp8") else ""


def compress_norm_rope_insert(
    state_cache: Tensor,
    state_slot_mapping: Tensor,
    state_block_table: Tensor,
    token_to_req: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    norm_weight: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    eps: float,
    ratio: int,
    state_block_size: int,
    block_size: int,
    cache_format: str,
    hadamard: bool = False,
    kv_scale: Tensor | None = None,
    *,
    cut: Cut | None = None,
) -> None:
    """See the reference.

    Pooled values differ from it by the order of their sums, so a stored value next to a rounding boundary may be the
    neighbour. All that follows the RMS norm rounds as it does, and results do not depend on the batch.
    `cut` overrides the choice of `cut_of`.
    """
    tokens = state_slot_mapping.shape[0]
    if tokens == 0:
        return
    dim = norm_weight.shape[0]
    cut = cut or cut_of(tokens, ratio, dim)
    pooled = arrived = None
    if cut.parts > 1:
        pooled = torch.empty((tokens, dim), dtype=torch.float32, device=state_cache.device)
        arrived = arrival_counters(cdiv(tokens, cut.tokens), state_cache.device)
    pages = byte_pages(k_cache, cache_format, block_size) if cache_format in PAGE_LAYOUTS else k_cache
    per_token = (state_slot_mapping, token_to_req, positions, slot_mapping)
    programs = cdiv(tokens, cut.tokens) * cut.parts
    launch_kernel(
        compress_norm_rope_insert_kernel,
        (programs,),
        pages,
        state_cache,
        state_slot_mapping,
        state_block_table,
        token_to_req,
        positions,
        slot_mapping,
        norm_weight,
        cos_sin_cache,
        kv_scale,
        pooled,
        arrived,
        eps,
        pages.stride(),
        state_cache.stride(),
        state_block_table.stride(),
        tuple(value.stride(0) for value in per_token),
        norm_weight.stride(0),
        cos_sin_cache.stride(),
        tokens,
        state_cache.shape[0],
        pages.shape[0] * block_size,
        state_block_table.shape[0],
        state_block_table.shape[1],
        cos_sin_cache.shape[0],
        FORMAT=cache_format,
        BLOCK_SIZE=block_size,
        STATE_BLOCK=state_block_size,
        RATIO=ratio,
        GROUPS=overlap_factor(ratio),
        HADAMARD=hadamard,
        TOKENS=cut.tokens,
        TOGETHER=together(ratio, dim),
        PARTS=cut.parts,
        ROWS=window_rows(ratio),
        D=dim,
        ROPE=cos_sin_cache.shape[1],
        DENSE=dense(state_cache, ratio, dim),
        num_warps=cut.warps,
        # A contracted multiply and add rounds once where the reference rounds twice.
        enable_fp_fusion=False,
        **pdl_arguments(state_cache.device, programs),
    )
