"""Scenario `sparse_mla_prefill`: attention of prompts over a flat bfloat16 workspace.

V4-Flash has 64 heads and 640 keys for each token, V4-Pro 128 and 1152. Every row is full. Pattern `window`: the last
128 keys are the token's window, the others random among the first quarter, like an indexer's. Pattern `random`: all
keys are random.
The workspace has a row for every fourth token and 4096 more.

Under sustained load a GPU loses some 10 % of its clock: compare times within one run only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import layout
from ..ops.common.define import REFERENCES
from ..ops.common.kernels import launcher
from ..selection import costs
from ..testing import assert_close
from . import flash_mla
from .problem import Args, Only, Prepare, Problem, keep, on_gpu

OP = "sparse_mla_prefill"
TOKENS = {"cuda": (256, 1024, 4096, 16384), "cpu": (4,)}
HEADS = (64, 128)
PATTERNS = ("random", "window")
COLUMNS = ("op", "heads", "keys", "pattern", "tokens", "impl")
WINDOW = layout.SLIDING_WINDOW
TOPK = {64: 512, 128: 1024}
COMPARED = 512


def workspace_rows(tokens: int) -> int:
    """Return the rows of the workspace: compressed entries and raw tokens."""
    return tokens // layout.CSA_RATIO + 4096


def arguments(tokens: int, heads: int, device: torch.device, seed: int, pattern: str = "random") -> Args:
    """Return the op's arguments."""
    generator = torch.Generator(device).manual_seed(seed)
    entries, total = max(tokens // layout.CSA_RATIO, 1), workspace_rows(tokens)
    topk = TOPK[heads]
    bound = total if pattern == "random" else entries
    chosen = torch.randint(0, bound, (tokens, topk), device=device, generator=generator, dtype=torch.int32)
    if pattern == "random":
        near = torch.randint(0, bound, (tokens, WINDOW), device=device, generator=generator, dtype=torch.int32)
    else:
        first = torch.arange(tokens, device=device) % (total - entries - WINDOW)
        near = (entries + first[:, None] + torch.arange(WINDOW, device=device)).int()
    q = torch.randn(tokens, heads, layout.HEAD_DIM, device=device, generator=generator, dtype=torch.bfloat16)
    kv = torch.randn(total, layout.HEAD_DIM, device=device, generator=generator, dtype=torch.bfloat16)
    sink = torch.randn(heads, device=device, generator=generator)
    lens = torch.full((tokens,), topk + WINDOW, device=device, dtype=torch.int32)
    return q, kv, torch.cat((chosen, near), dim=1), lens, layout.HEAD_DIM**-0.5, sink


def differs(got: Sequence[Tensor], want: Sequence[Tensor]) -> str:
    """Return why outputs, largest logits and lse are not within the tolerances of prefill, or "".

    At most COMPARED tokens are compared, the first and the last among them.
    """
    tokens = want[0].shape[0]
    some = torch.linspace(0, tokens - 1, min(tokens, COMPARED), device=want[0].device).long()
    got, want = ([x[some] for x in results] for results in (got, want))
    try:
        assert_close(got[0], want[0], "attention_prefill_bfloat16", label="out")
        assert_close(got[1], want[1], "lse_prefill", label="max_logits")
        assert_close(got[2], want[2], "lse_prefill", label="lse")
    except AssertionError as wrong:
        return str(wrong)
    return ""


def portable(*args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Run the Triton kernel for all GPUs, even if the op has a faster one; `options` go to its launcher."""
    from ..kernels.attention import sparse_mla_prefill as kernel
    from ..kernels.host.gpu import gpu_of

    rows = kernel.IndexRows(args[2], args[3], args[2].shape[1])
    q, kv, _, _, scale, sink = args[:6]
    return kernel.launch(kernel.PrefillCall(q, kv, rows, scale, sink), gpu_of(q.device), **options)


def with_tiles(*tiles: int) -> Prepare:
    """Return the kernel for all GPUs with these fields of its `Tiles`."""

    def prepare() -> Callable[..., Any]:
        from ..kernels.attention.sparse_mla_prefill import Tiles

        return on_gpu(partial(portable, tiles=Tiles(*tiles)))

    return prepare


IMPLEMENTATIONS: dict[str, Prepare] = {
    "eager": lambda: REFERENCES[OP],
    "triton": lambda: on_gpu(launcher(OP)),
    "portable": lambda: on_gpu(portable),
    "portable 64x32x2": with_tiles(64, 32, 8, 2),
    "portable 64x32x3": with_tiles(64, 32, 8, 3),
    "portable 64x64x1": with_tiles(64, 64, 8, 1),
    "portable 32x32x2": with_tiles(32, 32, 4, 2, 2),
}


def problems(device: torch.device, only: Only, tokens: tuple[int, ...] | None = None) -> Iterator[Problem]:
    """Yield every model and pattern at every number of tokens."""
    for heads in HEADS:
        keys = TOPK[heads] + WINDOW
        for pattern in PATTERNS:
            for size in tokens or TOKENS[device.type]:
                if not keep(only, op=OP, heads=heads, keys=keys, pattern=pattern, tokens=size):
                    continue
                sizes = {"T": size, "H": heads, "D": layout.HEAD_DIM, "K": keys, "S": workspace_rows(size)}
                yield Problem(
                    op=OP,
                    params={"heads": heads, "keys": keys, "pattern": pattern, "tokens": size},
                    make=partial(arguments, size, heads, device, pattern=pattern),
                    written=(),
                    cost=costs.of(OP, **sizes),
                    reference=REFERENCES[OP],
                    implementations=IMPLEMENTATIONS
                    | flash_mla.if_installed(lambda: on_gpu(flash_mla.prefill()), heads),
                    published={},
                    differs=differs,
                )
