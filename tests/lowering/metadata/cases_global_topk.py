"""Cases of `global_topk`; see generated.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_compile.testing import hostile_indices, strided
from tests.lowering.generated import Case

BLOCK, REQUESTS, COLUMNS, WIDTH = 8, 3, 4, 32


class Inputs(NamedTuple):
    topk: Tensor
    token_to_req: Tensor
    block_table: Tensor
    is_valid: Tensor

    @classmethod
    def make(cls, tokens: int, requests: int = REQUESTS, columns: int = COLUMNS) -> Inputs:
        """Hostile indices of every kind, more rows per token than tokens."""
        generator = torch.Generator().manual_seed(tokens)
        return cls(
            hostile_indices((tokens, WIDTH), BLOCK * columns, generator=generator),
            hostile_indices((tokens + 2,), requests, fraction=0.2, generator=generator),
            hostile_indices((requests, columns), 2**26, fraction=0.2, generator=generator),
            torch.rand(tokens + 1, generator=generator) < 0.8,
        )


def slots(x: Inputs) -> tuple[Tensor, Tensor]:
    return torch.ops.dsv4.global_topk(x.topk, x.token_to_req, x.block_table, x.is_valid, BLOCK)


def fused(x: Inputs) -> tuple[Tensor, Tensor]:
    """int64 inputs with a middle dim, a producer in front and consumers behind."""
    topk = (x.topk.long() - 1)[:, None]
    slots, lens = torch.ops.dsv4.global_topk(topk, x.token_to_req.long(), x.block_table.long(), x.is_valid, BLOCK)
    return slots.float() * 2, lens + 1


def apart(x: Inputs) -> Inputs:
    return Inputs(strided(x.topk), strided(x.token_to_req), strided(x.block_table), strided(x.is_valid))


def wide(x: Inputs) -> Inputs:
    """Return rows that are longer than one block reduces."""
    return x._replace(topk=torch.cat([x.topk] * 48, 1))


TOKENS = ("topk", "token_to_req", "is_valid")
CASES = {
    "slots": Case(slots, Inputs.make, (5, 9, 2), TOKENS, for_targets=True),
    "fused": Case(fused, Inputs.make, (5, 3), TOKENS),
    "long_rows": Case(slots, lambda t: wide(Inputs.make(t)), (3, 2), TOKENS),
    "strided": Case(slots, lambda t: apart(Inputs.make(t)), (5,)),
    "no_request": Case(slots, lambda t: Inputs.make(t, requests=0), (3,)),
    "no_block": Case(slots, lambda t: Inputs.make(t, columns=0), (3,)),
    "one_token": Case(slots, Inputs.make, (1,)),
    "no_token": Case(slots, Inputs.make, (0,)),
}
