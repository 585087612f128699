"""Attention of very many tokens out of paged caches, as of a prompt: each key is dequantised once, not for every token.

All rows of both caches become bfloat16, next to each other, and what prefills a workspace attends them, with all that
the decode kernels fuse (sparse_mla_prefill_kernel_hopper.py). What that does not take has a launch for each thing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import HEAD_DIM, byte_pages, cdiv
from ..host.gpu import SM90, Gpu, gpu_of, sm90_module
from ..host.launch import launch_kernel
from ..preprocess.dequantize_and_gather_k_cache import load_mla_rows
from ..preprocess.q_norm_rope import q_norm_rope
from .inv_rope import inv_rope, inv_rope_fp8_quant
from .kv_load import valid_slots
from .sparse_mla_decode_plan import Fusion, Source
from .sparse_mla_prefill import Rows, attend_rows

FEWEST_TOKENS, FEWEST_HEADS = 512, 64
MOST_ROWS, ROWS_OF_A_TOKEN = 32768, 16
"""Of both caches, the larger of the two, and no more than twice the second: 32 MiB stay in an H200's L2 cache while
tokens attend them. There 4,096 tokens of 64 heads and 640 keys over 8,192 rows take 723 us with norm, RoPE, inverse
RoPE and quantisation, and 1,033 by the decode kernel; without them 586 and 954; of 128 keys 284 and 440, 181 and 398.
Over 65,536 rows the first is 882 and 1,082, and 512 tokens of 128 keys take 48 and 62
(`python examples/benchmarks/attention_of_a_prompt.py`). What is fused has no say in it, so that it changes no bit of
what it is fused with."""
ROWS_AT_A_TIME, COLUMNS_AT_A_TIME = 8, 256
ALIGN = 16
"""Bytes that queries start at multiples of, where they are attended as they are."""


@triton.jit(do_not_specialize=["rows"])
def dequantize_pages_kernel(
    p_rows,  # [rows, 512] bfloat16, contiguous
    p_cache,  # pages of `fp8_ds_mla`
    page_stride,
    rows,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program p takes ROWS rows of the cache, in the order of slots."""
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
def join_slots_kernel(
    p_rows,  # [T, window_width + extra_width] int32, contiguous
    p_counts,  # [T] int32
    p_window,  # [>= T, window_width] int
    p_extra,  # [>= T, extra_width] int
    p_window_lens,  # [>= T] int
    p_extra_lens,  # [>= T] int
    window_strides,
    extra_strides,
    lens_strides,
    window_width,
    extra_width,
    window_slots,
    extra_slots,
    BLOCK: tl.constexpr,
):
    """Program t lists the rows of token t: those of the window, then the others, -1 for what is no slot."""
    token = tl.program_id(0).to(tl.int64)
    width = window_width + extra_width
    first = tl.minimum(tl.maximum(tl.load(p_window_lens + token * lens_strides[0]), 0), window_width).to(tl.int32)
    second = tl.minimum(tl.maximum(tl.load(p_extra_lens + token * lens_strides[1]), 0), extra_width).to(tl.int32)
    p_window += token * window_strides[0]
    p_extra += token * extra_strides[0]
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        slot = valid_slots(p_window, window_strides[1], column, first, window_slots)
        behind = tl.where(column < first, second, column - first)
        entry = valid_slots(p_extra, extra_strides[1], behind, second, extra_slots)
        row = tl.where(entry >= 0, window_slots + entry, slot)
        tl.store(p_rows + token * width + column, row.to(tl.int32), mask=column < width)
    tl.store(p_counts + token, first + second)


def by_rows_refuses(
    q: Tensor,
    window: Source,
    extra: Source,
    cache_format: str,
    scale: float,
    sink: Tensor | None,
    fusion: Fusion,
    gpu: Gpu,
) -> str:
    """Why a call is not to be attended like this, or ""."""
    tokens, heads, dim = q.shape
    if gpu.capability != SM90 or cache_format != "fp8_ds_mla" or q.dtype is not torch.bfloat16 or dim != HEAD_DIM:
        return "it takes fp8_ds_mla and bfloat16 queries, on Hopper"
    if tokens < FEWEST_TOKENS or heads < FEWEST_HEADS or fusion.batch_invariant:
        return f"it takes {FEWEST_TOKENS} tokens and {FEWEST_HEADS} heads at least, and depends on how many there are"
    most = max(ROWS_OF_A_TOKEN * tokens, min(MOST_ROWS, 2 * ROWS_OF_A_TOKEN * tokens))
    if not 0 < _slots(window) + _slots(extra) <= most:
        return f"it takes caches of {most} rows at most"
    if any(source.cache.stride(0) % 2 or source.cache.storage_offset() % 2 for source in (window, extra)):
        return "it takes pages whose bfloat16 dims are aligned"
    if fusion.n_groups and not fusion.inverse_rope:
        return "it quantises what it rotates back"
    apart = (q.data_ptr(), *(n * q.element_size() for n in q.stride()[:2]))
    if fusion.q_norm_eps is None and (q.stride(2) != 1 or any(n % ALIGN for n in apart)):
        return f"it takes queries that start at multiples of {ALIGN} bytes"
    return "" if scale > 0 and (sink is None or sink.stride(0) == 1) else "it takes positive scales, sinks in a row"


