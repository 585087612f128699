"""`torch.ops.dsv4.mhc_boundary`."""

from __future__ import annotations

from torch import Tensor

from ...cpu.hyper_connections import mhc_boundary as cpu
from ...reference.hyper_connections import mhc_boundary as reference
from ...reference.hyper_connections.mhc_boundary import MhcBoundary
from ...selection.costs import CallSizes, CostModel
from ..common.define import Traced, define
from ..common.invariance import AS_IT_IS, PINNED, Invariance
from .mhc_post import check_post
from .mhc_pre import FEW_LAUNCHES, check_pre, coefficients, fake_pre, mix


def _check(a: MhcBoundary) -> None:
    check_post(*a[:4], op="mhc_boundary")
    check_pre(a.streams, *a[4:], op="mhc_boundary")


def _fake(a: MhcBoundary) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return a.streams.new_empty(a.streams.shape), *fake_pre(a.streams)


mhc_boundary = define(
    "mhc_boundary",
    reference=reference.mhc_boundary,
    on_cpu=cpu.mhc_boundary,
    fake=_fake,
    check=_check,
    arguments=MhcBoundary,
    kernel="dsv4_compile.kernels.hyper_connections.mhc_boundary",
    lowering=Traced(static=("streams",), yields=FEW_LAUNCHES),
    cost=CostModel(
        lambda T, D, G, e=2: (T * (e * (2 * G + 2) * D + 2 * coefficients(G)) + mix(G, D), 2 * T * (G + 2) * G * G * D),
        sizes=CallSizes.of_streams,
    ),
    invariant=Invariance(rows=("streams", "output", "post", "comb"), on_cpu=AS_IT_IS, kernel=PINNED),
)
