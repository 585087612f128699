"""Cases of `inv_rope` and `inv_rope_fp8_quant`; see generated.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_compile.layout import HEAD_DIM, ROPE_DIM
from dsv4_compile.testing import padded, strided
from tests.lowering.generated import Case

OPS = torch.ops.dsv4


class Inputs(NamedTuple):
    """Two groups of two heads, and a padding head. Torch compiles T divisible by 4 separately: there Ta is T."""

    o: Tensor
    positions: Tensor
    table: Tensor

    @classmethod
    def make(
        cls, tokens: int, dim: int = HEAD_DIM, rope: int = ROPE_DIM, dtype: torch.dtype = torch.bfloat16
    ) -> Inputs:
        """Return random inputs, some positions out of range; the padding head is NaN."""
        torch.manual_seed(tokens)
        o = torch.randn(tokens, 5, dim).to(dtype)
        o[:, 4:] = torch.nan
        positions = torch.randint(0, 40, (tokens + 2,))
        positions[1::3], positions[2::5] = -7, 10**6
        return cls(o, positions, torch.randn(40, rope))


def rotate(x: Inputs) -> Tensor:
    return OPS.inv_rope(x.o[:, :4] * 1.3, x.positions.int(), x.table) * 0.7


def rotate_alone(x: Inputs) -> Tensor:
    return OPS.inv_rope(x.o[:, :4], x.positions, x.table)


def quantize(x: Inputs) -> tuple[Tensor, Tensor]:
    return OPS.inv_rope_fp8_quant(x.o, x.positions, x.table, 2, 2)


def produced(x: Inputs) -> tuple[Tensor, Tensor]:
    """Compile with a producer before and a consumer after."""
    values, scale = OPS.inv_rope_fp8_quant(x.o * 0.7, x.positions, x.table, 2, 2)
    return values.float() * 2, scale


def quantize_packed(x: Inputs) -> tuple[Tensor, Tensor]:
    return OPS.inv_rope_fp8_quant(x.o, x.positions, x.table, 2, 2, True)


def three_tiles(x: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise one group of three tiles, which do not fill a word; heads are longer than a tile."""
    return (*OPS.inv_rope_fp8_quant(x.o, x.positions, x.table, 1, 2, True), *OPS.inv_rope_fp8_quant(*x, 1, 2))


def transposed(x: Inputs) -> Inputs:
    return x._replace(o=x.o.transpose(0, 1).contiguous().transpose(0, 1))


def apart(x: Inputs) -> Inputs:
    """Return inputs with other columns between those of `o`."""
    return x._replace(o=strided(x.o))


def between(x: Inputs) -> Inputs:
    """Return inputs with padding between the rows of `o`."""
    return x._replace(o=padded(x.o))


def hostile(x: Inputs) -> Inputs:
    """Return inputs with rows of zeros, of the smallest and largest values, and infinities."""
    x.o[0, :4] = 0
    x.o[1, :4] *= 1e-30
    x.o[2, :4] *= 1e30
    x.o[3, :4, 7::100] = torch.inf
    return x


CASES = {
    "rotate": Case(rotate, Inputs.make, (5, 9, 2), ("o", "positions"), for_targets=True),
    "rotate_float32_strided": Case(rotate_alone, lambda t: apart(Inputs.make(t, 24, 8, torch.float32)), (4,)),
    "quantize": Case(quantize, Inputs.make, (5, 6, 3), ("o", "positions"), for_targets=True),
    "no_padding": Case(quantize, Inputs.make, (8, 4), ("o", "positions")),
    "heads_outermost": Case(quantize, lambda t: transposed(Inputs.make(t)), (3,)),
    "produced": Case(produced, Inputs.make, (5, 2), ("o", "positions")),
    "packed": Case(quantize_packed, Inputs.make, (5, 2), ("o", "positions"), for_targets=True),
    "three_tiles": Case(three_tiles, lambda t: Inputs.make(t, 192, 64), (3,)),
    "whole_heads_rotated": Case(quantize, lambda t: Inputs.make(t, 64, 64, torch.float32), (3,)),
    "one_token": Case(quantize, Inputs.make, (1,)),
    "no_token": Case(quantize, Inputs.make, (0,)),
    "hostile_padded": Case(quantize, lambda t: between(hostile(Inputs.make(t))), (5,)),
}
