"""Launchers of `sparse_mla_decode` and its variants: they choose a kernel, and prepare its arguments.

On sm_90, a call runs the first kernel of SM90_KERNELS that supports it; otherwise, and on other GPUs, the Triton kernel
runs (sparse_mla_decode_triton.py). Very many tokens, as of a prompt, are attended by rows: both caches are dequantised
once, or copied one after the other, and the prefill kernel attends the rows, with all that the decode kernels fuse.

The ragged variant first writes its lists as padded rows in one small launch. These are 4 bytes for each of
T * max_entries, a thousandth of the keys they select.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import ACT_TILE, HEAD_DIM, PAD_INDEX, PAGE_LAYOUTS, SCALES_PER_WORD, byte_pages, cdiv
from ...ops.common.invariance import TOKENS
from ...reference.attention.sparse_mla_decode import DecodeArguments, DecodeQuantArguments, RaggedDecodeArguments
from ..device.quant import why_unsupported_fp8
from ..host.addresses import first_byte
from ..host.gpu import SM90, Gpu, gpu_of, sm90_module
from ..host.launch import launch_kernel
from ..host.pdl import pdl_option, pdl_prologue, supports_pdl
from ..preprocess.dequantize_and_gather_k_cache import load_mla_rows
from ..preprocess.q_norm_rope import q_norm_rope
from .common import DecodeCall, Outputs, PagedKeys, decode_call, valid_slots
from .inv_rope import inv_rope, inv_rope_fp8_quant
from .sparse_mla_decode_triton import MAX_SLOTS, launch
from .sparse_mla_decode_triton import sparse_mla_decode_latent as sparse_mla_decode_latent
from .sparse_mla_decode_triton import (
    why_unsupported_sparse_mla_decode_latent as why_unsupported_sparse_mla_decode_latent,
)
from .sparse_mla_prefill import IndexRows, PrefillCall, attend_rows

MAX_HEAD_DIM = 512
MIN_ROTATED_DIM = 16
SM90_KERNELS = (
    "attention.sparse_mla_decode_sm90_few_tokens",
    "attention.sparse_mla_decode_sm90",
    "attention.sparse_mla_decode_sm90_few_heads",
)
MIN_TOKENS_BY_ROWS, MIN_HEADS_BY_ROWS = 512, 64
MAX_ROWS, ROWS_PER_TOKEN = 32768, 16
"""Most rows of both caches that are copied to be attended by rows: 16 for each token, or twice as many up to 32,768,
which stay in the L2 cache of an H200. What is fused has no say in it, so that it does not change the bits of attention.
"""
ROWS_PER_PROGRAM, COLUMNS_PER_STEP = 8, tl.constexpr(256)
Q_ALIGN = 16
"""Alignment in bytes of queries that are attended without norm, because TMA copies them."""
LIST_COLUMNS = 256
"""Columns of a padded row that a program writes."""
MAX_ROWS_NUMEL = 2**28
MAX_PDL_PROGRAMS = 32
"""Largest launch of the list conversion that uses PDL; before larger ones attention would take room on the SMs."""
PAD = tl.constexpr(PAD_INDEX)
LAST_INDEX = tl.constexpr(torch.iinfo(torch.int32).max)


def why_unsupported_sparse_mla_decode(op: DecodeArguments) -> str:
    """Return why the kernels do not support a call, "" if they do."""
    dim, fmt = op.q.shape[2], op.cache_format
    caches, rows, blocks = [op.k_cache], [op.indices], [op.block_size]
    if op.extra_k_cache is not None:
        caches.append(op.extra_k_cache)
        blocks.append(op.extra_block_size)
    if op.extra_indices is not None:
        rows.append(op.extra_indices)
    if dim > MAX_HEAD_DIM:
        return f"heads have at most {MAX_HEAD_DIM} dims, these have {dim}"
    if (op.q_norm_eps is not None or op.inverse_rope) and (dim < MIN_ROTATED_DIM or dim & (dim - 1)):
        return f"rotated heads have a power of two of dims, at least {MIN_ROTATED_DIM}, these have {dim}"
    for what, tensors in (("caches", caches), ("indices", rows)):
        if len({x.dtype for x in tensors}) > 1:
            return f"both {what} have one dtype, these are {' and '.join(str(x.dtype) for x in tensors)}"
    slots = max(cache.shape[0] * block for cache, block in zip(caches, blocks, strict=True))
    if slots >= MAX_SLOTS:
        return f"caches have fewer than {MAX_SLOTS} slots, the larger one has {slots}"
    if fmt in PAGE_LAYOUTS:
        for cache in caches:
            if cache.stride(0) % 4 or first_byte(cache) % 4:
                at = f"these start at byte {first_byte(cache)}, {cache.stride(0)} bytes apart"
                return f"{fmt} pages start at multiples of 4 bytes, {at}"
    return ""


def why_unsupported_sparse_mla_decode_out(op: Any) -> str:
    """Return why the kernels do not support a call, "" if they do. Outputs that do not exist yet (None) are contiguous.

    `op` is a `DecodeOutArguments`.
    """
    out, lse, *arguments = op
    for name, x in (("out", out), ("lse", lse)):
        if x is not None and x.stride(-1) != 1:
            return f"the last dim of {name} is contiguous, this one has stride {x.stride(-1)}"
    return why_unsupported_sparse_mla_decode(DecodeArguments(*arguments))


def why_unsupported_sparse_mla_decode_quant(op: DecodeQuantArguments) -> str:
    """Return why the kernels do not support a call, "" if they do."""
    dims = ACT_TILE * (SCALES_PER_WORD if op.packed_scales else 1)
    if op.q.shape[2] % dims != 0:
        return f"quantised heads have a multiple of {dims} dims, these have {op.q.shape[2]}"
    return why_unsupported_fp8(op.q.device) or why_unsupported_sparse_mla_decode(op.decode())


def sparse_mla_decode(op: DecodeArguments) -> tuple[Tensor, Tensor]:
    """Launch `sparse_mla_decode`.

    Notes:
        - Softmax weights are rounded to the dtype of the keys before the second GEMM; sums are float32.
        - A repeated call gives the same bits, and with `inverse_rope` those of `inv_rope` after a call without.
        - How a token's keys are split, and so the order of its sums, may depend on the number of tokens;
          `batch_invariant` splits them by the token's own lengths.
    """
    return launch_best(decode_call(op))


def sparse_mla_decode_out(op: Any) -> None:
    """Launch `sparse_mla_decode` into given outputs. `op` is a `DecodeOutArguments`."""
    out, lse, *arguments = op
    launch_best(decode_call(DecodeArguments(*arguments)), Outputs(out, lse))


def sparse_mla_decode_quant(op: DecodeQuantArguments) -> tuple[Tensor, Tensor]:
    """Launch `sparse_mla_decode_quant`: bit for bit `inv_rope_fp8_quant` after `sparse_mla_decode`."""
    return launch_best(decode_call(op))


def invariant_sparse_mla_decode(op: DecodeArguments, level: str = TOKENS) -> tuple[Tensor, Tensor]:
    """Launch `sparse_mla_decode` with splits that follow from a token's length."""
    return launch_best(decode_call(op)._replace(batch_invariant=level))


