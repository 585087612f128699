"""How `grouped_matmul` launches its kernel for many tokens on Hopper."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .. import layout
from ..layout import cdiv
from .arrivals import arrival_counters
from .gpu import Gpu
from .grouped_matmul_hopper import (
    PROCESSOR_BYTES,
    RESERVED_BYTES,
    operands_refused,
    rows_of,
    swizzled,
)
from .grouped_matmul_kernel_hopper import COPY_ALIGN, STRIP_BYTES
from .grouped_matmul_kernel_many_hopper import HALF_TOKENS, TILE_ROWS, grouped_matmul_many_hopper_kernel
from .launch import launch_kernel

TILE_TOKENS = 2 * HALF_TOKENS
MULTIPLIER_REGISTERS, BRINGER_REGISTERS = 232, 32
COMPILER_BYTES = 512
"""Shared memory for what the compiler puts there: arguments of the warpgroups, gaps that align barriers, turns."""


def choose_splits(gpu: Gpu, tiles: int, strips: int) -> int:
    """Parts of each tile: twice as many as long as every processor has an item at most, of four strips at least.

    Measured on an H200 with the layers of V4-Flash, for 128 to 512 tokens: twice as many are slower each time.
    """
    splits = 1
    while strips % (2 * splits) == 0 and 2 * splits * tiles <= gpu.processors and strips // (2 * splits) >= 4:
        splits *= 2
    return splits


def choose_blocks(gpu: Gpu, tiles: int, rows: int) -> int:
    """Blocks of 128 rows of a tile: two where that leaves no processor more work, of `tiles` of one.

    Measured on an H200 with the layers of V4-Flash: 512 tokens of wq_b take 34.4 us instead of 36.6, of wo_a 31.9
    instead of 34.4, and 1024 of wo_b 58 instead of 63; in bfloat16 51, 48 and 87 instead of 52, 52 and 91.
    """
    if rows % (2 * TILE_ROWS):
        return 1
    return 2 if 2 * cdiv(tiles // 2, gpu.processors) <= cdiv(tiles, gpu.processors) else 1


def many_refuses(x: Tensor, weight: Tensor, weight_scale: Tensor | None, quantize: bool, out: Tensor) -> str:
    """Why this kernel cannot take a call that the portable one can, "" if it can."""
    if out.stride(0) * out.element_size() % COPY_ALIGN or out.data_ptr() % COPY_ALIGN:
        return f"it gives rows that start at multiples of {COPY_ALIGN} bytes"
    return tiles_refused(x, weight, weight_scale, quantize)


def tiles_refused(x: Tensor, weight: Tensor, weight_scale: Tensor | None, quantize: bool) -> str:
    """Why operands cannot be multiplied in tiles of 128 tokens and rows, or ""."""
    if quantize:
        return "it takes what is quantised"
    if weight.shape[0] // x.shape[1] % TILE_ROWS:
        return f"it takes weights of a multiple of {TILE_ROWS} rows"
    if weight_scale is not None and words_of_scales(weight_scale) is None:
        return "it takes scales of the weight that are float32, or bytes in words of four"
    return operands_refused(x, weight, quantize)


def words_of_scales(scale: Tensor) -> Tensor | None:
    """Scales as 32-bit words, UE8M0 bytes four at a time; None where they do not lie like that."""
    if scale.dtype is torch.float32:
        return scale
    word = layout.SCALES_PER_WORD
    if scale.stride(1) != 1 or scale.shape[1] % word or scale.stride(0) % word or scale.data_ptr() % word:
        return None
    return scale.view(torch.int32)


def deepest_ring(out_size: int, blocks: int) -> int:
    """Buffers that there is room for, of tiles of so many blocks of rows, beside tiles of outputs of so many bytes."""
    room = PROCESSOR_BYTES - RESERVED_BYTES - COMPILER_BYTES - TILE_TOKENS * TILE_ROWS * out_size
    return room // ((blocks * TILE_ROWS + TILE_TOKENS) * STRIP_BYTES + 4 * TILE_TOKENS + 4 * blocks + 2 * 8)


def launch_many(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    out: Tensor,
    quantize: bool,
    gpu: Gpu,
) -> None:
    """Fill `out`, as the portable launcher does."""
    tokens, groups, size = x.shape
    block_k = STRIP_BYTES // weight.element_size()
    rows, strips = weight.shape[0] // groups, cdiv(size, block_k)
    inputs = rows_of(x, block_k)
    assert inputs is not None and not quantize
    tiles = cdiv(tokens, TILE_TOKENS) * groups * (rows // TILE_ROWS)
    blocks = choose_blocks(gpu, tiles, rows)
    tiles //= blocks
    splits = choose_splits(gpu, tiles, strips)
    part = arrived = None
    if splits > 1:
        shape = (splits, tiles, TILE_TOKENS * TILE_ROWS)
        part = torch.empty(shape, dtype=torch.float32, device=x.device)
        arrived = arrival_counters(2 * tiles, x.device)
    if weight_scale is not None:
        weight_scale = words_of_scales(weight_scale)
    launch_kernel(
        grouped_matmul_many_hopper_kernel,
        (min(tiles * splits, gpu.processors),),
        TensorDescriptor.from_tensor(weight, [TILE_ROWS, block_k], swizzled(weight)),
        TensorDescriptor.from_tensor(inputs.matrix, [HALF_TOKENS, block_k], swizzled(x)),
        TensorDescriptor.from_tensor(out, [HALF_TOKENS, TILE_ROWS], swizzled(out)),
        part,
        arrived,
        x_scale,
        weight_scale,
        inputs.row,
        inputs.column,
        *((0, 0, 0) if x_scale is None else x_scale.stride()),
        *((0, 0) if weight_scale is None else weight_scale.stride()),
        tokens,
        rows,
        tiles,
        tiles * splits,
        SPLITS=splits,
        BLOCK_K=block_k,
        EACH=strips // splits,
        RING=deepest_ring(out.element_size(), blocks),
        BLOCKS=blocks,
        TILE=swizzled(weight),
        OUT_TILE=swizzled(out),
        MULTIPLIER_REGISTERS=MULTIPLIER_REGISTERS,
        BRINGER_REGISTERS=BRINGER_REGISTERS,
        num_warps=4,
        launch_pdl=True,
    )
