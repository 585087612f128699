"""Not a test: compiles every case into Triton in a process of its own and prints what came out as JSON.

python generated.py            compiles some of them for every target GPU
TRITON_INTERPRET=1 python ...  runs them in Triton's interpreter and compares with the reference
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4_compile import backend, decisions
from dsv4_compile.layout import HEAD_DIM, ROPE_DIM, allocate_cache
from dsv4_compile.testing import assert_bitwise, fake_triton
from dsv4_compile.testing.inductor_triton import INTERPRETED, generated_triton

OPS = torch.ops.dsv4
BLOCK, PAGES, EPS = 4, 6, 1e-6
CAPACITY = BLOCK * PAGES


@dataclass
class Inputs:
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


def storage(cache: Tensor) -> Tensor:
    """All bytes behind a cache, those between its pages included."""
    flat = torch.empty(0, dtype=torch.uint8)
    return flat.set_(cache.untyped_storage())


def both(x: Inputs) -> Tensor:
    out = OPS.q_norm_rope_kv_insert(x.q * 2, x.kv, x.cache, x.slots, x.positions, x.table, EPS, BLOCK, "fp8_ds_mla")
    return out * 0.5


def halves(x: Inputs) -> Tensor:
    OPS.kv_rope_insert(x.kv * 2, x.cache, x.slots, x.positions, x.table, BLOCK, "fp8_ds_mla")
    return OPS.q_norm_rope(x.q, x.positions.int(), x.table, EPS) * 0.5


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
    x.cache = torch.randint(0, 255, (PAGES, BLOCK, x.cache.shape[1] // BLOCK), dtype=torch.uint8)
    return x


def stacked(x: Inputs) -> Inputs:
    """Three caches in one tensor, zeroed so that what their readers return holds no NaN."""
    x.cache = torch.zeros(3, *x.cache.shape, dtype=torch.uint8)
    return x


def fp8_cache(x: Inputs) -> Inputs:
    x.cache = torch.randint(0, 255, x.cache.shape, dtype=torch.uint8)
    return x


def hostile(x: Inputs) -> Inputs:
    """Rows of zeros, of the smallest and the largest values, and with infinities."""
    x.slots = torch.arange(x.slots.shape[0])
    x.kv[0] = 0
    x.kv[1] *= 1e-30
    x.kv[2] *= 1e37
    x.kv[3, 7::100] = torch.inf
    return x


def all_padding(x: Inputs) -> Inputs:
    x.slots.fill_(-1)
    return x


SMALL = {"dim": 64, "rope": 16}
CASES: dict[str, tuple[Callable[[Inputs], Tensor], Callable[[int], Inputs], tuple[int, ...]]] = {
    "both_dynamic": (both, Inputs.make, (5, 9, 3)),
    "both_one_token": (both, Inputs.make, (1,)),
    "halves_dynamic": (halves, Inputs.make, (6, 4)),
    "float32_kv": (halves, lambda t: Inputs.make(t, dtype=torch.float32), (5,)),
    "plain_bfloat16": (row_cache, lambda t: Inputs.make(t, **SMALL), (7,)),
    "plain_float32": (row_cache, lambda t: Inputs.make(t, dtype=torch.float32, **SMALL), (7,)),
    "fp8_rows_and_queries": (fp8_rows, lambda t: fp8_cache(Inputs.make(t, **SMALL)), (7,)),
    "sliced": (sliced, lambda t: Inputs.make(t, heads=3), (5,)),
    "accounting_view": (both, lambda t: accounting_view(Inputs.make(t)), (5,)),
    "ordered_views": (ordered, lambda t: stacked(Inputs.make(t)), (5,)),
    "hostile": (both, lambda t: hostile(Inputs.make(t)), (6,)),
    "all_padding": (both, lambda t: all_padding(Inputs.make(t)), (5,)),
}
COMPILED_FOR_TARGETS = ("both_dynamic", "fp8_rows_and_queries")


def ulps(actual: Tensor, expected: Tensor) -> float:
    """Largest distance: in representable values, or for float32 in roundings of the largest value.

    A rotation cancels, so single float32 results have no bound of their own.
    """
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    if actual.dtype is torch.float32:
        return ((actual - expected).abs().max() / expected.abs().max() / torch.finfo(torch.float32).eps).item()
    integer = {1: torch.int8, 2: torch.int16}[actual.element_size()]

    def ordered_bits(x: Tensor) -> Tensor:
        bits = x.view(integer).long()
        return torch.where(bits < 0, torch.iinfo(integer).min - bits, bits)

    return (ordered_bits(actual) - ordered_bits(expected)).abs().max().item()


def copy(x: Inputs) -> Inputs:
    """Deep copy that keeps the cache's strides and page padding."""
    values = dict(vars(x))
    values["cache"] = storage(x.cache).clone().view(x.cache.dtype).as_strided(x.cache.shape, x.cache.stride())
    return Inputs(**values)


def report(name: str) -> dict[str, Any]:
    fn, make, sizes = CASES[name]
    torch.compiler.reset()
    compiled = torch.compile(fn, backend=backend.dsv4, fullgraph=True)
    codes: list[str] = []
    result: dict[str, Any] = {"ulps": [], "cache": []}
    with generated_triton(codes=codes) as kernels, decisions.collect() as decided:
        for tokens in sizes:
            eager = make(tokens)
            lowered = copy(eager)
            if len(sizes) > 1:
                for tensor in (lowered.q, lowered.kv, lowered.slots, lowered.positions):
                    torch._dynamo.mark_dynamic(tensor, 0)
            out = compiled(lowered)
            if INTERPRETED:
                result["ulps"].append(ulps(out, fn(eager)))
                try:
                    assert_bitwise(storage(lowered.cache), storage(eager.cache), label="cache")
                except AssertionError as difference:
                    result["cache"].append(str(difference))
    wrapper = codes[-1].split("def call(")[1]
    result |= {
        "graphs": len(codes),
        "kernels": [kernel.name for kernel in kernels],
        "launches": wrapper.count(".run("),
        "extern": [line.strip() for line in wrapper.splitlines() if "torch.ops." in line and "#" not in line],
        "impls": [decision.impl for decision in decided],
    }
    if not INTERPRETED and name in COMPILED_FOR_TARGETS:
        result["binaries"] = {
            target: [len(kernel.compile(gpu)) for kernel in kernels] for target, gpu in fake_triton.TARGETS.items()
        }
    return result


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with torch.no_grad():
        print(json.dumps({name: report(name) for name in (CASES if INTERPRETED else COMPILED_FOR_TARGETS)}))