def invariant_sparse_mla_decode_quant(op: DecodeQuantArguments, level: str = TOKENS) -> tuple[Tensor, Tensor]:
    """Launch `sparse_mla_decode_quant` with splits that follow from a token's length."""
    return launch_best(decode_call(op)._replace(batch_invariant=level))


def launch_best(call: DecodeCall, into: Outputs | None = None) -> tuple[Tensor, Tensor]:
    """Run the best kernel for a call; by rows only if the outputs are not given."""
    gpu = gpu_of(call.q.device)
    if into is None and not why_unsupported_by_rows(call, gpu):
        return decode_by_rows(call)
    for name in SM90_KERNELS:
        sm90 = sm90_module(gpu, name)
        if sm90 is not None and not sm90.why_unsupported(call):
            return sm90.launch(call, gpu, into=into)
    return launch(call, gpu, into=into)


@triton.jit(do_not_specialize=["rows"])
def dequantize_pages_kernel(
    p_rows,  # [rows, 512] bfloat16, contiguous
    p_cache,  # pages of `fp8_ds_mla`
    page_stride,
    rows,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Dequantise ROWS rows of the cache, in the order of slots."""
    slot = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = slot < rows
    known = tl.where(live, slot, 0)
    values = load_mla_rows(p_cache + known // BLOCK_SIZE * page_stride, known % BLOCK_SIZE, live, BLOCK_SIZE)
    D: tl.constexpr = values.shape[1]
    tl.store(p_rows + known[:, None] * D + tl.arange(0, D)[None, :], values, mask=live[:, None])


@triton.jit(
    do_not_specialize=["window_slots", "extra_slots", "window_width", "extra_width"],
    do_not_specialize_on_alignment=["p_window_lens", "p_extra_lens"],
)
def concatenate_slots_kernel(
    outputs,  # rows [T, window_width + extra_width] and counts [T], int32, contiguous
    indices,  # of both caches, [>= T, width] int
    p_window_lens,  # [>= T] int
    p_extra_lens,  # [>= T] int
    strides,  # of the indices of both caches, and of both lengths
    window_width,
    extra_width,
    window_slots,
    extra_slots,
):
    """List the rows of one token: those of the window, then those of the extra cache, -1 for invalid slots."""
    p_rows, p_counts = outputs
    p_window, p_extra = indices
    window_strides, extra_strides, lens_strides = strides
    token = tl.program_id(0).to(tl.int64)
    width = window_width + extra_width
    first = tl.minimum(tl.maximum(tl.load(p_window_lens + token * lens_strides[0]), 0), window_width).to(tl.int32)
    second = tl.minimum(tl.maximum(tl.load(p_extra_lens + token * lens_strides[1]), 0), extra_width).to(tl.int32)
    p_window += token * window_strides[0]
    p_extra += token * extra_strides[0]
    for start in range(0, width, COLUMNS_PER_STEP):
        column = start + tl.arange(0, COLUMNS_PER_STEP)
        slot = valid_slots(p_window, window_strides[1], column, first, window_slots)
        extra_column = tl.where(column < first, second, column - first)
        entry = valid_slots(p_extra, extra_strides[1], extra_column, second, extra_slots)
        row = tl.where(entry >= 0, window_slots + entry, slot)
        tl.store(p_rows + token * width + column, row.to(tl.int32), mask=column < width)
    tl.store(p_counts + token, first + second)


def why_unsupported_by_rows(call: DecodeCall, gpu: Gpu) -> str:
    """Return why a call is not attended by rows, "" if it is."""
    q, window, extra, fused = call.q, call.window, call.extra, call.fused
    tokens, heads, dim = q.shape
    known = call.cache_format == "fp8_ds_mla" or (call.cache_format == "plain" and window.cache.dtype is torch.bfloat16)
    if gpu.capability != SM90 or not known or q.dtype is not torch.bfloat16 or dim != HEAD_DIM:
        keys = f"{call.cache_format} keys in {window.cache.dtype}"
        form = f"{keys} and {q.dtype} queries of {dim} dims on {gpu.backend} {gpu.capability}"
        return f"it needs fp8_ds_mla or bfloat16, and bfloat16 queries of {HEAD_DIM} dims on sm_{SM90}, this is {form}"
    if tokens < MIN_TOKENS_BY_ROWS or heads < MIN_HEADS_BY_ROWS:
        return f"{MIN_TOKENS_BY_ROWS} tokens and {MIN_HEADS_BY_ROWS} heads pay, these are {tokens} and {heads}"
    if call.batch_invariant:
        return "it depends on the number of tokens, and the call is batch-invariant"
    most, rows = _most_copied_rows(tokens), window.slots() + extra.slots()
    if not 0 < rows <= most and rows_in_place(call, gpu) is None:
        return f"caches of up to {most} rows pay, these have {rows}"
    if call.cache_format != "plain" and any(
        keys.cache.stride(0) % 2 or first_byte(keys.cache) % 2 for keys in (window, extra)
    ):
        return "pages start at multiples of 2 bytes, these do not"
    if fused.n_groups and not fused.inverse_rope:
        return "it quantises rotated heads only"
    starts = (q.data_ptr(), *(n * q.element_size() for n in q.stride()[:2]))
    if fused.q_norm_eps is None and (q.stride(2) != 1 or any(n % Q_ALIGN for n in starts)):
        return f"contiguous heads start at multiples of {Q_ALIGN} bytes, these have strides {q.stride()}"
    if not call.scale > 0 or (call.sink is not None and call.sink.stride(0) != 1):
        return f"the scale is positive and sinks are contiguous, these are {call.scale} and {call.sink}"
    return ""


def _most_copied_rows(tokens: int) -> int:
    return max(ROWS_PER_TOKEN * tokens, min(MAX_ROWS, 2 * ROWS_PER_TOKEN * tokens))


def rows_in_place(call: DecodeCall, gpu: Gpu) -> tuple[Tensor, Tensor | None] | None:
    """Return the rows of both caches as the prefill kernel reads them where they are, None if they must be copied."""
    window, extra = call.window, call.extra
    sm90 = sm90_module(gpu, "attention.sparse_mla_prefill_sm90")
    contiguous = window.cache.is_contiguous() and extra.cache.is_contiguous()
    if sm90 is None or call.cache_format != "plain" or not contiguous:
        return None
    first, second = (keys.cache.view(-1, HEAD_DIM)[: keys.slots()] for keys in (window, extra))
    more = second if len(second) > 0 else None
    # What is fused has no say in it.
    seen = PrefillCall(call.q, first, IndexRows(window.indices, None, 0), call.scale, call.sink, more)
    return None if sm90.why_unsupported(seen) else (first, more)


def decode_by_rows(call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Run the prefill kernel over the rows of both caches; with quantised outputs if there are groups."""
    gpu = gpu_of(call.q.device)
    indices, counts = concatenate_slots(call.q.shape[0], call.window, call.extra)
    kv, more = rows_in_place(call, gpu) or (bfloat16_rows(call.window, call.extra, call.cache_format), None)
    prefill = PrefillCall(call.q, kv, IndexRows(indices, counts, indices.shape[1]), call.scale, call.sink, more)
    sm90 = sm90_module(gpu, "attention.sparse_mla_prefill_sm90")
    if sm90 is not None and not sm90.why_unsupported(prefill, call.fused):
        return sm90.launch_fused(prefill, gpu, call.fused)
    return _launch_separately(prefill, call)


def _launch_separately(prefill: PrefillCall, call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Run one kernel for each step that the sm_90 kernel fuses."""
    fused, rope = call.fused, (call.fused.positions, call.fused.cos_sin_cache)
    positions, table = rope
    if fused.q_norm_eps is not None:
        assert positions is not None and table is not None
        prefill = prefill._replace(q=q_norm_rope(prefill.q, positions, table, fused.q_norm_eps))
    out, _, lse = attend_rows(prefill)
    if not fused.inverse_rope:
        return out, lse
    assert positions is not None and table is not None
    if fused.n_groups == 0:
        return inv_rope(out, positions, table), lse
    return inv_rope_fp8_quant(out, positions, table, fused.n_groups, fused.heads_per_group, fused.packed_scales)


def bfloat16_rows(window: PagedKeys, extra: PagedKeys, cache_format: str) -> Tensor:
    """Return bfloat16 `[slots, 512]`, the rows of both caches in the order of their slots."""
    counts = window.slots(), extra.slots()
    rows = torch.empty((sum(counts), HEAD_DIM), dtype=torch.bfloat16, device=window.cache.device)
    for keys, cache_rows in ((window, rows[: counts[0]]), (extra, rows[counts[0] :])):
        if cache_rows.shape[0] == 0:
            continue
        if cache_format == "plain":
            cache_rows.view(keys.cache.shape).copy_(keys.cache)
            continue
        pages = byte_pages(keys.cache, cache_format, keys.block_size)
        launch_kernel(
            dequantize_pages_kernel,
            (cdiv(cache_rows.shape[0], ROWS_PER_PROGRAM),),
            cache_rows,
            pages,
            pages.stride(0),
            cache_rows.shape[0],
            BLOCK_SIZE=keys.block_size,
            ROWS=ROWS_PER_PROGRAM,
            num_warps=4,
        )
    return rows


def concatenate_slots(tokens: int, window: PagedKeys, extra: PagedKeys) -> tuple[Tensor, Tensor]:
    """Return int32 `[T, columns of both]`, rows of `bfloat16_rows`, and `[T]`, the number of valid columns."""
    widths = [keys.indices.shape[1] for keys in (window, extra)]
    rows = torch.empty((tokens, sum(widths)), dtype=torch.int32, device=window.indices.device)
    counts = torch.empty((tokens,), dtype=torch.int32, device=rows.device)
    if tokens > 0:
        launch_kernel(
            concatenate_slots_kernel,
            (tokens,),
            (rows, counts),
            (window.indices, extra.indices),
            window.lens,
            extra.lens,
            (window.indices.stride(), extra.indices.stride(), (window.len_stride(), extra.len_stride())),
            *widths,
            window.slots(),
            extra.slots(),
        )
    return rows, counts


@triton.jit
def _write_row(row, entries, width, token, block, COLUMNS: tl.constexpr):
    """Write columns from `block * COLUMNS` on of row `token`, and its length.

    `row`: pointers to rows and lengths; `entries`: pointers to indices and indptr, their strides, and the number of
    indices.
    """
    p_rows, p_lens = row
    p_indices, p_indptr, index_stride, indptr_stride, capacity = entries
    begin = tl.load(p_indptr + token * indptr_stride).to(tl.int64)
    end = tl.load(p_indptr + (token + 1) * indptr_stride).to(tl.int64)
    o_column = block * COLUMNS + tl.arange(0, COLUMNS)
    m_column = o_column < width
    place = begin + o_column
    inside = m_column & (place >= 0) & (place < capacity) & (place < end)
    slot = tl.load(p_indices + tl.where(inside, place, 0) * index_stride, mask=inside, other=PAD).to(tl.int64)
    slot = tl.where((slot >= 0) & (slot <= LAST_INDEX), slot, PAD)
    tl.store(p_rows + token * width + o_column, slot.to(tl.int32), mask=m_column)
    length = tl.minimum(tl.maximum(end - begin, 0), width)
    tl.store(p_lens + token, length.to(tl.int32), mask=block == 0)


@triton.jit(
    do_not_specialize=["window_capacity", "extra_capacity", "window_width", "extra_width", "window_blocks", "blocks"],
    do_not_specialize_on_alignment=["p_window_indptr", "p_extra_indptr"],
)
def dense_rows_kernel(
    p_window_rows,  # [T, window_width] int32, contiguous
    p_window_lens,  # [T] int32, contiguous
    p_extra_rows,  # [T, extra_width] int32, contiguous
    p_extra_lens,  # [T] int32, contiguous
    p_window_indices,  # [window_capacity] int
    p_window_indptr,  # [> T] int
    p_extra_indices,  # [extra_capacity] int
    p_extra_indptr,  # [> T] int
    window_index_stride,
    window_indptr_stride,
    extra_index_stride,
    extra_indptr_stride,
    window_capacity,
    extra_capacity,
    window_width,
    extra_width,
    window_blocks,  # programs of a token that write the window's row; the others write the extra row
    blocks,  # programs of a token
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write block p % blocks of token p // blocks, blocks of the window first."""
    pdl_prologue(PDL)  # attention may be launched while rows are written: it waits before it reads them
    token = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    if block < window_blocks:
        entries = p_window_indices, p_window_indptr, window_index_stride, window_indptr_stride, window_capacity
        _write_row((p_window_rows, p_window_lens), entries, window_width, token, block, COLUMNS)
    else:
        entries = p_extra_indices, p_extra_indptr, extra_index_stride, extra_indptr_stride, extra_capacity
        _write_row((p_extra_rows, p_extra_lens), entries, extra_width, token, block - window_blocks, COLUMNS)


def dense_rows(
    tokens: int, window: tuple[Tensor, Tensor, int], extra: tuple[Tensor, Tensor, int] | None
) -> tuple[Tensor, ...]:
    """Return rows int32 `[T, W]` and lengths int32 `[T]` of one or two lists `indices`, `indptr`, width W."""
    outputs = [
        (indices.new_empty((tokens, width), dtype=torch.int32), indices.new_empty((tokens,), dtype=torch.int32))
        for indices, _, width in ((window,) if extra is None else (window, extra))
    ]
    if tokens > 0:
        lists = (window, window if extra is None else extra)
        blocks = [max(1, cdiv(width, LIST_COLUMNS)) for _, _, width in lists]
        programs = blocks[0] + (0 if extra is None else blocks[1])
        pdl = tokens * programs <= MAX_PDL_PROGRAMS and supports_pdl(gpu_of(outputs[0][0].device))
        # One dimension: the others of a grid end at 65,535.
        launch_kernel(
            dense_rows_kernel,
            (tokens * programs,),
            *outputs[0],
            *outputs[-1],
            *(tensor for indices, indptr, _ in lists for tensor in (indices, indptr)),
            *(tensor.stride(0) for indices, indptr, _ in lists for tensor in (indices, indptr)),
            *(indices.shape[0] for indices, _, _ in lists),
            *(width for _, _, width in lists),
            blocks[0],
            programs,
            COLUMNS=LIST_COLUMNS,
            num_warps=2,
            PDL=pdl,
            **pdl_option(pdl),
        )
    return tuple(tensor for pair in outputs for tensor in pair)


def why_unsupported_sparse_mla_decode_ragged(op: RaggedDecodeArguments) -> str:
    """Return why the kernels do not support a call, "" if they do."""
    width = op.max_entries or op.indices.shape[0]
    if op.extra_indices is not None:
        width = max(width, op.extra_max_entries or op.extra_indices.shape[0])
    if op.q.shape[0] * width >= MAX_ROWS_NUMEL:
        return f"{op.q.shape[0]} rows of up to {width} entries exceed {MAX_ROWS_NUMEL}: give max_entries"
    # Rows are int32, whatever the lists are.
    extra = None if op.extra_indices is None else op.indices
    return why_unsupported_sparse_mla_decode(op.decode(op.indices, op.indptr, extra, op.extra_indptr))


def sparse_mla_decode_ragged(op: RaggedDecodeArguments) -> tuple[Tensor, Tensor]:
    """Launch `sparse_mla_decode_ragged`: bit for bit `sparse_mla_decode` of the padded rows."""
    window, extra = (op.indices, op.indptr, op.max_entries or op.indices.shape[0]), None
    if op.extra_indices is not None and op.extra_indptr is not None:
        extra = (op.extra_indices, op.extra_indptr, op.extra_max_entries or op.extra_indices.shape[0])
    rows: tuple[Any, ...] = dense_rows(op.q.shape[0], window, extra)
    return sparse_mla_decode(op.decode(*(rows if extra is not None else (*rows, None, None))))
