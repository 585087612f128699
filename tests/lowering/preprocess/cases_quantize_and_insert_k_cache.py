"""Cases of `quantize_and_insert_k_cache`; see generated.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_compile.layout import HEAD_DIM, allocate_cache
from dsv4_compile.testing import strided
from tests.lowering.generated import Case, storage

BLOCK, PAGES = 4, 6
CAPACITY = BLOCK * PAGES


class Inputs(NamedTuple):
    k: Tensor
    cache: Tensor
    slots: Tensor

    @classmethod
    def make(cls, tokens: int, dtype: torch.dtype = torch.bfloat16) -> Inputs:
        """Return random inputs with one row too many; rows of slots out of range are NaN."""
        torch.manual_seed(tokens)
        cache = allocate_cache("fp8_ds_mla", PAGES, BLOCK)
        storage(cache).random_(0, 255)
        slots = torch.randperm(CAPACITY)[:tokens]
        slots[1::4], slots[2::4], slots[3::8] = -1, CAPACITY, -(2**40)
        k = (3 * torch.randn(tokens + 1, HEAD_DIM)).to(dtype)
        k[:tokens][(slots < 0) | (slots >= CAPACITY)] = torch.nan
        k[-1] = torch.nan
        return cls(k, cache, slots)


def insert(x: Inputs) -> tuple[()]:
    torch.ops.dsv4.quantize_and_insert_k_cache(x.k, x.cache, x.slots, BLOCK)
    return ()


def produced(x: Inputs) -> tuple[()]:
    torch.ops.dsv4.quantize_and_insert_k_cache(x.k * 1.3, x.cache, x.slots.int(), BLOCK)
    return ()


def hostile(x: Inputs) -> Inputs:
    """Rows of zeros, of the smallest and the largest values, and with infinities."""
    x.k[0] = 0
    x.k[1] = 1e-30 * torch.randn(HEAD_DIM)
    x.k[2] = 1e37 * torch.randn(HEAD_DIM)
    x.k[3] = 1
    x.k[3, 7::100] = torch.inf
    return x._replace(slots=torch.arange(x.slots.shape[0]))


CASES = {
    "insert": Case(insert, Inputs.make, (5, 9, 2), ("k", "slots"), for_targets=True),
    "produced": Case(produced, Inputs.make, (5, 3), ("k", "slots")),
    "float32_strided": Case(
        insert, lambda t: Inputs.make(t, torch.float32)._replace(k=strided(Inputs.make(t, torch.float32).k)), (5,)
    ),
    "hostile": Case(insert, lambda t: hostile(Inputs.make(t)), (4,)),
    "one_token": Case(insert, Inputs.make, (1,)),
    "no_token": Case(insert, Inputs.make, (0,)),
}
