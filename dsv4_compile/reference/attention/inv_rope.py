"""Inverse RoPE of the attention output, and its quantisation for the grouped output projection."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import SCALE_ROW_ALIGN, align_up
from ..common.block_scale import pack_scales, quantize_activation
from ..common.quant import ue8m0_scale
from ..common.rope import apply_rope


def inv_rope(o: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """Rotate the last `rope_dim` of each head back by its position, in float32, rounded once.

    Args:
        o: `[T, H, D]` bfloat16, float16 or float32, any strides.
        positions: int32 or int64 `[>= T]`. cos_sin_cache: float32 `[max_pos, rope_dim]`.
    Returns:
        Contiguous `[T, H, D]` in o's dtype.
    """
    return apply_rope(o, positions[: o.shape[0]], cos_sin_cache, inverse=True).to(o.dtype)


def inv_rope_fp8_quant(
    o: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    n_groups: int,
    heads_per_group: int,
    packed_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate heads back as `inv_rope`, without rounding, and quantise each group to e4m3 in tiles of 128.

    The heads of a group are concatenated: K = heads_per_group * D. `block_scale.quantize_activation` defines values and
    scales of the float32 result of the rotation.

    Args:
        o: `[T, >= n_groups * heads_per_group, D]`; later heads are padding and are not read.
        positions: int32 or int64 `[>= T]`. cos_sin_cache: float32 `[max_pos, rope_dim]`.
        packed_scales: return four UE8M0 bytes in an int32, the first tile's in the lowest byte, instead of float32.
    Returns:
        e4m3 `[T, G, K]`, a view of contiguous `[G, T, K]`: strides (K, T * K, 1).
        Scales `[T, G, n]`, a view of contiguous `[G, n, Ta]`: strides (1, n * Ta, Ta). Ta is T rounded up to 4, and
        rows T to Ta are zero. n = K / 128, or ceil(K / 512) when packed, where missing tiles have byte 0.
    """
    heads = n_groups * heads_per_group
    return quantize_groups(
        apply_rope(o[:, :heads], positions[: o.shape[0]], cos_sin_cache, inverse=True), n_groups, packed_scales
    )


def quantize_groups(x: Tensor, n_groups: int, packed_scales: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise heads `[T, H, D]` as `inv_rope_fp8_quant` without the rotation; H is a multiple of `n_groups`."""
    tokens, heads, dim = x.shape
    values, byte = quantize_activation(x.reshape(tokens, n_groups, heads // n_groups * dim))
    scale = pack_scales(byte) if packed_scales else ue8m0_scale(byte)

    out = values.transpose(0, 1).contiguous().as_strided(values.shape, value_strides(tokens, values.shape[2]))
    # The zero rows after T are part of the layout: TMA loads fetch whole groups of four rows. They are a pad, because a
    # copy into the rows before them guards on their density, and compiled code would hold for some T only.
    strides = scale_strides(tokens, scale.shape[2])
    padded = torch.nn.functional.pad(scale.permute(1, 2, 0).contiguous(), (0, strides[2] - tokens))
    return out, padded.as_strided(scale.shape, strides)


def value_strides(tokens: int, size: int) -> tuple[int, int, int]:
    """Return strides of `[T, G, K]` values stored as contiguous `[G, T, K]`."""
    return size, tokens * size, 1


def scale_strides(tokens: int, count: int) -> tuple[int, int, int]:
    """Return strides of `[T, G, n]` scales stored as contiguous `[G, n, Ta]`."""
    aligned = align_up(tokens, SCALE_ROW_ALIGN)
    return 1, count * aligned, aligned
