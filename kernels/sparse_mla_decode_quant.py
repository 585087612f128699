"""Launcher of `sparse_mla_decode_quant`; the kernels are those of `sparse_mla_decode`."""

from __future__ import annotations

from torch import Tensor

from ..layout import ACT_TILE, SCALES_PER_WORD
from ..reference.sparse_mla_decode import group_heads
from .quant import refuses_fp8
from .sparse_mla_decode import launch_best, sources, sparse_mla_decode_refuses
from .sparse_mla_decode_plan import Fusion


def sparse_mla_decode_quant_refuses(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    block_size: int,
    cache_format: str,
    scale: float,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lens: Tensor | None = None,
    extra_block_size: int = 0,
    kv_scale: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    q_norm_eps: float | None = None,
    inverse_rope: bool = True,
    batch_invariant: bool = False,
    n_groups: int = 1,
    heads_per_group: int = 0,
    packed_scales: bool = False,
) -> str:
    """Why the kernel cannot take a call, "" if it can."""
    strip = ACT_TILE * (SCALES_PER_WORD if packed_scales else 1)
    if q.shape[2] % strip != 0:
        return f"the kernel quantises heads of a multiple of {strip} dims, these have {q.shape[2]}"
    return refuses_fp8(q.device) or sparse_mla_decode_refuses(
        q,
        k_cache,
        indices,
        lens,
        block_size,
        cache_format,
        scale,
        attn_sink,
        extra_k_cache,
        extra_indices,
        extra_lens,
        extra_block_size,
        kv_scale,
        positions,
        cos_sin_cache,
        q_norm_eps,
        inverse_rope,
        batch_invariant,
    )


def sparse_mla_decode_quant(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    block_size: int,
    cache_format: str,
    scale: float,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lens: Tensor | None = None,
    extra_block_size: int = 0,
    kv_scale: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    q_norm_eps: float | None = None,
    inverse_rope: bool = True,
    batch_invariant: bool = False,
    n_groups: int = 1,
    heads_per_group: int = 0,
    packed_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    """`sparse_mla_decode`, quantised: bit for bit `inv_rope_fp8_quant` behind a call of it."""
    size = group_heads(q.shape[1], n_groups, heads_per_group)
    caches = sources(k_cache, indices, lens, block_size, extra_k_cache, extra_indices, extra_lens, extra_block_size)
    where = positions, cos_sin_cache, q_norm_eps, inverse_rope, batch_invariant
    fusion = Fusion(*where, n_groups, size, packed_scales)
    return launch_best(q, *caches, cache_format, scale, attn_sink, kv_scale, fusion)
