"""What both decode kernels for Hopper share on the host: which caches they can gather from, and their launch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ... import layout
from ..host.gpu import Gpu
from ..host.launch import launch_kernel
from ..host.pdl import supports_pdl
from .sparse_mla_decode_plan import Fusion, Results, Source, cut_of, results_for
from .split_combine import LOG2_E, part_buffers, split_softmax

PAGE_ALIGN = 16


def gather_refuses(
    q: Tensor, window: Source, extra: Source, cache_format: str, sink: Tensor | None, fusion: Fusion
) -> str:
    """Why keys of these caches cannot be gathered as the kernels for Hopper do it, "" if they can."""
    sources, table = (window, extra), fusion.cos_sin_cache
    if cache_format != "fp8_ds_mla" or q.dtype is not torch.bfloat16:
        return "it takes fp8_ds_mla and bfloat16 queries"
    if any((s.block_size & (s.block_size - 1)) or s.cache.stride(0) % PAGE_ALIGN for s in sources):
        return f"it takes pages of a power of two of tokens, a multiple of {PAGE_ALIGN} bytes apart"
    if any(s.cache.storage_offset() % PAGE_ALIGN for s in sources):
        return f"it takes caches that start at a multiple of {PAGE_ALIGN} bytes"
    if table is not None and table.shape[1] > layout.HEAD_DIM // 2:
        return "it rotates half of a vector at most"
    rows = [x for x in (q, sink, window.indices, extra.indices, table) if x is not None]
    return "" if all(x.stride(-1) == 1 for x in rows) else "it takes rows whose elements are neighbours"


def launch_gathering(
    kernel: Any,
    block_h: int,
    block_n: int,
    constants: dict[str, Any],
    q: Tensor,
    window: Source,
    extra: Source,
    scale: float,
    sink: Tensor | None,
    gpu: Gpu,
    splits: int,
    fusion: Fusion,
    into: Results | None,
    warps: int = 4,
    flat: bool = True,
    packs: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `launch` of the portable kernel, by a `kernel` for `block_h` heads and blocks of `block_n` keys.

    `constants` are the compile-time arguments that only this kernel has. Its programs are numbered by head block, part
    and token, in one row where `flat`. It can store parts as float16 if it `packs`.
    """
    into = into or results_for(q, fusion)
    tokens, heads, head_dim = q.shape
    if tokens * heads == 0:
        return into.pair()
    # The producer reads the first key in place of none: rows of a cache without pages are empty.
    width0, width1 = (s.indices.shape[1] if s.cache.shape[0] else 0 for s in (window, extra))
    head_blocks, blocks = layout.cdiv(heads, block_h), layout.cdiv(width0, block_n) + layout.cdiv(width1, block_n)
    cut = cut_of(tokens, heads, head_dim, head_blocks, blocks, block_n, gpu, fusion.batch_invariant, splits, packs)
    parts = part_buffers(cut, heads, head_dim, q) if cut.splits > 1 else None
    pages0, pages1 = (layout.byte_pages(s.cache, "fp8_ds_mla", s.block_size) for s in (window, extra))
    positions, position_stride, table, table_strides, max_pos = fusion.rope()
    for first in range(0, tokens, cut.tokens):
        end = min(tokens, first + cut.tokens)
        grid = head_blocks, cut.splits, end - first
        launch_kernel(
            kernel,
            (math.prod(grid),) if flat else grid,
            *(parts or into),
            q,
            pages0.view(torch.int32),
            window.indices,
            window.lens,
            pages1.view(torch.int32),
            extra.indices,
            extra.lens,
            sink,
            positions,
            table,
            scale * LOG2_E.value,
            fusion.q_norm_eps,
            cut.splits,
            cut.least,
            first,
            tokens,
            into.padded_tokens(),
            *into.strides(),
            into.lse_stride(),
            q.stride(0),
            q.stride(1),
            pages0.stride(0) // PAGE_ALIGN,
            pages1.stride(0) // PAGE_ALIGN,
            window.indices.stride(0),
            extra.indices.stride(0),
            window.lens.stride(0),
            extra.lens.stride(0),
            position_stride,
            table_strides[0],
            max_pos,
            width0,
            width1,
            pages0.shape[0] * window.block_size,
            pages1.shape[0] * extra.block_size,
            H=heads,
            LOG_PAGE0=window.block_size.bit_length() - 1,
            LOG_PAGE1=extra.block_size.bit_length() - 1,
            **constants,
            SPLIT=cut.splits > 1,
            num_warps=warps,
            # A contracted multiply and add rounds once where the separate ops round twice.
            enable_fp_fusion=False,
            **(fusion if cut.splits == 1 else fusion.front()).constants(),
        )
        if parts is not None:
            split_softmax(into, parts, sink, fusion, torch.bfloat16, first, end, supports_pdl(gpu))
    return into.pair()
