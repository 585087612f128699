"""`torch.ops.dsv4.mhc_head`."""

from __future__ import annotations

from torch import Tensor

from ...cpu.hyper_connections import mhc_head as on_cpu
from ...errors import check
from ...reference.hyper_connections import mhc_head as reference
from ...reference.hyper_connections.mhc_head import MhcHead
from ...selection.costs import FLOAT32, CallSizes, CostModel
from ..common.define import Traced, define
from ..common.invariance import AS_IT_IS, PINNED, Invariance
from .mhc_post import check_post
from .mhc_pre import FEW_LAUNCHES, check_mix


def _check(a: MhcHead) -> None:
    count = a.streams.shape[1] if a.streams.dim() > 1 else 0
    check_mix("mhc_head", a.streams, a.fn, a.base, a.scale, a.norm_weight, count, 1)
    present = [name for name in ("output", "post", "comb") if getattr(a, name) is not None]
    check(
        len(present) in (0, 3),
        "E201",
        got=f"mhc_head: {' and '.join(present)} alone",
        rule="output, post and comb are given together",
    )
    if a.output is not None and a.post is not None and a.comb is not None:
        check_post(a.streams, a.output, a.post, a.comb, op="mhc_head")


def _fake(a: MhcHead) -> Tensor:
    tokens, _, dim = a.streams.shape
    return a.streams.new_empty((tokens, dim))


mhc_head = define(
    "mhc_head",
    reference=reference.mhc_head,
    fake=_fake,
    check=_check,
    arguments=MhcHead,
    on_cpu=on_cpu.mhc_head,
    kernel="dsv4_compile.kernels.hyper_connections.mhc_head",
    lowering=Traced(static=("streams",), yields=FEW_LAUNCHES),
    cost=CostModel(
        lambda T, D, G, e=2: (T * e * (G + 1) * D + FLOAT32 * (G * G * D + G + 1 + D), 2 * T * G * G * D),
        sizes=CallSizes.of_streams,
    ),
    invariant=Invariance(rows=("streams", "output", "post", "comb"), on_cpu=AS_IT_IS, kernel=PINNED),
)
