"""Scenario `attention_backends`: decode with the arguments of each attention backend, at the same sizes.

At V4-Flash's sizes, the same keys as rows of slots (FlashMLA) and as lists of slots (ROCm), and in caches with rows in
bfloat16 and in per-tensor fp8 (FlashInfer); and DeepSeek-V3.2: 128 heads, 2048 keys of 576 dims. Every row of slots is
full and random, from a pool that exceeds an L2 cache from 128 tokens on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from .. import layout
from ..ops.common.define import REFERENCES
from ..ops.common.kernels import launcher
from ..selection import costs
from . import sparse_mla_decode as rows
from .problem import Args, Only, Prepare, Problem, keep, on_gpu

LISTS, ROWS, LATENT = "sparse_mla_decode_ragged", "sparse_mla_decode", "sparse_mla_decode_latent"
TOKENS = {"cuda": (1, 32, 128), "cpu": (1, 4)}
COLUMNS = ("op", "cache", "heads", "keys", "tokens", "impl")
HEADS, V32_HEADS, V32_TOPK = 64, 128, 2048
KEYS = rows.WINDOW + rows.TOPK


def lists(tokens: int, device: torch.device, seed: int) -> Args:
    """Return the arguments of `sparse_mla_decode_ragged`: those of `sparse_mla_decode` with rows as lists."""
    q, cache, slots, lens, *attend, entries, entry_slots, entry_lens, block = rows.arguments(
        tokens, HEADS, device, seed
    )
    first, second = (REFERENCES["ragged_from_dense"](*pair) for pair in ((slots, lens), (entry_slots, entry_lens)))
    bounds = slots.shape[1], entry_slots.shape[1]
    return q, cache, *first, *attend, entries, *second, block, None, *bounds


def in_format(fmt: str, tokens: int, device: torch.device, seed: int) -> Args:
    """Return the arguments of `sparse_mla_decode` with caches in this format."""
    if fmt == rows.CACHE:
        return rows.arguments(tokens, HEADS, device, seed)
    q, _, slots, lens, block, _, scale, sink, _, entry_slots, entry_lens, _ = rows.arguments(
        tokens, HEADS, device, seed
    )
    generator = torch.Generator(device).manual_seed(seed)
    window = row_cache(fmt, int(slots.max()) + 1, layout.HEAD_DIM, generator)
    entries = row_cache(fmt, int(entry_slots.max()) + 1, layout.HEAD_DIM, generator)
    return q, window, slots, lens, block, fmt, scale, sink, entries, entry_slots, entry_lens, block


def row_cache(fmt: str, slots: int, head_dim: int, generator: torch.Generator) -> Tensor:
    """Return at least `slots` rows of standard normal vectors, in pages as large as the window's."""
    shape = layout.cdiv(slots, rows.BLOCK), rows.BLOCK, head_dim
    values = torch.randn(shape, device=generator.device, generator=generator).bfloat16()
    return values.to(torch.float8_e4m3fn).view(torch.uint8) if fmt == "fp8" else values


def latent(tokens: int, device: torch.device, seed: int) -> Args:
    """Return the arguments of `sparse_mla_decode_latent` at DeepSeek-V3.2's sizes."""
    generator = torch.Generator(device).manual_seed(seed)
    pool = max(rows.SMALLEST_POOL, min(tokens * rows.POOL_PER_TOKEN, rows.POOL))
    cache = row_cache("plain", pool, layout.V32_HEAD_DIM, generator)
    shape = tokens, V32_TOPK
    slots = torch.randint(0, pool, shape, device=device, generator=generator, dtype=torch.int32)
    lens = torch.full((tokens,), V32_TOPK, device=device, dtype=torch.int32)
    q = torch.randn(tokens, V32_HEADS, layout.V32_HEAD_DIM, device=device, generator=generator).bfloat16()
    return q, cache, slots, lens, rows.BLOCK, layout.V32_HEAD_DIM**-0.5, layout.V32_LATENT_DIM


def implementations(op: str) -> Mapping[str, Prepare]:
    """Return the reference and the kernel of `op`."""
    return {"eager": lambda: REFERENCES[op], "triton": lambda: on_gpu(launcher(op))}


def problems(device: torch.device, only: Only, tokens: tuple[int, ...] | None = None) -> Iterator[Problem]:
    """Yield every op and cache at every number of tokens."""
    wide, narrow = layout.V32_HEAD_DIM, layout.V32_LATENT_DIM
    flash = HEADS, KEYS, {"D": layout.HEAD_DIM}
    builders: list[tuple[str, str, int, int, dict[str, int], Callable[..., Args]]] = [
        (LISTS, rows.CACHE, *flash, lists),
        *((ROWS, fmt, *flash, partial(in_format, fmt)) for fmt in (rows.CACHE, "plain", "fp8")),
        (LATENT, "plain", V32_HEADS, V32_TOPK, {"D": wide, "N": narrow}, latent),
    ]
    for op, cache, heads, keys, dims, make in builders:
        for size in tokens or TOKENS[device.type]:
            if not keep(only, op=op, cache=cache, heads=heads, keys=keys, tokens=size):
                continue
            row = costs.row_bytes(cache, dims["D"])
            yield Problem(
                op=op,
                params={"cache": cache, "heads": heads, "keys": keys, "tokens": size},
                make=partial(make, size, device),
                written=(),
                cost=costs.of(op, T=size, H=heads, K=keys, row=row, **dims),
                reference=REFERENCES[op],
                implementations=implementations(op),
                published={},
                differs=rows.differs,
            )
