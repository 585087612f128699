"""Scenario `indexer`: the compressors and the indexer of a layer, op by op, at 16k tokens of context.

Score and selection also run at other contexts: `--only context=4096,65536`. Inputs are `steps.StepInputs`: the tokens
of a decode step see separate sets of 4096 entries, tokens of a prompt see the same ones.

Queries and keys of the score are -1, 0 or 1, and weights multiples of 2^-10: every sum is exact in float32, so that
implementations that add in different orders select the same entries.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .. import layout
from ..config import DeepseekV4Config
from ..ops.common.define import REFERENCES
from ..selection import costs
from .problem import Args, Only, Problem, implementations, keep
from .steps import Compressor, StepInputs

TOKENS = {"cuda": (1, 8, 32, 128, 512, 4096), "cpu": (1, 4)}
TYPICAL_TOKENS = 128
CONTEXT = {"cuda": 16384, "cpu": 2048}
CONTEXTS = (4096, 16384, 65536, 131072)
COLUMNS = ("op", "layer", "topk", "context", "tokens", "impl")
SCORES = ("indexer_logits_topk", "indexer_topk_slots")
RATIO, BLOCK = layout.CSA_RATIO, layout.storage_block_size(layout.CSA_RATIO)
KEYS = "indexer_fp8"
_E4M3_ONE = 0x38


@dataclass(frozen=True, slots=True)
class Case:
    """An op: builder of its arguments, positions of those with tokens first and of those it writes, and its cost."""

    op: str
    params: Mapping[str, int | str]
    build: Callable[[StepInputs], Args]
    tokens: tuple[int, ...]
    written: tuple[int, ...]
    cost: Callable[[StepInputs], costs.Cost]


def _queries(s: StepInputs) -> Args:
    c = s.config
    q = s.randn(s.tokens, c.index_n_heads, c.index_head_dim, part=4)
    return q, s.positions(), s.rope(), s.randn(s.tokens, c.index_n_heads, part=5), KEYS


def _queries_cost(s: StepInputs) -> costs.Cost:
    c = s.config
    return costs.of("indexer_q_rope_quant", T=s.tokens, H=c.index_n_heads, D=c.index_head_dim, rope=c.rope_dim)


def _score(s: StepInputs, topk: int) -> Args:
    c, page = s.config, layout.PAGE_LAYOUTS[KEYS]
    table = s.table(layout.cdiv(s.context // RATIO, BLOCK))

    def signs(*shape: int, part: int) -> Tensor:
        """Return bytes of e4m3 -1, 0 and 1."""
        sign = s.randint(-1, 2, *shape, part=part, dtype=torch.int16)
        return torch.where(sign == 0, 0, _E4M3_ONE | (sign & 0x80)).to(torch.uint8)

    q = signs(s.tokens, c.index_n_heads, c.index_head_dim, part=4).view(torch.float8_e4m3fn)
    weights = s.randint(-1023, 1024, s.tokens, c.index_n_heads, part=5).float() * 2.0**-10
    cache = layout.allocate_cache(KEYS, table.numel(), BLOCK, device=s.device)
    data, scale = cache.split((BLOCK * page.data, BLOCK * page.scale), dim=1)
    data.copy_(signs(*data.shape, part=6))
    scale.copy_((2.0 ** s.randint(-2, 3, table.numel(), BLOCK, part=7)).view(torch.uint8))
    lens = ((s.positions() + 1) // RATIO).int()
    scale_of_q = torch.empty(*q.shape[:2], 0, device=s.device)
    return q, scale_of_q, weights, cache, table, s.owners(), lens, BLOCK, KEYS, topk


def _slots(s: StepInputs, topk: int) -> Args:
    """Return the arguments of the selection in slots of a main cache of the same size."""
    _, _, table, valid, block = _map(s, topk)
    return *_score(s, topk), table, valid, block


def _score_cost(s: StepInputs, topk: int, op: str = "indexer_logits_topk") -> costs.Cost:
    c, entries = s.config, s.context // RATIO
    scored = {"T": s.tokens, "H": c.index_n_heads, "D": c.index_head_dim, "L": entries, "K": topk}
    return costs.of(op, **scored, C=s.requests * entries, row=costs.row_bytes(KEYS))


def _map(s: StepInputs, topk: int) -> Args:
    table = s.table(layout.cdiv(s.context // RATIO, BLOCK))
    entries = s.randint(0, s.context // RATIO, s.tokens, topk, part=4)
    return entries, s.owners(), table, torch.ones(s.tokens, dtype=torch.bool, device=s.device), BLOCK


def _map_cost(s: StepInputs, topk: int) -> costs.Cost:
    return costs.of("global_topk", T=s.tokens, K=topk)


def cases(config: DeepseekV4Config) -> Iterator[Case]:
    """Yield the ops of a CSA and of an HCA layer."""
    layers = {
        "CSA": Compressor(layout.CSA_RATIO, config.head_dim, "fp8_ds_mla"),
        "HCA": Compressor(layout.HCA_RATIO, config.head_dim, "fp8_ds_mla"),
        "indexer": Compressor(layout.CSA_RATIO, config.index_head_dim, KEYS),
    }
    for name, compressor in layers.items():
        yield Case("save_partial_states", {"layer": name}, compressor.save, (0, 3, 4), (2,), compressor.save_cost)
    for name, compressor in layers.items():
        tokens = (1, 3, 4, 5)
        yield Case(
            "compress_norm_rope_insert", {"layer": name}, compressor.compress, tokens, (8,), compressor.compress_cost
        )
    yield Case("indexer_q_rope_quant", {}, _queries, (0, 1, 3), (), _queries_cost)
    for topk in (config.index_topk, 2 * config.index_topk):
        cost = partial(_score_cost, topk=topk)
        yield Case("indexer_logits_topk", {"topk": topk}, partial(_score, topk=topk), (0, 1, 2, 5, 6), (), cost)
    for topk in (config.index_topk, 2 * config.index_topk):
        op = "indexer_topk_slots"
        cost = partial(_score_cost, topk=topk, op=op)
        yield Case(op, {"topk": topk}, partial(_slots, topk=topk), (0, 1, 2, 5, 6, 11), (), cost)
    for topk in (config.index_topk, 2 * config.index_topk):
        yield Case(
            "global_topk", {"topk": topk}, partial(_map, topk=topk), (0, 1, 3), (), partial(_map_cost, topk=topk)
        )


def problems(
    device: torch.device, only: Only, tokens: tuple[int, ...] | None = None, context: int | None = None
) -> Iterator[Problem]:
    """Yield every op at every size; the larger top-k is V4-Pro's, all else V4-Flash's."""
    config, usual = DeepseekV4Config.flash(), context or CONTEXT[device.type]
    sizes = [t for t in tokens or TOKENS[device.type] if keep(only, tokens=t)]
    for case in cases(config):
        offered = CONTEXTS if "context" in only and case.op in SCORES else (usual,)
        contexts = [c for c in offered if keep(only, context=c)]
        if not sizes or not contexts or not keep(only, op=case.op, **case.params):
            continue

        def make(tokens: int, context: int, case: Case = case) -> Callable[[int], Args]:
            return lambda seed: case.build(StepInputs(config, tokens, context, device, seed))

        def typical(make: Callable[[int, int], Callable[[int], Args]] = make) -> Args:
            return make(TYPICAL_TOKENS, usual)(0)

        ways = implementations(case.op, typical, case.tokens)
        for at, size in itertools.product(contexts, sizes):
            yield Problem(
                op=case.op,
                params={**case.params, "context": at, "tokens": size},
                make=make(size, at),
                written=case.written,
                cost=case.cost(StepInputs(config, size, at, device, 0)),
                reference=REFERENCES[case.op],
                implementations=ways,
                published={},
                per_kernel=case.op in SCORES,
            )
