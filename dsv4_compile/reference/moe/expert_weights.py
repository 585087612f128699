"""Weights of experts in the formats of checkpoints, and the order of MXFP4 that kernels read.

A format follows from dtypes alone: bytes are MXFP4 (two e2m1 a byte, the lower nibble first, and one UE8M0 scale for 32
elements of K), e4m3 has one scale per 128x128 block, everything else has none.

Tensor cores take a row's k = 16c + 8b + 2t + p, four bits c, b, t (two of them), p, from thread t of four. In the
interleaved order the eight nibbles of 32-bit word t of a group of 32 are those of thread t, so that a thread unpacks
what it multiplies: nibble 4p + 2b + c of word t is element k. The scales of four groups, a 32-bit word, are adjacent to
those of the next row. Both are permutations within an expert's matrix, so a checkpoint is saved back bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...layout import MX_TILE, SCALES_PER_WORD, WEIGHT_TILE
from ..common.block_scale import dequantize_weight
from ..common.quant import dequantize_mxfp4

Permute = Callable[[Tensor], Tensor]
MXFP4_DTYPES = (torch.uint8, torch.int8)
SCALE_COLUMNS = MX_TILE * SCALES_PER_WORD
"""Elements of K with scales in one word; K of interleaved weights is a multiple of it."""
_CHUNK = 1 << 22
"""Elements that are permuted at a time, which bounds the memory that a permutation in place takes."""


def weight_format(weight: Tensor) -> str:
    """Return "mxfp4", "e4m3" or "float", the format of a weight."""
    if weight.dtype in MXFP4_DTYPES:
        return "mxfp4"
    return "e4m3" if weight.dtype is torch.float8_e4m3fn else "float"


def columns(weight: Tensor) -> int:
    """Return K of a weight `[..., N, K]`."""
    return weight.shape[-1] * (2 if weight.dtype in MXFP4_DTYPES else 1)


def scale_shape(weight: Tensor) -> tuple[int, ...]:
    """Return the shape of the scales of a quantised weight."""
    *experts, rows, _ = weight.shape
    if weight.dtype in MXFP4_DTYPES:
        return (*experts, rows, columns(weight) // MX_TILE)
    return (*experts, -(-rows // WEIGHT_TILE), -(-columns(weight) // WEIGHT_TILE))


def dequantize_expert(weight: Tensor, scale: Tensor | None, interleaved: bool = False) -> Tensor:
    """Return one expert's weight `[N, K]` in float32."""
    if scale is None:
        return weight.float()
    if weight.dtype not in MXFP4_DTYPES:
        return dequantize_weight(weight, scale)
    packed, byte = weight.view(torch.uint8), scale.view(torch.uint8)
    if interleaved:
        packed, byte = checkpoint_order(packed), checkpoint_scales(byte)
    return dequantize_mxfp4(packed, byte)


def _nibbles(packed: Tensor) -> Tensor:
    """Return the nibbles of uint8 `[..., n]` as `[..., 2n]`."""
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)


def _packed(nibbles: Tensor) -> Tensor:
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def interleaved_order(packed: Tensor) -> Tensor:
    """Return uint8 `[..., K / 2]` of a checkpoint in the interleaved order."""
    groups = _nibbles(packed).unflatten(-1, (-1, 2, 2, 4, 2))  # c, b, t, p
    return _packed(groups.movedim((-2, -1), (-4, -3)).movedim(-1, -2).flatten(-5))


def checkpoint_order(packed: Tensor) -> Tensor:
    """Return interleaved uint8 `[..., K / 2]` in the order of a checkpoint."""
    groups = _nibbles(packed).unflatten(-1, (-1, 4, 2, 2, 2))  # t, p, b, c
    return _packed(groups.movedim(-1, -2).movedim((-4, -3), (-2, -1)).flatten(-5))


def interleaved_scales(byte: Tensor) -> Tensor:
    """Return uint8 `[N, K / 32]` of a checkpoint with words of four in the order of K first, then of rows."""
    rows, groups = byte.shape
    return byte.view(rows, -1, SCALES_PER_WORD).transpose(0, 1).reshape(rows, groups)


def checkpoint_scales(byte: Tensor) -> Tensor:
    """Return interleaved uint8 `[N, K / 32]` in the order of a checkpoint."""
    rows, groups = byte.shape
    return byte.reshape(-1, rows, SCALES_PER_WORD).transpose(0, 1).reshape(rows, groups)


def interleave_(weight: Tensor, scale: Tensor) -> None:
    """Bring MXFP4 weights `[E, N, K / 2]` and their scales `[E, N, K / 32]` into the interleaved order, in place."""
    _permute_(weight, scale, interleaved_order, interleaved_scales)


def deinterleave_(weight: Tensor, scale: Tensor) -> None:
    """Undo `interleave_`, bit by bit."""
    _permute_(weight, scale, checkpoint_order, checkpoint_scales)


def _permute_(weight: Tensor, scale: Tensor, order: Permute, scales: Permute) -> None:
    rows = max(1, _CHUNK // columns(weight))
    for matrix, byte in zip(weight.view(torch.uint8), scale.view(torch.uint8), strict=True):
        for rows_of_matrix in matrix.split(rows):
            rows_of_matrix.copy_(order(rows_of_matrix))
        byte.copy_(scales(byte))