def decode_by_rows(
    q: Tensor, window: Source, extra: Source, scale: float, sink: Tensor | None, fusion: Fusion
) -> tuple[Tensor, Tensor]:
    """As `sparse_mla_decode`, or as `sparse_mla_decode_quant` where `fusion` has groups."""
    gpu = gpu_of(q.device)
    indices, counts = join_slots(q.shape[0], window, extra)
    kv, rows = dequantised_pages(window, extra), Rows(indices, counts, indices.shape[1])
    hopper = sm90_module(gpu, "attention.sparse_mla_prefill_sm90")
    if hopper is not None and not hopper.hopper_refuses(q, kv, rows, scale, sink, fusion):
        return hopper.launch_fused(q, kv, rows, scale, sink, gpu, fusion)
    return _one_by_one(q, kv, rows, scale, sink, fusion)


def _one_by_one(
    q: Tensor, kv: Tensor, rows: Rows, scale: float, sink: Tensor | None, fusion: Fusion
) -> tuple[Tensor, Tensor]:
    """With a launch for each of the things that are fused elsewhere."""
    if fusion.q_norm_eps is not None:
        assert fusion.positions is not None and fusion.cos_sin_cache is not None
        q = q_norm_rope(q, fusion.positions, fusion.cos_sin_cache, fusion.q_norm_eps)
    out, _, lse = attend_rows(q, kv, rows, scale, sink)
    if not fusion.inverse_rope:
        return out, lse
    assert fusion.positions is not None and fusion.cos_sin_cache is not None
    where = out, fusion.positions, fusion.cos_sin_cache
    if fusion.n_groups == 0:
        return inv_rope(*where), lse
    return inv_rope_fp8_quant(*where, fusion.n_groups, fusion.heads_per_group, fusion.packed_scales)


def dequantised_pages(window: Source, extra: Source) -> Tensor:
    """bfloat16 `[slots, 512]`: the rows of both caches, in the order of their slots."""
    counts = _slots(window), _slots(extra)
    rows = torch.empty((sum(counts), HEAD_DIM), dtype=torch.bfloat16, device=window.cache.device)
    for source, part in ((window, rows[: counts[0]]), (extra, rows[counts[0] :])):
        if part.shape[0] == 0:
            continue
        pages = byte_pages(source.cache, "fp8_ds_mla", source.block_size)
        launch_kernel(
            dequantize_pages_kernel,
            (cdiv(part.shape[0], ROWS_AT_A_TIME),),
            part,
            pages,
            pages.stride(0),
            part.shape[0],
            BLOCK_SIZE=source.block_size,
            ROWS=ROWS_AT_A_TIME,
            num_warps=4,
        )
    return rows


def join_slots(tokens: int, window: Source, extra: Source) -> tuple[Tensor, Tensor]:
    """int32 `[T, columns of both]`, rows of `dequantised_pages`, and `[T]`, how many columns count."""
    widths = [source.indices.shape[1] for source in (window, extra)]
    rows = torch.empty((tokens, sum(widths)), dtype=torch.int32, device=window.indices.device)
    counts = torch.empty((tokens,), dtype=torch.int32, device=rows.device)
    if tokens > 0:
        launch_kernel(
            join_slots_kernel,
            (tokens,),
            rows,
            counts,
            window.indices,
            extra.indices,
            window.lens,
            extra.lens,
            window.indices.stride(),
            extra.indices.stride(),
            (window.lens.stride(0), extra.lens.stride(0)),
            *widths,
            _slots(window),
            _slots(extra),
            BLOCK=COLUMNS_AT_A_TIME,
        )
    return rows, counts


def _slots(source: Source) -> int:
    """Rows of a cache; of one that nothing is read from, none."""
    return source.cache.shape[0] * source.block_size if source.indices.shape[1] else 0
