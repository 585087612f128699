"""Scenario `sparse_mla_decode`: attention of decode steps over the window and the selected entries of their tokens.

V4-Flash has 64 heads and selects 512 entries, V4-Pro 128 and 1024; fewer heads are a shard of Flash. Every row is full
and random. The entries of a step lie in a pool of 4096 for each token, at most `POOL`: up to 32 tokens, what is read
stays in the L2 cache of an H200 from one call to the next, and at 512 tokens it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import costs, layout
from ..ops._define import REFERENCES
from ..ops._kernels import launcher
from ..testing import assert_close
from .problem import Args, Only, Prepare, Problem, keep

OP = "sparse_mla_decode"
TOKENS = {"cuda": (1, 8, 32, 128, 512), "cpu": (1, 4)}
HEADS = (8, 16, 32, 64, 128)
COLUMNS = ("op", "heads", "keys", "tokens", "impl")
CACHE, WINDOW, BLOCK = "fp8_ds_mla", layout.SLIDING_WINDOW, layout.storage_block_size(layout.CSA_RATIO)
POOL_PER_TOKEN, SMALLEST_POOL, POOL = 4096, 16384, 262144
PRO_HEADS, TOPK, PRO_TOPK = 128, 512, 1024

# One H200, medians of CUDA graph replays: FlashMLA with its planner outside, and the prototype of our Hopper kernel.
PUBLISHED: Mapping[int, Mapping[str, Mapping[int, float]]] = {
    64: {
        "FlashMLA": {1: 12.1, 8: 14.4, 32: 21.2, 128: 43.5, 512: 166.0},
        "prototype": {1: 10.5, 8: 13.0, 32: 18.6, 128: 36.6, 512: 142.4},
    },
    128: {"FlashMLA": {1: 14.3, 8: 19.5, 32: 44.6, 128: 103.1, 512: 401.5}},
}


def topk_of(heads: int) -> int:
    """Entries that a model with this many heads selects."""
    return PRO_TOPK if heads >= PRO_HEADS else TOPK


def random_cache(entries: int, generator: torch.Generator) -> Tensor:
    """`fp8_ds_mla` pages of random keys: every finite code, scales that make most values of order one."""
    device, page = generator.device, layout.FP8_DS_MLA
    cache = layout.allocate_cache(CACHE, layout.cdiv(entries, BLOCK), BLOCK, device=device)
    data, scale = cache.split((BLOCK * page.data, BLOCK * page.scale), dim=1)
    codes = torch.randint(0, 256, data.shape, device=device, generator=generator, dtype=torch.uint8)
    data.copy_(torch.where((codes & 0x7F) == 0x7F, 0, codes))
    rope = torch.randn(*data.shape[:1], BLOCK, layout.ROPE_DIM, device=device, generator=generator).bfloat16()
    data.unflatten(1, (BLOCK, page.data))[..., layout.NOPE_DIM :].copy_(rope.view(torch.uint8))
    scale.copy_(torch.randint(117, 121, scale.shape, device=device, generator=generator))
    return cache


def arguments(tokens: int, heads: int, device: torch.device, seed: int, pool: int = 0) -> Args:
    """The op's arguments, with entries of a pool of `pool`, or as many as the scenario has for `tokens`."""
    generator = torch.Generator(device).manual_seed(seed)
    pool = pool or max(SMALLEST_POOL, min(tokens * POOL_PER_TOKEN, POOL))
    window = random_cache(max(tokens, 8) * WINDOW, generator)
    entries = random_cache(pool, generator)

    def row(cache: Tensor, width: int) -> tuple[Tensor, Tensor]:
        bound = cache.shape[0] * BLOCK
        slots = torch.randint(0, bound, (tokens, width), device=device, generator=generator, dtype=torch.int32)
        return slots, torch.full((tokens,), width, device=device, dtype=torch.int32)

    q = torch.randn(tokens, heads, layout.HEAD_DIM, device=device, generator=generator).bfloat16()
    sink = torch.randn(heads, device=device, generator=generator)
    first = window, *row(window, WINDOW), BLOCK
    return q, *first, CACHE, layout.HEAD_DIM**-0.5, sink, entries, *row(entries, topk_of(heads)), BLOCK


def differs(got: Sequence[Tensor], want: Sequence[Tensor]) -> str:
    """Why outputs and lse are not within the tolerances of attention, "" when they are."""
    try:
        assert_close(got[0], want[0], "attention_bfloat16", label="out")
        assert_close(got[1], want[1], "lse", label="lse")
    except AssertionError as wrong:
        return str(wrong)
    return ""


def portable(*args: Any, **cut: Any) -> tuple[Tensor, Tensor]:
    """The kernel for all GPUs, also where the op has a better one; `cut` as its launcher takes it."""
    from ..kernels import sparse_mla_decode_portable as kernel
    from ..kernels.gpu import gpu_of

    window, entries = kernel.Source(*args[1:5]), kernel.Source(*args[8:12])
    return kernel.launch(args[0], window, entries, CACHE, args[6], args[7], None, gpu_of(args[0].device), **cut)


def on_gpu(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, where it can run."""
    if not torch.cuda.is_available():
        raise RuntimeError("hand-written kernels run on GPUs")
    return call


# The reference, the kernel that the op chooses, and the one for all GPUs.
IMPLEMENTATIONS: Mapping[str, Prepare] = {
    "eager": lambda: REFERENCES[OP],
    "triton": lambda: on_gpu(launcher(OP)),
    "portable": lambda: on_gpu(portable),
}


def problems(
    device: torch.device, only: Only, tokens: tuple[int, ...] | None = None, pool: int = 0
) -> Iterator[Problem]:
    """Every number of heads at every number of tokens."""
    for heads in HEADS:
        keys = WINDOW + topk_of(heads)
        for size in tokens or TOKENS[device.type]:
            if not keep(only, op=OP, heads=heads, keys=keys, tokens=size):
                continue
            yield Problem(
                op=OP,
                params={"heads": heads, "keys": keys, "tokens": size},
                make=partial(arguments, size, heads, device, pool=pool),
                written=(),
                cost=costs.of(OP, T=size, H=heads, D=layout.HEAD_DIM, K=keys, row=costs.row_bytes(CACHE)),
                reference=REFERENCES[OP],
                implementations=IMPLEMENTATIONS,
                published=published(heads, size) if device.type == "cuda" else {},
                differs=differs,
            )


def published(heads: int, tokens: int) -> dict[str, float]:
    """What others have reached at this size."""
    return {name: times[tokens] for name, times in PUBLISHED.get(heads, {}).items() if tokens in times}
