"""Cases of `save_partial_states`; see generated.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_compile.layout import overlap_factor, state_block_size, state_width
from dsv4_compile.testing import padded, strided
from tests.lowering.generated import Case

PAGES, DIM = 6, 16


class Inputs(NamedTuple):
    kv_score: Tensor
    ape: Tensor
    cache: Tensor
    slots: Tensor
    positions: Tensor

    @classmethod
    def make(cls, tokens: int, ratio: int = 4) -> Inputs:
        """Random inputs; slots out of range and positions that are padding among them, the rows of both NaN."""
        torch.manual_seed(tokens)
        block, width = state_block_size(ratio), state_width(ratio, DIM)
        cache = padded(torch.randn(PAGES, block, width))
        slots = torch.randperm(PAGES * block)[:tokens]
        slots[1::4], slots[2::4], slots[3::8] = -1, PAGES * block, -(2**40)
        kv_score = torch.randn(tokens + 1, width)
        kv_score[: len(slots)][(slots < 0) | (slots >= PAGES * block)] = torch.nan
        kv_score[-1] = torch.nan
        positions = torch.randint(0, 300, (tokens + 2,))
        positions[0::5], positions[1::4] = -3, -1
        ape = torch.randn(ratio, overlap_factor(ratio) * DIM)
        kv_score[:1, 0], kv_score[:1, -1], ape[0, -1] = -0.0, -0.0, -0.0
        return cls(kv_score, ape, cache, slots, positions)


def save(x: Inputs) -> tuple[()]:
    torch.ops.dsv4.save_partial_states(x.kv_score, x.ape, x.cache, x.slots, x.positions, x.cache.shape[1])
    return ()


def produced(x: Inputs) -> tuple[Tensor, Tensor]:
    """A producer in front, a reader before the write and one after it."""
    before = x.cache * 2
    torch.ops.dsv4.save_partial_states(x.kv_score * 2, x.ape, x.cache, x.slots, x.positions.int(), x.cache.shape[1])
    return before, x.cache * 2


def columns(x: Inputs) -> Inputs:
    """The projection is columns of a wider one, the bias is bfloat16 and strided."""
    return x._replace(kv_score=strided(x.kv_score), ape=strided(x.ape.bfloat16()))


def all_padding(x: Inputs) -> Inputs:
    x.slots.fill_(-1)
    return x


TOKENS = ("kv_score", "slots", "positions")
CASES = {
    "ratio_4": Case(save, Inputs.make, (5, 9, 2), TOKENS, for_targets=True),
    "ratio_128": Case(save, lambda t: Inputs.make(t, 128), (5, 3), TOKENS, for_targets=True),
    "produced": Case(produced, Inputs.make, (5, 7), TOKENS),
    "columns": Case(save, lambda t: columns(Inputs.make(t)), (5,)),
    "all_padding": Case(save, lambda t: all_padding(Inputs.make(t)), (5,)),
    "one_token": Case(save, Inputs.make, (1,)),
    "no_token": Case(save, Inputs.make, (0,)),
}
