"""Sparse MLA decode on any GPU that Triton has: how sparse_mla_decode_kernel.py is launched.

With few tokens the keys of a token are split among programs, so that all of the GPU works, and a second kernel joins
the parts; see sparse_mla_decode_plan.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..layout import cdiv
from ..reference.sparse_mla_decode import output_dtype
from .attention_rows import DTYPES
from .gpu import FIRST_DEPENDENT, Gpu
from .launch import launch_kernel
from .sparse_mla_decode_kernel import sparse_mla_decode_kernel
from .sparse_mla_decode_plan import PLAIN, Fusion, Results, Source, cut_of, operand_dtype, results_for
from .split_softmax import LOG2_E, part_buffers, split_softmax


class Tiles(NamedTuple):
    """How a launch is cut up; see the kernel's arguments of these names."""

    block_h: int
    block_n: int
    warps: int
    keys_first: bool = False
    prefetch: bool = False


def choose_tiles(gpu: Gpu, heads: int, dtype: torch.dtype) -> Tiles:
    """Tiles for `heads` heads and operands of `dtype`: no more rows than heads need, within the GPU's shared memory."""
    if dtype is torch.float32:
        return Tiles(16, 16, 4)
    if gpu.backend == "cuda" and gpu.capability // 10 in (9, 10):
        if heads <= 16:
            return Tiles(16, 64, 8, prefetch=True)
        # One H200, 64 heads, 128 tokens of 640 keys: 67.5 us; with 32 keys 88, with 128 keys 74, prefetching 70, in
        # blocks of 32 heads 111.
        return Tiles(32, 64, 8, keys_first=True, prefetch=True) if heads <= 32 else Tiles(64, 64, 8)
    if heads <= 16:
        return Tiles(16, 32, 4, prefetch=True)
    if gpu.backend == "hip":
        return Tiles(32, 16, 4, prefetch=True) if heads <= 32 else Tiles(64, 16, 8, prefetch=True)
    return Tiles(32, 32, 8, keys_first=True, prefetch=True)


def launch(
    q: Tensor,
    window: Source,
    extra: Source,
    cache_format: str,
    scale: float,
    sink: Tensor | None,
    kv_scale: Tensor | None,
    gpu: Gpu,
    tiles: Tiles | None = None,
    splits: int = 0,
    fusion: Fusion = PLAIN,
    into: Results | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of `q` by the portable kernel, with what `fusion` says around it, into `into` or new results.

    Args:
        gpu: what `q` is on; tiles: None for what `choose_tiles` says.
        splits: into how many parts the keys of a token are cut; 0 as sparse_mla_decode_plan.py says.
    """
    tokens, heads, head_dim = q.shape
    into = into or results_for(q, fusion)
    if tokens * heads == 0:
        return into.pair()
    cache0, indices0, lens0 = window.tensors(cache_format)
    cache1, indices1, lens1 = extra.tensors(cache_format)
    dtype = operand_dtype(q, cache0, cache_format)
    tiles = tiles or choose_tiles(gpu, heads, dtype)
    width0, width1 = indices0.shape[1], indices1.shape[1]
    head_blocks, blocks = cdiv(heads, tiles.block_h), cdiv(width0, tiles.block_n) + cdiv(width1, tiles.block_n)
    cut = cut_of(tokens, heads, head_dim, head_blocks, blocks, tiles.block_n, gpu, fusion.batch_invariant, splits)
    dependent = cut.splits > 1 and gpu.capability >= FIRST_DEPENDENT
    parts = part_buffers(cut, heads, head_dim, q) if cut.splits > 1 else None
    positions, position_stride, table, table_strides, max_pos = fusion.rope()
    for first in range(0, tokens, cut.tokens):
        end = min(tokens, first + cut.tokens)
        launch_kernel(
            sparse_mla_decode_kernel,
            ((end - first) * head_blocks * cut.splits,),
            *(parts or into),
            q.view(torch.uint8) if q.element_size() == 1 else q,
            cache0,
            indices0,
            lens0,
            cache1,
            indices1,
            lens1,
            sink,
            kv_scale,
            positions,
            table,
            scale * LOG2_E.value,
            fusion.q_norm_eps,
            cut.splits,
            cut.least,
            first,
            tokens,
            into.padded_tokens(),
            into.strides(),
            into.lse_stride(),
            q.stride(),
            (*cache0.stride(), 0, 0)[:3],
            (*cache1.stride(), 0, 0)[:3],
            indices0.stride(),
            indices1.stride(),
            lens0.stride(0),
            lens1.stride(0),
            0 if sink is None else sink.stride(0),
            position_stride,
            table_strides,
            max_pos,
            width0,
            width1,
            cache0.shape[0] * window.block_size,
            cache1.shape[0] * extra.block_size,
            H=heads,
            D=head_dim,
            FORMAT=cache_format,
            PAGE0=window.block_size,
            PAGE1=extra.block_size,
            DTYPE=DTYPES[dtype],
            ROUND=DTYPES[output_dtype(q)],
            BLOCK_H=tiles.block_h,
            BLOCK_N=tiles.block_n,
            BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
            KEYS_FIRST=tiles.keys_first,
            PREFETCH=tiles.prefetch,
            SPLIT=cut.splits > 1,
            DEPENDENT=dependent,
            num_warps=tiles.warps,
            # A contracted multiply and add rounds once where the separate ops round twice.
            enable_fp_fusion=False,
            **(fusion if cut.splits == 1 else fusion.front()).constants(),
        )
        if parts is not None:
            split_softmax(into, parts, sink, fusion, output_dtype(q), first, end, dependent)
    return into.pair()
