"""`fused_q_kv_rmsnorm` in one launch: a program for each row of qr, then one for each row of kv."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..device.norm import Norm, norm_rows, store_normed
from ..device.strided import Strided
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments, pdl_prologue

MAX_SIZE = 16384
"""Longest row, because it stays in the registers of one program."""
WARP_ELEMENTS = 512
"""Elements of a row per warp: two loads of 16 bytes in each thread."""


class Tensors(NamedTuple):
    """Tensors of a launch: contiguous results, rows `[T, size]` of any strides, and weights `[size]`."""

    p_q_out: Any
    p_kv_out: Any
    p_qr: Any
    p_kv: Any
    p_q_weight: Any
    p_kv_weight: Any


class Strides(NamedTuple):
    """Strides of rows and weights."""

    qr: tuple[int, ...]
    kv: tuple[int, ...]
    q_weight: int
    kv_weight: int


class Shape(NamedTuple):
    """Compile-time lengths of both rows, and the powers of two that hold them."""

    q_size: int
    kv_size: int
    q_block: int
    kv_block: int


@triton.jit(do_not_specialize=["tokens"])
def fused_q_kv_rmsnorm_kernel(tensors, strides, eps, tokens, SHAPE: tl.constexpr, PDL: tl.constexpr):
    """Norm row p of qr in program p < T, and row p of kv in program T + p."""
    pdl_prologue(PDL)
    p_q_out, p_kv_out, p_qr, p_kv, p_q_weight, p_kv_weight = tensors
    program = tl.program_id(0).to(tl.int64)
    row = (program % tokens) + tl.arange(0, 1)
    if program < tokens:
        q = norm_rows(
            row, row >= 0, Strided(p_qr, strides.qr), Norm(p_q_weight, strides.q_weight, eps),
            p_q_out.dtype.element_ty, SHAPE.q_size, SHAPE.q_block,
        )  # fmt: skip
        store_normed(q, row, row >= 0, p_q_out, SHAPE.q_size)
    else:
        kv = norm_rows(
            row, row >= 0, Strided(p_kv, strides.kv), Norm(p_kv_weight, strides.kv_weight, eps),
            p_kv_out.dtype.element_ty, SHAPE.kv_size, SHAPE.kv_block,
        )  # fmt: skip
        store_normed(kv, row, row >= 0, p_kv_out, SHAPE.kv_size)


def fused_q_kv_rmsnorm(
    qr: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the reference's results, up to the order of the sums: values may be neighbours."""
    q_out, kv_out = qr.new_empty(qr.shape), kv.new_empty(kv.shape)
    tokens, q_size = qr.shape
    kv_size = kv.shape[1]
    if tokens == 0:
        return q_out, kv_out
    launch_kernel(
        fused_q_kv_rmsnorm_kernel,
        (2 * tokens,),
        Tensors(q_out, kv_out, qr, kv, q_weight, kv_weight),
        Strides(qr.stride(), kv.stride(), q_weight.stride(0), kv_weight.stride(0)),
        eps,
        tokens,
        SHAPE=Shape(q_size, kv_size, triton.next_power_of_2(q_size), triton.next_power_of_2(kv_size)),
        num_warps=_warps(max(q_size, kv_size)),
        **pdl_arguments(qr.device, 2 * tokens),
    )
    return q_out, kv_out


def _warps(size: int) -> int:
    """Return the warps of a program by the longer of the two rows."""
    return max(1, min(8, triton.next_power_of_2(size) // WARP_ELEMENTS))


def why_unsupported_fused_q_kv_rmsnorm(qr: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor, eps: float) -> str:
    """Return why the kernel does not support a call, "" if it does."""
    sizes = (qr.shape[1], kv.shape[1])
    if any(isinstance(size, int) and not 0 < size <= MAX_SIZE for size in sizes):
        return f"rows have {sizes[0]} and {sizes[1]} elements, supported are 1 to {MAX_SIZE}"
    return ""
