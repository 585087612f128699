"""Schema, check and fake of `fused_q_kv_rmsnorm`."""

from __future__ import annotations

from torch import Tensor

from ...cpu.preprocess import fused_q_kv_rmsnorm as cpu
from ...reference.preprocess import fused_q_kv_rmsnorm as reference
from ...selection.costs import CostModel
from ..common.define import Traced, define
from ..common.invariance import AS_IT_IS, Invariance
from ..common.validate import FLOATS, expect, expect_dim


def check_norms(
    qr: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor, eps: float, op: str = "fused_q_kv_rmsnorm"
) -> None:
    """Raise if the arguments of `fused_q_kv_rmsnorm`, on behalf of `op`, are wrong."""
    expect(qr, f"{op}: qr [T, Lq]", FLOATS)
    expect(kv, f"{op}: kv [T, D]", FLOATS)
    expect(q_weight, f"{op}: q_weight [Lq]", FLOATS)
    expect(kv_weight, f"{op}: kv_weight [D]", FLOATS)
    expect_dim(kv.shape[0], qr.shape[0], f"{op}: qr and kv have the same tokens")
    expect_dim(q_weight.shape[0], qr.shape[1], f"{op}: q_weight covers the last dim of qr")
    expect_dim(kv_weight.shape[0], kv.shape[1], f"{op}: kv_weight covers the last dim of kv")


def _fake(qr: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return qr.new_empty(qr.shape), kv.new_empty(kv.shape)


fused_q_kv_rmsnorm = define(
    "fused_q_kv_rmsnorm",
    reference=reference.fused_q_kv_rmsnorm,
    on_cpu=cpu.fused_q_kv_rmsnorm,
    fake=_fake,
    check=check_norms,
    kernel="dsv4_compile.kernels.preprocess.fused_q_kv_rmsnorm",
    lowering=Traced(static=("qr", "kv")),
    cost=CostModel(
        lambda T, D, Q, e=2: (2 * T * e * (Q + D) + e * (Q + D), 0),
        sizes=lambda call: call.of_rows("kv") | {"Q": call.dims("qr")[-1]},
    ),
    invariant=Invariance(rows=("qr", "kv"), on_cpu=AS_IT_IS, kernel=AS_IT_IS),
)
