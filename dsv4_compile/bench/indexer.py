"""Scenario `indexer`: the compressors and the indexer of a layer, op by op, at 16k tokens of context.

Score and selection are offered at other contexts too: `--only context=4096,65536`.

Up to `MOST_REQUESTS` tokens are a decode step, a request each: every token closes a group, which is the worst case, and
sees 4096 entries of its own. More tokens are the last chunk of one prompt, whose tokens share entries.

Queries and keys of the score are -1, 0 or 1, and weights multiples of 2^-10: every sum is exact in float32, so that a
selection has one right answer for implementations that add in different orders.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .. import costs, layout
from ..config import DeepseekV4Config
from ..ops._define import REFERENCES
from .implementations import implementations
from .problem import Args, Only, Problem, keep

TOKENS = {"cuda": (1, 8, 32, 128, 512, 4096), "cpu": (1, 4)}
TYPICAL_TOKENS = 128
MOST_REQUESTS = 512
CONTEXT = {"cuda": 16384, "cpu": 2048}
CONTEXTS = (4096, 16384, 65536, 131072)
COLUMNS = ("op", "layer", "topk", "context", "tokens", "impl")
SCORES = ("indexer_logits_topk", "indexer_topk_slots")
RATIO, BLOCK = layout.CSA_RATIO, layout.storage_block_size(layout.CSA_RATIO)
KEYS = "indexer_fp8"
_E4M3_ONE = 0x38


@dataclass(frozen=True, slots=True)
class Step:
    """A step of `tokens` tokens at `context` tokens of context, with random data from `seed`."""

    config: DeepseekV4Config
    tokens: int
    context: int
    device: torch.device
    seed: int

    @property
    def requests(self) -> int:
        """One for each token of a decode step; one for a chunk of a prompt."""
        return self.tokens if self.tokens <= MOST_REQUESTS else 1

    def generator(self, part: int) -> torch.Generator:
        """Different parts of a step are independent."""
        return torch.Generator(self.device).manual_seed(16 * self.seed + part)

    def randn(self, *shape: int, part: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Normal values."""
        return torch.randn(*shape, device=self.device, generator=self.generator(part), dtype=dtype)

    def randint(self, low: int, high: int, *shape: int, part: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Uniform in [low, high)."""
        return torch.randint(low, high, shape, device=self.device, generator=self.generator(part), dtype=dtype)

    def positions(self) -> Tensor:
        """int64 `[T]`: the last of the context, all of them or of each request."""
        each = self.tokens // self.requests
        return self.context - each + torch.arange(self.tokens, device=self.device) % each

    def owners(self) -> Tensor:
        """int32 `[T]`."""
        return (torch.arange(self.tokens, device=self.device) // (self.tokens // self.requests)).int()

    def rope(self) -> Tensor:
        """float32 `[context, rope_dim]`, unit pairs."""
        angle = self.randn(self.context, self.config.rope_dim // 2, part=1, dtype=torch.float32)
        return torch.cat((angle.cos(), angle.sin()), dim=1)

    def table(self, columns: int) -> Tensor:
        """int32 `[R, columns]`: distinct pages in random order."""
        order = self.randn(self.requests * columns, part=2, dtype=torch.float32).argsort()
        return order.int().view(self.requests, columns)

    def slots(self, table: Tensor, index: Tensor, block: int) -> Tensor:
        """int64 `[T]` slots of an index within the request."""
        return table[self.owners().long(), index // block].long() * block + index % block


@dataclass(frozen=True, slots=True)
class Case:
    """How to build the arguments of an op, which of them have tokens first, which it writes, and what it must do."""

    op: str
    params: Mapping[str, int | str]
    build: Callable[[Step], Args]
    tokens: tuple[int, ...]
    written: tuple[int, ...]
    cost: Callable[[Step], costs.Cost]


@dataclass(frozen=True, slots=True)
class Compressor:
    """One of the compressors: its ratio, dims of an entry, and the cache that receives entries."""

    ratio: int
    dim: int
    fmt: str

    @property
    def width(self) -> int:
        """float32 values of a state row."""
        return layout.state_width(self.ratio, self.dim)

    def states(self, s: Step) -> tuple[Tensor, Tensor, Tensor, int]:
        """State cache, slots, block table and block size, for the positions that this step reads and writes."""
        block = layout.state_block_size(self.ratio)
        # The blocks behind the window are gone: their columns name a page that is not read.
        live = layout.cdiv(layout.overlap_factor(self.ratio) * self.ratio + s.tokens // s.requests, block) + 1
        columns = layout.cdiv(s.context, block)
        recent = s.table(live)
        table = torch.nn.functional.pad(recent, (columns - live, 0), value=layout.PAD_INDEX)
        state = s.randn(recent.numel(), block, self.width, part=3, dtype=torch.float32)
        return state, s.slots(table, s.positions(), block), table, block

    def save(self, s: Step) -> Args:
        """Arguments of `save_partial_states`."""
        state, slots, _, block = self.states(s)
        kv_score = s.randn(s.tokens, self.width, part=4, dtype=torch.float32)
        ape = s.randn(self.ratio, self.width // 2, part=5, dtype=torch.float32)
        return kv_score, ape, state, slots, s.positions(), block

    def compress(self, s: Step) -> Args:
        """Arguments of `compress_norm_rope_insert`."""
        state, slots, table, state_block = self.states(s)
        positions, block = s.positions(), layout.storage_block_size(self.ratio)
        entries = s.table(layout.cdiv(s.context // self.ratio, block))
        entry_slots = s.slots(entries, positions // self.ratio, block)
        closes = (positions + 1) % self.ratio == 0
        cache = layout.allocate_cache(self.fmt, entries.numel(), block, device=s.device)
        weight = 1 + 0.1 * s.randn(self.dim, part=6)
        where = slots, table, s.owners(), positions, torch.where(closes, entry_slots, layout.PAD_SLOT)
        return state, *where, weight, s.rope(), cache, s.config.rms_norm_eps, self.ratio, state_block, block, self.fmt

    def save_cost(self, s: Step) -> costs.Cost:
        """A row in and out."""
        return costs.of("save_partial_states", T=s.tokens, width=self.width)

    def compress_cost(self, s: Step) -> costs.Cost:
        """Half of each state row of the windows is read for each entry, and the entry is written."""
        entries = s.tokens if s.requests > 1 or s.tokens == 1 else s.tokens // self.ratio
        window = layout.overlap_factor(self.ratio) * self.ratio
        row = costs.row_bytes(self.fmt)
        return costs.of("compress_norm_rope_insert", T=s.tokens, C=entries, W=window, D=self.dim, row=row)


def _queries(s: Step) -> Args:
    c = s.config
    q = s.randn(s.tokens, c.index_n_heads, c.index_head_dim, part=4)
    return q, s.positions(), s.rope(), s.randn(s.tokens, c.index_n_heads, part=5), KEYS


def _queries_cost(s: Step) -> costs.Cost:
    c = s.config
    return costs.of("indexer_q_rope_quant", T=s.tokens, H=c.index_n_heads, D=c.index_head_dim, rope=c.rope_dim)


def _score(s: Step, topk: int) -> Args:
    c, page = s.config, layout.PAGE_LAYOUTS[KEYS]
    table = s.table(layout.cdiv(s.context // RATIO, BLOCK))

    def signs(*shape: int, part: int) -> Tensor:
        """Bytes of e4m3 -1, 0 and 1."""
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


def _slots(s: Step, topk: int) -> Args:
    """The same selection, to slots of a main cache as large."""
    _, _, table, valid, block = _map(s, topk)
    return *_score(s, topk), table, valid, block


def _score_cost(s: Step, topk: int, op: str = "indexer_logits_topk") -> costs.Cost:
    c, entries = s.config, s.context // RATIO
    scored = {"T": s.tokens, "H": c.index_n_heads, "D": c.index_head_dim, "L": entries, "K": topk}
    return costs.of(op, **scored, C=s.requests * entries, row=costs.row_bytes(KEYS))


def _map(s: Step, topk: int) -> Args:
    table = s.table(layout.cdiv(s.context // RATIO, BLOCK))
    entries = s.randint(0, s.context // RATIO, s.tokens, topk, part=4)
    return entries, s.owners(), table, torch.ones(s.tokens, dtype=torch.bool, device=s.device), BLOCK


def _map_cost(s: Step, topk: int) -> costs.Cost:
    return costs.of("global_topk", T=s.tokens, K=topk)


def cases(config: DeepseekV4Config) -> Iterator[Case]:
    """The ops of a CSA and of an HCA layer."""
    layers = {
        "CSA": Compressor(layout.CSA_RATIO, config.head_dim, "fp8_ds_mla"),
        "HCA": Compressor(layout.HCA_RATIO, config.head_dim, "fp8_ds_mla"),
        "indexer": Compressor(layout.CSA_RATIO, config.index_head_dim, KEYS),
    }
    for name, each in layers.items():
        yield Case("save_partial_states", {"layer": name}, each.save, (0, 3, 4), (2,), each.save_cost)
    for name, each in layers.items():
        tokens = (1, 3, 4, 5)
        yield Case("compress_norm_rope_insert", {"layer": name}, each.compress, tokens, (8,), each.compress_cost)
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
    """Every op at every size. The larger top-k is that of V4-Pro, whose indexer is V4-Flash's otherwise."""
    config, usual = DeepseekV4Config.flash(), context or CONTEXT[device.type]
    sizes = [t for t in tokens or TOKENS[device.type] if keep(only, tokens=t)]
    for case in cases(config):
        offered = CONTEXTS if "context" in only and case.op in SCORES else (usual,)
        contexts = [c for c in offered if keep(only, context=c)]
        if not sizes or not contexts or not keep(only, op=case.op, **case.params):
            continue

        def make(tokens: int, context: int, case: Case = case) -> Callable[[int], Args]:
            return lambda seed: case.build(Step(config, tokens, context, device, seed))

        def typical(make: Callable[[int, int], Callable[[int], Args]] = make) -> Args:
            return make(TYPICAL_TOKENS, usual)(0)

        ways = implementations(case.op, typical, case.tokens)
        for at, size in itertools.product(contexts, sizes):
            yield Problem(
                op=case.op,
                params={**case.params, "context": at, "tokens": size},
                make=make(size, at),
                written=case.written,
                cost=case.cost(Step(config, size, at, device, 0)),
                reference=REFERENCES[case.op],
                implementations=ways,
                published={},
                split=case.op in SCORES,
            )
