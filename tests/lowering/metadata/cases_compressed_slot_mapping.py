"""Cases of `compressed_slot_mapping`; see generated.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_compile.testing import hostile_indices
from tests.lowering.generated import Case

BLOCK, COLUMNS = 2, 5


class Inputs(NamedTuple):
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    out: Tensor

    @classmethod
    def make(cls, tokens: int, requests: int = 3) -> Inputs:
        """Queries of unequal length, tokens outside of all, a request that is padding, blocks that do not exist."""
        generator = torch.Generator().manual_seed(tokens)
        cuts = torch.randint(0, tokens + 1, (requests + 1,), generator=generator).sort().values.int()
        lens = cuts.diff() + torch.randint(0, 30, (requests,), generator=generator).int()
        lens[1:2] = 0
        return cls(
            torch.arange(tokens) - (torch.arange(tokens) % 4 == 3).long() * 1000,
            cuts,
            lens,
            hostile_indices((requests, COLUMNS), 100, fraction=0.2, generator=generator),
            torch.full((tokens + 3,), 12345),
        )


def slots(x: Inputs) -> tuple[()]:
    torch.ops.dsv4.compressed_slot_mapping(
        x.slot_mapping, x.query_start_loc, x.seq_lens, x.block_table, BLOCK, 4, x.out
    )
    return ()


def fused(x: Inputs) -> Tensor:
    """int64 inputs with a producer in front, a consumer behind; one request in three completes every token."""
    torch.ops.dsv4.compressed_slot_mapping(
        x.slot_mapping * 2, x.query_start_loc.long(), x.seq_lens.long(), x.block_table.long(), BLOCK, 1, x.out
    )
    return x.out + 1


REQUESTS = ("query_start_loc", "seq_lens", "block_table")
CASES = {
    "slots": Case(slots, Inputs.make, (15, 9, 23), ("slot_mapping", "out"), for_targets=True),
    "any_batch": Case(slots, lambda t: Inputs.make(t, t // 2), (16, 9, 22), ("slot_mapping", "out", *REQUESTS)),
    "many_requests": Case(slots, lambda t: Inputs.make(t, 200), (40,)),
    "fused": Case(fused, Inputs.make, (15, 9), ("slot_mapping", "out")),
    "no_request": Case(slots, lambda t: Inputs.make(t, 0), (5,)),
    "one_token": Case(slots, Inputs.make, (1,)),
    "no_token": Case(slots, Inputs.make, (0,)),
}
