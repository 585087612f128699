"""`fused_q_kv_rmsnorm` in one launch: a program for each row of qr, then one for each row of kv."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..device.norm import norm_rows, store_normed
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments, pdl_prologue

MAX_SIZE = 16384
"""Longest row: it stays in the registers of one program."""
WARP_ELEMENTS = 512
"""Elements of a row for each warp: two loads of 16 bytes for a thread."""


@triton.jit(do_not_specialize=["tokens"])
def fused_q_kv_rmsnorm_kernel(
    p_q_out,  # [T, Q_SIZE] contiguous
    p_kv_out,  # [T, KV_SIZE] contiguous
    p_qr,  # [T, Q_SIZE]
    p_kv,  # [T, KV_SIZE]
    p_q_weight,  # [Q_SIZE]
    p_kv_weight,  # [KV_SIZE]
    qr_strides,
    kv_strides,
    q_weight_stride,
    kv_weight_stride,
    eps,
    tokens,
    Q_SIZE: tl.constexpr,
    KV_SIZE: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p < T takes row p of qr, program T + p row p of kv."""
    pdl_prologue(PDL)
    program = tl.program_id(0).to(tl.int64)
    row = (program % tokens) + tl.arange(0, 1)
    if program < tokens:
        q = norm_rows(
            row, row >= 0, p_qr, p_q_weight, qr_strides, q_weight_stride, eps, p_q_out.dtype.element_ty, Q_SIZE, Q_BLOCK
        )
        store_normed(q, row, row >= 0, p_q_out, Q_SIZE)
    else:
        kv = norm_rows(
            row, row >= 0, p_kv, p_kv_weight, kv_strides, kv_weight_stride, eps, p_kv_out.dtype.element_ty, KV_SIZE,
            KV_BLOCK,
        )  # fmt: skip
        store_normed(kv, row, row >= 0, p_kv_out, KV_SIZE)


def fused_q_kv_rmsnorm(
    qr: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See the reference. The sums are in another order: results may be the neighbouring value."""
    q_out, kv_out = qr.new_empty(qr.shape), kv.new_empty(kv.shape)
    tokens, q_size = qr.shape
    kv_size = kv.shape[1]
    if tokens == 0:
        return q_out, kv_out
    launch_kernel(
        fused_q_kv_rmsnorm_kernel,
        (2 * tokens,),
        q_out,
        kv_out,
        qr,
        kv,
        q_weight,
        kv_weight,
        qr.stride(),
        kv.stride(),
        q_weight.stride(0),
        kv_weight.stride(0),
        eps,
        tokens,
        Q_SIZE=q_size,
        KV_SIZE=kv_size,
        Q_BLOCK=triton.next_power_of_2(q_size),
        KV_BLOCK=triton.next_power_of_2(kv_size),
        num_warps=_warps(max(q_size, kv_size)),
        **pdl_arguments(qr.device, 2 * tokens),
    )
    return q_out, kv_out


def _warps(size: int) -> int:
    """Warps of a program by the longer of the two rows."""
    return max(1, min(8, triton.next_power_of_2(size) // WARP_ELEMENTS))


def fused_q_kv_rmsnorm_refuses(qr: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor, eps: float) -> str:
    """Why a call cannot use the kernel, or ""."""
    sizes = (qr.shape[1], kv.shape[1])
    if any(isinstance(size, int) and not 0 < size <= MAX_SIZE for size in sizes):
        return f"rows of {sizes[0]} and {sizes[1]} elements, it takes 1 to {MAX_SIZE}"
    return ""
