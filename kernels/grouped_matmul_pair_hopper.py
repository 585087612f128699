"""How two products of one x, with e4m3 weights and with floating ones, are launched as one for few tokens on Hopper."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .. import layout
from ..layout import cdiv
from .arrivals import arrival_counters
from .gpu import Gpu
from .grouped_matmul_hopper import (
    Cut,
    block_of,
    deepest_ring,
    hopper_refuses,
    out_layout,
    power_of_two,
    rows_of,
    swizzled,
    x_layout,
)
from .grouped_matmul_kernel_hopper import STRIP_BYTES, pair_hopper_kernel

BLOCK_N, WARPS, PROGRAMS = 64, 4, 2
"""Rows of a tile, and warps; programs that a processor has room for."""


def strips_of_a_program(gpu: Gpu, strips: int, blocks: int, strips_2: int, blocks_2: int) -> int:
    """The fewest strips of either weight that a program can have if all programs are to run at once.

    Strips of both are as many bytes, so that programs of either kind take as long.
    """
    return next(
        n
        for n in range(1, max(strips, strips_2) + 1)
        if n >= max(strips, strips_2)
        or blocks * cdiv(strips, n) + blocks_2 * cdiv(strips_2, n) <= PROGRAMS * gpu.processors
    )


def pair_refuses(x: Tensor, weight: Tensor, others: Tensor) -> str:
    """Why two launches are needed, "" if one will do."""
    if 0 in (weight.shape[0], others.shape[0]):
        return "it takes two weights that have rows: the copy engine has no matrix without any"
    if others.dtype is not x.dtype or others.element_size() != 2:
        return "it multiplies the other weights with x as it is, in two bytes"
    if weight.shape[0] % layout.WEIGHT_TILE:
        return "it takes whole blocks of the weight"
    return hopper_refuses(x[:, None], weight, True) or hopper_refuses(x[:, None], others, False)


def launch_pair(x: Tensor, weight: Tensor, weight_scale: Tensor, others: Tensor, out: Tensor, gpu: Gpu) -> None:
    """Fill `out` `[T, N + M]` with the products of x, quantised, and `weight` `[N, K]`, and of x and `others`."""
    tokens, size = x.shape
    block_m, block_k, block_k_2 = block_of(tokens), STRIP_BYTES, STRIP_BYTES // others.element_size()
    inputs = rows_of(x[:, None], block_k_2)
    assert inputs is not None
    if weight_scale.dtype is torch.float8_e8m0fnu:
        weight_scale = weight_scale.view(torch.uint8)
    sides = [(weight.shape[0], cdiv(size, block_k)), (others.shape[0], cdiv(size, block_k_2))]
    blocks = [cdiv(tokens, block_m) * cdiv(rows, BLOCK_N) for rows, _ in sides]
    wanted = strips_of_a_program(gpu, sides[0][1], blocks[0], sides[1][1], blocks[1])
    splits = [cdiv(strips, wanted) for _, strips in sides]
    each = [cdiv(strips, n) for (_, strips), n in zip(sides, splits, strict=True)]
    splits = [cdiv(strips, n) for (_, strips), n in zip(sides, each, strict=True)]
    cut = Cut(BLOCK_N, WARPS, PROGRAMS, 1)
    rings = [
        deepest_ring(cut, block_m, k, n, x.element_size(), q)
        for k, n, q in ((block_k, each[0], True), (block_k_2, each[1], False))
    ]
    steps = [
        2 if n % 2 == 0 and strips % n == 0 and ring >= 4 else 1
        for n, (_, strips), ring in zip(each, sides, rings, strict=True)
    ]
    parts = [
        torch.empty((n, m, BLOCK_N * block_m), dtype=torch.float32, device=x.device) if n > 1 else None
        for n, m in zip(splits, blocks, strict=True)
    ]
    counters = arrival_counters(sum(blocks), x.device)
    first = blocks[0] * splits[0]
    pair_hopper_kernel[(first + blocks[1] * splits[1],)](
        TensorDescriptor.from_tensor(weight, [BLOCK_N, block_k], swizzled(weight)),
        TensorDescriptor.from_tensor(others, [BLOCK_N, block_k_2], swizzled(others)),
        TensorDescriptor.from_tensor(inputs.matrix, [block_m, block_k], swizzled(x)),
        TensorDescriptor.from_tensor(inputs.matrix, [block_m, block_k_2], swizzled(x)),
        out,
        parts[0],
        parts[1],
        counters,
        counters[blocks[0] :],
        weight_scale,
        out.stride(0),
        *weight_scale.stride(),
        tokens,
        sides[0][0],
        sides[1][0],
        size,
        each[0],
        each[1],
        first,
        SPLITS=splits[0],
        SPLITS_OF_OTHERS=splits[1],
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_K=block_k,
        BLOCK_K_OF_OTHERS=block_k_2,
        EACH=power_of_two(each[0]),
        EACH_OF_OTHERS=power_of_two(each[1]),
        STEP=steps[0],
        STEP_OF_OTHERS=steps[1],
        X_BYTES=x.element_size(),
        RING=rings[0],
        RING_OF_OTHERS=rings[1],
        TILE=swizzled(weight),
        X_TILE=swizzled(x),
        OUT_TILE=swizzled(out),
        X=x_layout(block_m, block_k, WARPS),
        OUT=out_layout(BLOCK_N, WARPS),
        num_warps=WARPS,
        launch_pdl=True,
    )
