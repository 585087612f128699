"""Cases of `indexer_q_rope_quant`; see generated.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_compile.layout import INDEXER_HEAD_DIM, ROPE_DIM
from dsv4_compile.testing import strided
from tests.lowering.generated import Case

HEADS = 3
Outputs = tuple[Tensor, Tensor, Tensor]


class Inputs(NamedTuple):
    q: Tensor
    positions: Tensor
    table: Tensor
    weights: Tensor

    @classmethod
    def make(
        cls, tokens: int, dim: int = INDEXER_HEAD_DIM, rope: int = ROPE_DIM, dtype: torch.dtype = torch.bfloat16
    ) -> Inputs:
        """Random inputs, positions out of range among them."""
        torch.manual_seed(tokens)
        positions = torch.randint(0, 40, (tokens + 1,))
        positions[1::3], positions[2::5] = -7, 10**6
        q, weights = 3 * torch.randn(tokens, HEADS, dim).to(dtype), torch.randn(tokens, HEADS).to(dtype)
        return cls(q, positions, torch.randn(40, rope), weights)


def to(fmt: str) -> Callable[[Inputs], Outputs]:
    """The op alone."""
    return lambda x: torch.ops.dsv4.indexer_q_rope_quant(x.q, x.positions, x.table, x.weights, fmt)


def rounding(fmt: str) -> Callable[[Inputs], Outputs]:
    """The op alone, with float32 weights that it rounds."""
    return lambda x: torch.ops.dsv4.indexer_q_rope_quant(
        x.q, x.positions, x.table, x.weights.float() * 1.01, fmt, False, True
    )


def fused(fmt: str) -> Callable[[Inputs], Outputs]:
    """A producer in front of both inputs, a consumer behind the weights."""

    def run(x: Inputs) -> Outputs:
        args = (x.q * 1.3, x.positions.int(), x.table, x.weights * 0.7)
        values, scale, weights = torch.ops.dsv4.indexer_q_rope_quant(*args, fmt)
        return values.float() * 1.1 if fmt == "plain" else values, scale, weights * 4

    return run


def transformed(fmt: str) -> Callable[[Inputs], Outputs]:
    """With the Hadamard transform."""
    return lambda x: torch.ops.dsv4.indexer_q_rope_quant(x.q * 1.3, x.positions, x.table, x.weights, fmt, True)


def apart(x: Inputs) -> Inputs:
    return x._replace(q=strided(x.q), weights=strided(x.weights))


def hostile(x: Inputs) -> Inputs:
    """Rows of zeros, of the smallest and largest values, and with infinities."""
    x.q[0] = 0
    x.q[1] *= 1e-30
    x.q[2] *= 1e30
    x.q[3, :, 7::50] = torch.inf
    return x


TOKENS = ("q", "positions", "weights")
CASES = {
    "fp8": Case(fused("indexer_fp8"), Inputs.make, (5, 9, 2), TOKENS, for_targets=True),
    "fp8_strided": Case(to("indexer_fp8"), lambda t: apart(Inputs.make(t)), (4,)),
    "fp8_float32": Case(to("indexer_fp8"), lambda t: Inputs.make(t, dtype=torch.float32), (4,)),
    "fp8_hostile": Case(to("indexer_fp8"), lambda t: hostile(Inputs.make(t)), (5,)),
    "fp8_one_token": Case(to("indexer_fp8"), Inputs.make, (1,)),
    "fp8_no_token": Case(to("indexer_fp8"), Inputs.make, (0,)),
    "fp8_rounded": Case(rounding("indexer_fp8"), Inputs.make, (4,)),
    "fp8_hadamard": Case(transformed("indexer_fp8"), Inputs.make, (4,)),
    "mxfp4_hadamard": Case(transformed("indexer_mxfp4"), Inputs.make, (3, 2), TOKENS),
    "mxfp4": Case(fused("indexer_mxfp4"), Inputs.make, (5, 9, 2), TOKENS, for_targets=True),
    "mxfp4_strided": Case(to("indexer_mxfp4"), lambda t: apart(Inputs.make(t)), (4,)),
    "mxfp4_hostile": Case(to("indexer_mxfp4"), lambda t: hostile(Inputs.make(t)), (5,)),
    "mxfp4_one_token": Case(to("indexer_mxfp4"), Inputs.make, (1,)),
    "plain": Case(fused("plain"), lambda t: Inputs.make(t, 32, 16), (5, 9, 2), TOKENS),
    "plain_rounded": Case(rounding("plain"), lambda t: Inputs.make(t, 32, 16), (4,)),
    "plain_float32": Case(to("plain"), lambda t: Inputs.make(t, 32, 16, torch.float32), (4,)),
    "plain_no_token": Case(to("plain"), lambda t: Inputs.make(t, 32, 16), (0,)),
}
