"""Cases of `fused_q_kv_rmsnorm`; see generated.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_compile.layout import HEAD_DIM
from tests.lowering.generated import Case

EPS = 1e-6


class Inputs(NamedTuple):
    """`projection` holds both halves side by side."""

    projection: Tensor
    q_weight: Tensor
    kv_weight: Tensor

    @classmethod
    def make(cls, tokens: int, latent: int = 1536, dim: int = HEAD_DIM, dtype: torch.dtype = torch.bfloat16) -> Inputs:
        torch.manual_seed(tokens)
        return cls(
            torch.randn(tokens, latent + dim).to(dtype),
            torch.randn(latent).to(dtype),
            torch.randn(dim),
        )


def norms(x: Inputs) -> tuple[Tensor, Tensor]:
    """Halves of one projection, rounded in the same kernel before and scaled after."""
    qr, kv = (x.projection * 1.3).split((x.q_weight.shape[0], x.kv_weight.shape[0]), 1)
    qr, kv = torch.ops.dsv4.fused_q_kv_rmsnorm(qr, kv, x.q_weight, x.kv_weight, EPS)
    return qr * 1.1, (kv.float() * 0.7).bfloat16()


def cast(x: Inputs) -> tuple[Tensor, ...]:
    """Halves of a float32 product, rounded on their way in; what is rounded is a result too."""
    halves = (x.projection.float() * 1.3).split((x.q_weight.shape[0], x.kv_weight.shape[0]), 1)
    qr, kv = (half.to(x.projection.dtype) for half in halves)
    return (*torch.ops.dsv4.fused_q_kv_rmsnorm(qr, kv, x.q_weight, x.kv_weight, EPS), qr, kv)


def sliced(x: Inputs) -> tuple[Tensor, Tensor]:
    """Columns of a tensor in memory."""
    qr, kv = x.projection.split((x.q_weight.shape[0], x.kv_weight.shape[0]), 1)
    return torch.ops.dsv4.fused_q_kv_rmsnorm(qr, kv, x.q_weight, x.kv_weight, EPS)


def hostile(x: Inputs) -> Inputs:
    """Rows of zeros and of the smallest and largest values, and a NaN that stays in its row."""
    x.projection[0] = 0
    x.projection[1] *= 1e-30
    x.projection[2] *= 1e18
    x.projection[3, 5] = torch.nan
    return x


CASES = {
    "fused": Case(norms, Inputs.make, (5, 9, 2), ("projection",), for_targets=True),
    "cast": Case(cast, Inputs.make, (5,)),
    "cast_float16": Case(cast, lambda t: Inputs.make(t, 48, 24, torch.float16), (5,)),
    "sliced": Case(sliced, Inputs.make, (3, 4), ("projection",)),
    "one_token": Case(sliced, Inputs.make, (1,)),
    "no_token": Case(sliced, Inputs.make, (0,)),
    "float32": Case(sliced, lambda t: Inputs.make(t, 48, 24, torch.float32), (5,)),
    "hostile": Case(sliced, lambda t: hostile(Inputs.make(t)), (5,)),
}
