"""Cases of `q_norm_rope`, `kv_rope_insert` and both in one; see generated.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_compile.layout import HEAD_DIM, ROPE_DIM, allocate_cache
from tests.lowering.generated import Case, storage

OPS = torch.ops.dsv4
BLOCK, PAGES, EPS = 4, 6, 1e-6
CAPACITY = BLOCK * PAGES


class Inputs(NamedTuple):
    """Arguments of a case; `cache` is compared byte by byte, its page padding included."""

    q: Tensor
    kv: Tensor
    cache: Tensor
    slots: Tensor
    positions: Tensor
    table: Tensor
    scale: Tensor

    @classmethod
    def make(
        cls, tokens: int, heads: int = 2, dim: int = HEAD_DIM, rope: int = ROPE_DIM, dtype: torch.dtype = torch.bfloat16
    ) -> Inputs:
        """Random inputs, with slots and positions out of range among them."""
        torch.manual_seed(tokens)
        fmt = "fp8_ds_mla" if dim == HEAD_DIM else "plain"
        cache = allocate_cache(fmt, PAGES, BLOCK, dim, dtype=dtype)
        storage(cache).random_(0, 255)
        slots = torch.randperm(CAPACITY)[:tokens]
        slots[1::4], slots[2::4], slots[3::8] = -1, CAPACITY, -(2**40)
        positions = torch.randint(0, 40, (tokens,))
        positions[-1:] = 10**6
        return cls(
            q=torch.randn(tokens, heads, dim).to(dtype),
            kv=(3 * torch.randn(tokens, dim)).to(dtype),
            cache=cache,
            slots=slots,
            positions=positions,
            table=torch.randn(40, rope),
            scale=torch.tensor(0.37),
        )


def both(x: Inputs) -> Tensor:
    out = OPS.q_norm_rope_kv_insert(x.q * 1.3, x.kv, x.cache, x.slots, x.positions, x.table, EPS, BLOCK, "fp8_ds_mla")
    return out * 0.7


def halves(x: Inputs) -> Tensor:
    OPS.kv_rope_insert(x.kv * 1.3, x.cache, x.slots, x.positions, x.table, BLOCK, "fp8_ds_mla")
    return OPS.q_norm_rope(x.q, x.positions.int(), x.table, EPS) * 0.7


def row_cache(x: Inputs) -> Tensor:
    OPS.kv_rope_insert(x.kv, x.cache, x.slots, x.positions, x.table, BLOCK, "plain")
    return OPS.q_norm_rope(x.q, x.positions, x.table, EPS)


def fp8_rows(x: Inputs) -> Tensor:
    OPS.kv_rope_insert(x.kv, x.cache, x.slots, x.positions, x.table, BLOCK, "fp8", x.scale)
    return OPS.q_norm_rope(x.q, x.positions, x.table, EPS, 5, x.scale)


def sliced(x: Inputs) -> Tensor:
    """q and kv are columns of one projection, and fewer slots than tokens are given."""
    q = x.q[:, :-1]
    kv = x.q[:, -1]
    OPS.kv_rope_insert(kv, x.cache, x.slots[:2], x.positions, x.table, BLOCK, "fp8_ds_mla")
    return OPS.q_norm_rope(q, x.positions, x.table, EPS)


def normed(x: Inputs) -> Tensor:
    """Insert after a norm; its result is rounded there as in memory."""
    weight = x.table.flatten()[: x.kv.shape[1]]
    _, kv = OPS.fused_q_kv_rmsnorm(x.kv, x.kv, weight, weight, EPS)
    OPS.kv_rope_insert(kv, x.cache, x.slots, x.positions, x.table, BLOCK, "fp8_ds_mla")
    return OPS.q_norm_rope(x.q, x.positions, x.table, EPS)


def ordered(x: Inputs) -> Tensor:
    """Readers that Inductor cannot see into, before and after a write to the middle one of three caches."""
    before = OPS.dequantize_and_gather_k_cache
    out = torch.zeros(2, 1, BLOCK * PAGES, HEAD_DIM, dtype=torch.bfloat16)
    lens, table = torch.tensor([CAPACITY], dtype=torch.int32), torch.arange(PAGES, dtype=torch.int32)[None]
    before(out[0], x.cache[1], lens, None, table, BLOCK, 0)
    OPS.kv_rope_insert(x.kv, x.cache[1], x.slots, x.positions, x.table, BLOCK, "fp8_ds_mla")
    before(out[1], x.cache[1], lens, None, table, BLOCK, 0)
    return out


def accounting_view(x: Inputs) -> Inputs:
    return x._replace(cache=torch.randint(0, 255, (PAGES, BLOCK, x.cache.shape[1] // BLOCK), dtype=torch.uint8))


def stacked(x: Inputs) -> Inputs:
    """Three caches in one tensor, zeroed so that what their readers return holds no NaN."""
    return x._replace(cache=torch.zeros(3, *x.cache.shape, dtype=torch.uint8))


def fp8_cache(x: Inputs) -> Inputs:
    return x._replace(cache=torch.randint(0, 255, x.cache.shape, dtype=torch.uint8))


def hostile(x: Inputs) -> Inputs:
    """Rows of zeros, of the smallest and the largest values, and with infinities."""
    x.kv[0] = 0
    x.kv[1] *= 1e-30
    x.kv[2] *= 1e37
    x.kv[3, 7::100] = torch.inf
    return x._replace(slots=torch.arange(x.slots.shape[0]))


def all_padding(x: Inputs) -> Inputs:
    x.slots.fill_(-1)
    return x


SMALL = {"dim": 64, "rope": 16}
TOKENS = ("q", "kv", "slots", "positions")
CASES = {
    "both_dynamic": Case(both, Inputs.make, (5, 9, 3), TOKENS, for_targets=True),
    "both_one_token": Case(both, Inputs.make, (1,)),
    "both_no_token": Case(both, Inputs.make, (0,)),
    "halves_dynamic": Case(halves, Inputs.make, (6, 4), TOKENS),
    "float32_kv": Case(halves, lambda t: Inputs.make(t, dtype=torch.float32), (5,)),
    "plain_bfloat16": Case(row_cache, lambda t: Inputs.make(t, **SMALL), (7,)),
    "plain_float32": Case(row_cache, lambda t: Inputs.make(t, dtype=torch.float32, **SMALL), (7,)),
    "fp8_rows_and_queries": Case(fp8_rows, lambda t: fp8_cache(Inputs.make(t, **SMALL)), (7,), for_targets=True),
    "sliced": Case(sliced, lambda t: Inputs.make(t, heads=3), (5,)),
    "accounting_view": Case(both, lambda t: accounting_view(Inputs.make(t)), (5,)),
    "normed": Case(normed, Inputs.make, (5, 3), TOKENS),
    "ordered_views": Case(ordered, lambda t: stacked(Inputs.make(t)), (5,)),
    "hostile": Case(both, lambda t: hostile(Inputs.make(t)), (6,)),
    "all_padding": Case(both, lambda t: all_padding(Inputs.make(t)), (5,)),
}
