"""Cases of `fp8_linear`; see generated.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_compile.testing import strided
from tests.lowering.generated import Case

OPS = torch.ops.dsv4
WIDTH, ROWS, KV = 256, 128, 64


class Inputs(NamedTuple):
    """`projection` holds qr and kv side by side."""

    projection: Tensor
    q_weight: Tensor
    kv_weight: Tensor
    weight: Tensor
    scale: Tensor

    @classmethod
    def make(cls, tokens: int) -> Inputs:
        torch.manual_seed(tokens)
        return cls(
            torch.randn(tokens, WIDTH + KV).bfloat16(),
            torch.randn(WIDTH),
            torch.randn(KV),
            torch.randn(ROWS, WIDTH).to(torch.float8_e4m3fn),
            torch.randint(117, 121, (1, WIDTH // 128), dtype=torch.uint8),
        )


def linear(x: Inputs) -> Tensor:
    """Columns of a tensor in memory."""
    return OPS.fp8_linear(x.projection[:, :WIDTH], x.weight, x.scale)


def produced(x: Inputs) -> Tensor:
    return OPS.fp8_linear(x.projection[:, :WIDTH] * 1.3, x.weight, x.scale) * 2


def normed(x: Inputs) -> tuple[Tensor, Tensor]:
    """The norm in front, as in a layer: qr is read by its projection alone."""
    qr, kv = x.projection.split((WIDTH, KV), 1)
    qr, kv = OPS.fused_q_kv_rmsnorm(qr, kv, x.q_weight, x.kv_weight, 1e-6)
    return OPS.fp8_linear(qr, x.weight, x.scale), kv


def apart(x: Inputs) -> Inputs:
    return x._replace(projection=strided(x.projection), weight=strided(x.weight))


def hostile(x: Inputs) -> Inputs:
    """Rows of zeros and of the smallest and largest values, and infinities."""
    x.projection[0] = 0
    x.projection[1] *= 1e-30
    x.projection[2] *= 1e30
    x.projection[3, 7::100] = torch.inf
    return x


CASES = {
    "linear": Case(linear, Inputs.make, (5, 9, 2), ("projection",)),
    "produced": Case(produced, Inputs.make, (5, 3), ("projection",)),
    "normed": Case(normed, Inputs.make, (5, 3), ("projection",)),
    "strided": Case(linear, lambda t: apart(Inputs.make(t)), (4,)),
    "hostile": Case(linear, lambda t: hostile(Inputs.make(t)), (5,)),
    "one_token": Case(linear, Inputs.make, (1,)),
    "no_token": Case(linear, Inputs.make, (0,)),
}
