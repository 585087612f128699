"""Scenario `prefill`: the ops of a prefill before its attention: gathers, the indexer's selection, index rows.

The tokens are the last of one prompt of 16k tokens, in V4-Flash's layers of ratio 4: 4096 compressed entries, the raw
tokens of the step and the window before them. `indexer_logits_topk` is there for comparison: it does the work of
`indexer_logits_topk_ragged` directly from pages, token by token. Scores are exact as in scenario `indexer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .. import layout
from ..config import DeepseekV4Config
from ..ops.common.define import REFERENCES
from ..ops.common.kernels import launcher
from ..selection import costs
from ..testing.generate import random_cache
from .indexer import cases
from .problem import Args, Only, Prepare, Problem, keep, on_gpu
from .steps import StepInputs

TOKENS = {"cuda": (256, 1024, 4096, 16384), "cpu": (16,)}
CONTEXT = {"cuda": 16384, "cpu": 2048}
COLUMNS = ("op", "tokens", "impl")
RATIO, WINDOW = layout.CSA_RATIO, layout.SLIDING_WINDOW
BLOCK, KEYS = layout.storage_block_size(layout.CSA_RATIO), "indexer_fp8"


@dataclass(frozen=True, slots=True)
class Prompt(StepInputs):
    """Inputs of the last tokens of one prompt, however few."""

    @property
    def requests(self) -> int:
        """Number of requests."""
        return 1

    @property
    def entries(self) -> int:
        """Number of compressed entries of the prompt."""
        return self.context // RATIO

    @property
    def gathered(self) -> int:
        """Number of raw tokens that this step gathers."""
        return min(self.tokens + WINDOW - 1, self.context)

    def int32(self, *values: int) -> Tensor:
        """Return an int32 tensor on the device."""
        return torch.tensor(values, device=self.device, dtype=torch.int32)


def _paged(s: Prompt) -> Args:
    (case,) = (c for c in cases(s.config) if c.op == "indexer_logits_topk" and c.params["topk"] == s.config.index_topk)
    return case.build(s)


def _selection(s: Prompt) -> Args:
    q, q_scale, weights, cache, table, _, lens, _, _, topk = _paged(s)
    k, k_scale = _gathered_keys(s)
    REFERENCES["cp_gather_indexer_k"](cache, table, s.int32(0, s.entries), k, k_scale, BLOCK, KEYS)
    return q, q_scale, weights, k, k_scale, torch.zeros_like(lens), lens, KEYS, topk


def _gathered_keys(s: Prompt) -> tuple[Tensor, Tensor]:
    page = layout.PAGE_LAYOUTS[KEYS]
    k, k_scale = (torch.zeros(s.entries, n, device=s.device, dtype=torch.uint8) for n in (page.data, page.scale))
    return k, k_scale


def _gather_indexer(s: Prompt) -> Args:
    _, _, _, cache, table, *_ = _paged(s)
    return cache, table, s.int32(0, s.entries), *_gathered_keys(s), BLOCK, KEYS


def _gather_cache(s: Prompt) -> Args:
    pages = layout.cdiv(s.entries, BLOCK)
    generator = torch.Generator().manual_seed(s.seed)
    cache = random_cache("fp8_ds_mla", pages, BLOCK, live=pages * BLOCK, device=s.device, generator=generator).cache
    out = torch.zeros(1, s.entries, layout.HEAD_DIM, device=s.device, dtype=torch.bfloat16)
    return out, cache, s.int32(s.entries), None, s.table(pages), BLOCK, 0, "fp8_ds_mla"


def _combine(s: Prompt) -> Args:
    topk, n = s.config.index_topk, s.entries
    chosen = s.randint(0, n, s.tokens, topk, part=4)
    lens = s.int32(s.context), s.int32(s.gathered)
    return chosen, s.int32(0, s.tokens), *lens, WINDOW, RATIO, topk, n + s.gathered, n


def _selection_cost(s: Prompt, op: str) -> costs.Cost:
    c = s.config
    sizes = {"T": s.tokens, "H": c.index_n_heads, "D": c.index_head_dim, "K": c.index_topk, "C": s.entries}
    # A token sees the entries that were complete at its position.
    seen = s.entries - s.tokens // (2 * RATIO)
    return costs.of(op, **sizes, L=seen, row=costs.row_bytes(KEYS))


OPS: Mapping[str, tuple[Callable[[Prompt], Args], tuple[int, ...], Callable[[Prompt], costs.Cost]]] = {
    "dequantize_and_gather_k_cache": (
        _gather_cache,
        (0,),
        lambda s: costs.of(
            "dequantize_and_gather_k_cache", S=s.entries, D=layout.HEAD_DIM, row=costs.row_bytes("fp8_ds_mla")
        ),
    ),
    "cp_gather_indexer_k": (
        _gather_indexer,
        (3, 4),
        lambda s: costs.of("cp_gather_indexer_k", S=s.entries, row=costs.row_bytes(KEYS)),
    ),
    "indexer_logits_topk_ragged": (_selection, (), partial(_selection_cost, op="indexer_logits_topk_ragged")),
    "indexer_logits_topk": (_paged, (), partial(_selection_cost, op="indexer_logits_topk")),
    "combine_topk_swa": (
        _combine,
        (),
        lambda s: costs.of("combine_topk_swa", T=s.tokens, K=s.config.index_topk, W=WINDOW),
    ),
    "combine_topk_swa_ragged": (
        _combine,
        (),
        lambda s: costs.of("combine_topk_swa_ragged", T=s.tokens, K=s.config.index_topk, W=WINDOW),
    ),
}
"""Builder of the arguments, positions of the written ones, and cost of each op."""


def implementations(op: str) -> Mapping[str, Prepare]:
    """Return the reference and the kernel of `op`."""
    return {"eager": lambda: REFERENCES[op], "triton": lambda: on_gpu(launcher(op))}


def _arguments(build: Callable[[Prompt], Args], prompt: Callable[[int], Prompt], seed: int) -> Args:
    return build(prompt(seed))


def problems(
    device: torch.device, only: Only, tokens: tuple[int, ...] | None = None, context: int | None = None
) -> Iterator[Problem]:
    """Yield every op at every number of tokens."""
    config = DeepseekV4Config.flash()
    for op, (build, written, cost) in OPS.items():
        for size in tokens or TOKENS[device.type]:
            if not keep(only, op=op, tokens=size):
                continue
            prompt = partial(Prompt, config, size, context or CONTEXT[device.type], device)
            yield Problem(
                op=op,
                params={"tokens": size},
                make=partial(_arguments, build, prompt),
                written=written,
                cost=cost(prompt(0)),
                reference=REFERENCES[op],
                implementations=implementations(op),
                published={},
            )
