"""Decoding with drafts, some of them rejected, equals decoding without drafts bitwise, in every cache.

The model is two layers of ops, CSA and HCA, over tables of random vectors by token; the tokens it samples are given.
Both runs are driven by `advance`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_compile import DeepseekV4Config, layout
from dsv4_compile.cache import CacheFormat, LayerCache, PagedCaches, SourceCache
from dsv4_compile.config import Rope
from dsv4_compile.metadata import AttentionMetadata, CompressedMetadata, MetadataBuffers
from dsv4_compile.rope_tables import cos_sin_cache
from dsv4_compile.testing import assert_bitwise

VOCABULARY, HEADS, DIM, INDEX_DIM, TOPK, WINDOW, DRAFTS = 50, 2, 32, 16, 3, 8, 3
PROMPTS = (3, 120, 125, 64, 30)
MAX_LEN, REQUESTS = 200, len(PROMPTS)
END = (40, 160, 171, 101, 70)
"""Tokens reserved for each request, which stops before it needs more."""
EPS, PLAIN = 1e-6, "plain"
CONFIG = DeepseekV4Config(
    num_heads=HEADS,
    head_dim=DIM,
    rope_dim=8,
    o_groups=1,
    sliding_window=WINDOW,
    index_n_heads=HEADS,
    index_head_dim=INDEX_DIM,
    index_topk=TOPK,
    yarn=None,
).with_layers(4, 128)
COS_SIN = cos_sin_cache(Rope(10000.0, 8), MAX_LEN + 8, torch.device("cpu"))


@dataclass
class Model:
    """Random vectors for every token, in place of the projections of a layer's input."""

    tables: dict[str, Tensor]

    @classmethod
    def random(cls) -> Model:
        widths = {"q": HEADS * DIM, "kv": DIM, "index_q": HEADS * INDEX_DIM, "index_weights": HEADS}
        widths |= {"entries_4": 4 * DIM, "entries_128": 2 * DIM, "keys_4": 4 * INDEX_DIM}
        tables = {name: torch.randn(VOCABULARY, width) for name, width in widths.items()}
        for name, ratio in (("entries_4", 4), ("entries_128", 128), ("keys_4", 4)):
            tables[f"{name}_ape"] = torch.randn(ratio, tables[name].shape[1] // 2)
        return cls(tables)

    def layer(self, ids: Tensor, md: AttentionMetadata, cache: LayerCache, ratio: int) -> Tensor:
        """Update the caches and return the attention of one layer, `[T, H, D]`."""
        x = {name: table[ids] for name, table in self.tables.items() if not name.endswith("_ape")}
        q = x["q"].unflatten(1, (HEADS, DIM))
        torch.ops.dsv4.kv_rope_insert(
            x["kv"], cache.window, md.window.slot_mapping, md.positions, COS_SIN, layout.WINDOW_BLOCK, PLAIN
        )
        group, source = md.sources[ratio], cache.sources[0]
        block = layout.storage_block_size(ratio)
        slots = (group.state_slot_mapping, group.state_block_table, group.slot_mapping)
        name = f"entries_{ratio}"
        self.compress(name, x[name], md, source.states, slots, source.entries, ratio)
        indices, lens = group.indices, group.lens
        if ratio == 4:
            indices, lens = self.select(x, md, group, source)
        out, _ = torch.ops.dsv4.sparse_mla_decode(
            q, cache.window, md.window.indices, md.window.lens, layout.WINDOW_BLOCK, PLAIN, 0.2, None,
            source.entries, indices, lens, block,
        )  # fmt: skip
        return out

    def compress(
        self, name: str, kv_score: Tensor, md: AttentionMetadata, state: Tensor, slots: tuple, extra: Tensor, ratio: int
    ) -> None:
        state_slots, state_table, entry_slots = slots
        state_block = layout.state_block_size(ratio)
        ape = self.tables[f"{name}_ape"]
        torch.ops.dsv4.save_partial_states(kv_score, ape, state, state_slots, md.positions, state_block)
        torch.ops.dsv4.compress_norm_rope_insert(
            state, state_slots, state_table, md.token_to_req, md.positions, entry_slots, torch.ones(extra.shape[-1]),
            COS_SIN, extra, EPS, ratio, state_block, layout.storage_block_size(ratio), PLAIN,
        )  # fmt: skip

    def select(
        self, x: dict[str, Tensor], md: AttentionMetadata, group: CompressedMetadata, source: SourceCache
    ) -> tuple[Tensor, Tensor]:
        slots = (group.indexer_state_slot_mapping, group.indexer_state_block_table, group.indexer_slot_mapping)
        self.compress("keys_4", x["keys_4"], md, source.key_states, slots, source.keys, 4)
        queries = torch.ops.dsv4.indexer_q_rope_quant(
            x["index_q"].unflatten(1, (HEADS, INDEX_DIM)), md.positions, COS_SIN, x["index_weights"], PLAIN
        )
        block = layout.storage_block_size(4)
        topk = torch.ops.dsv4.indexer_logits_topk(
            *queries, source.keys, group.indexer_block_table, md.token_to_req, group.context_lens, block, PLAIN, TOPK
        )
        return torch.ops.dsv4.global_topk(topk, md.token_to_req, group.block_table, md.is_valid_token, block)


class Run:
    """Decoding with queries of `query_len` tokens until every request has used its reserved tokens."""

    def __init__(self, model: Model, truth: Tensor, query_len: int, max_step_tokens: int) -> None:
        self.model, self.truth, self.query_len = model, truth, query_len
        self.caches = PagedCaches(
            CONFIG,
            max_batch_size=REQUESTS,
            max_seq_len=MAX_LEN,
            max_step_tokens=max_step_tokens,
            cache_format=CacheFormat.resolve("float32"),
        )
        self.buffers = MetadataBuffers(
            max_num_batched_tokens=sum(PROMPTS),
            max_num_seqs=REQUESTS,
            max_model_len=MAX_LEN,
            window=WINDOW,
            block_tables=self.caches.block_tables,
        )
        self.outputs: dict[tuple[int, int], Tensor] = {}
        """Output of each kept token, by request and position."""
        self.rejected = 0

    def step(self, rows: int) -> tuple[Tensor, AttentionMetadata]:
        self.buffers.refresh(rows)
        md = self.buffers.metadata(rows)
        ids = self.buffers.tensors["input_ids"][:rows]
        layers = zip(self.caches.layers, (4, 128), strict=True)
        return torch.stack([self.model.layer(ids, md, cache, ratio) for cache, ratio in layers], 1), md

    def prefill(self) -> None:
        """Prefill one token per step, so that rings for short steps have room for it."""
        for position in range(max(PROMPTS)):
            running = [position < prompt for prompt in PROMPTS]
            lens = [position + 1 if now else 0 for now in running]
            starts = [sum(running[:r]) for r in range(REQUESTS + 1)]
            ids = [int(self.truth[r, position]) for r in range(REQUESTS) if running[r]]
            self.buffers.load(starts, lens, input_ids=ids, reserved=END)
            self.step(REQUESTS)
        last = [int(self.truth[r, prompt - 1]) for r, prompt in enumerate(PROMPTS)]
        self.buffers.load(range(REQUESTS + 1), PROMPTS, input_ids=last, reserved=END)

    def drafts(self, kept: Tensor) -> Tensor:
        """Return the tokens after token `kept` of each request, a third of them wrong, `[R, query_len - 1]`."""
        rows = torch.arange(REQUESTS)[:, None]
        true = self.truth[rows, kept[:, None] + 1 + torch.arange(self.query_len - 1)]
        return torch.where(torch.rand(true.shape) < 1 / 3, (true + 7) % VOCABULARY, true)

    def decode(self) -> Tensor:
        """Decode until every request stops and return the number of tokens of each."""
        self.prefill()
        query, tensors = 1, self.buffers.tensors
        for _ in range(200):
            lens = tensors["seq_lens"].clone()
            if not lens.any():
                break
            out, md = self.step(REQUESTS * (DRAFTS + 1))
            positions = md.positions[: REQUESTS * query].view(REQUESTS, query)
            chosen = self.truth[torch.arange(REQUESTS)[:, None], positions + 1]
            fed = tensors["input_ids"][: REQUESTS * query].view(REQUESTS, query)
            right = (fed[:, 1:] == chosen[:, :-1]).int().cumprod(1).sum(1)
            num_new = 1 + right
            for r in range(REQUESTS):
                for j in range(int(num_new[r]) if lens[r] else 0):
                    self.outputs[r, int(positions[r, j])] = out[r * query + j]
                self.rejected += query - int(num_new[r]) if lens[r] else 0
            accepted = (lens - query + num_new).clamp_min(0).long()
            drafts = self.drafts(accepted) if self.query_len > 1 else None
            self.buffers.advance(num_new, chosen, drafts, query_len=self.query_len)
            query = self.query_len
        return tensors["overflow"].clone()


def runs(max_step_tokens: int) -> tuple[Run, Run, Tensor]:
    model, truth = Model.random(), torch.randint(VOCABULARY, (REQUESTS, MAX_LEN + 8))
    plain, speculative = Run(model, truth, 1, max_step_tokens), Run(model, truth, 1 + DRAFTS, max_step_tokens)
    ends = plain.decode()
    drafted = speculative.decode()
    assert ends.tolist() == list(END)
    assert all(end - DRAFTS <= length <= end for length, end in zip(drafted.tolist(), END, strict=True))
    return plain, speculative, drafted


def close(x: Tensor, y: Tensor) -> bool:
    """Return whether results are equal up to the order of sums, which depends on the tokens of a step on a CPU."""
    return torch.allclose(x, y, rtol=1e-5, atol=1e-6)


def test_rejected_drafts_change_no_output_and_no_cache() -> None:
    plain, speculative, ends = runs(max_step_tokens=1 + DRAFTS)
    assert speculative.rejected > 40
    reached = {(r, position) for r in range(REQUESTS) for position in range(PROMPTS[r] - 1, int(ends[r]))}
    assert set(speculative.outputs) == reached
    for key in sorted(reached):
        assert close(speculative.outputs[key], plain.outputs[key]), f"request, position {key}"
    for ratio, role in ((4, "entries"), (4, "keys"), (128, "entries")):
        ours, theirs = (getattr(run.caches.layers[ratio != 4].sources[0], role) for run in (speculative, plain))
        group, block = f"{role}_{ratio}", layout.storage_block_size(ratio)
        table = plain.caches.block_tables.tensors()[group]
        for r in range(REQUESTS):
            entries = torch.arange(int(ends[r]) // ratio)
            pages = table[r, entries // block].long()
            assert_bitwise(ours[pages, entries % block], theirs[pages, entries % block], label=f"{group} of {r}")


def test_ring_without_room_for_drafts_changes_outputs() -> None:
    """The comparison detects states that drafts have overwritten in a ring for single tokens."""
    plain, speculative, _ = runs(max_step_tokens=1)
    differing = [p for p, out in speculative.outputs.items() if not close(out, plain.outputs[p])]
    assert len(differing) > 20
