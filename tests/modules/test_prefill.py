"""Tests that prefill through a workspace equals paged attention for the same tokens of the same step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4_compile.cache import LayerCache
from dsv4_compile.errors import DSV4Error
from dsv4_compile.metadata import BatchSplit, BlockTables, split_decodes_and_prefills
from dsv4_compile.modules.prefill import prefill_attention, prefill_topk
from dsv4_compile.modules.prefill_plan import PrefillStep, plan_prefill
from dsv4_compile.testing import assert_bitwise, assert_close, poison_, refuse_synchronization
from tests.modules.engine import KINDS, Engine, our_layer
from tests.support import hf_layer


class Recorder(TorchDispatchMode):
    """Records the arguments and results of attention and of the indexer's selection."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls[func.__name__.removesuffix(".default")] = args, result
        return result


class MixedStep:
    """A step of a layer over filled caches, with decodes first, then prefills, then padding."""

    def __init__(self, kind: str, past: list[int], queries: list[int], padding: int, **options: Any) -> None:
        source = hf_layer.hf_attention(hf_layer.hf_config(kind, options.pop("dims", hf_layer.SMALL)))
        layer = our_layer(source, options.pop("kv", "float32"), 512)
        engine, hidden = Engine(layer, len(past), 512), source.config.hidden_size
        engine.step([torch.randn(n, hidden) for n in past])
        with Recorder() as recorder:
            engine.step([torch.randn(n, hidden) for n in queries], padding)
        (self.q, *_), (self.out, self.lse) = recorder.calls["sparse_mla_decode"]
        self.calls, self.layer, self.cache = recorder.calls, layer, engine.paged.layers[0]
        self.starts = torch.tensor([0, *queries]).cumsum(0).tolist()
        self.lens = engine.lengths
        self.metadata = engine.metadata(queries, self.q.shape[0])
        self.split = split_decodes_and_prefills(self.starts, num_tokens=self.q.shape[0])
        self.prefill = slice(self.split.num_decode_tokens, None)
        self.batch: dict[str, Any] = {
            "query_start_loc": torch.tensor(self.starts, dtype=torch.int32),
            "seq_lens": torch.tensor(self.lens, dtype=torch.int32),
            "block_tables": engine.paged.block_tables,
        }

    def plan(self, max_rows: int) -> list[PrefillStep]:
        window = self.layer.config.sliding_window
        return plan_prefill(
            self.starts, self.lens, self.split, window=window, ratio=self.layer.ratio, max_rows=max_rows
        )

    def attend(self, steps: list[PrefillStep], rows: int, topk: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.bfloat16 if self.layer.cache_format.kv == "fp8_ds_mla" else self.q.dtype
        return prefill_attention(
            self.q[self.prefill],
            poison_(torch.empty(rows, self.q.shape[2], dtype=dtype)),
            self.cache,
            steps,
            **self.batch,
            window=self.layer.config.sliding_window,
            ratio=self.layer.ratio,
            cache_format=self.layer.cache_format.kv,
            scale=self.layer.scale,
            attn_sink=self.layer.attn_sink,
            topk_indices=topk,
        )

    def topk(self, steps: list[PrefillStep], max_logits_bytes: int = 2**20) -> Tensor:
        (q, q_scale, weights, *_), _ = self.calls["indexer_logits_topk"]
        assert self.layer.indexer is not None
        return prefill_topk(
            q[self.prefill],
            q_scale[self.prefill],
            weights[self.prefill],
            self.cache,
            steps,
            **self.batch,
            token_to_req=self.metadata.token_to_req[self.prefill],
            context_lens=self.metadata.sources[4].context_lens[self.prefill],
            cache_format=self.layer.cache_format.indexer,
            topk=self.layer.indexer.topk,
            max_logits_bytes=max_logits_bytes,
        )


def by_request(rows: Tensor) -> list[set[int]]:
    return [set(row) - {-1} for row in rows.tolist()]


@pytest.mark.parametrize("rows", [2000, 430])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_step_equals_paged_attention(kind: str, rows: int) -> None:
    """Two decodes, then a whole prompt, a chunk of a long one, a short one, and one that ends at a group boundary."""
    step = MixedStep(kind, [140, 9, 0, 200, 0, 127], [1, 1, 150, 30, 2, 129], padding=3)
    assert step.split == BatchSplit(2, 4, 2, 150 + 30 + 2 + 129 + 3)
    steps = step.plan(rows)
    assert (len(steps) > 1) == (rows == 430)
    topk = None
    if kind == "csa":
        topk = step.topk(steps)
        assert by_request(topk) == by_request(step.calls["indexer_logits_topk"][1][step.prefill])
    out, _, lse = step.attend(steps, rows, topk)
    assert_close(out, step.out[step.prefill], "attention_float32")
    assert_close(lse, step.lse[step.prefill], "lse")
    assert not out[-3:].any()


def test_quantised_caches() -> None:
    step = MixedStep("csa", [20, 0], [1, 26], padding=0, dims=hf_layer.FLASH, kv="fp8_ds_mla")
    steps = step.plan(400)
    out, _, lse = step.attend(steps, 400, step.topk(steps))
    assert_close(out, step.out[step.prefill], "attention_float32")
    assert_close(lse, step.lse[step.prefill], "lse")


def test_the_bound_on_logits_changes_no_result_and_nothing_synchronises() -> None:
    step = MixedStep("csa", [30, 0], [40, 61], padding=1)
    steps = step.plan(800)
    want = step.topk(steps)
    with refuse_synchronization():
        bounded = step.topk(steps, 1000)
        step.attend(steps, 800, want)
    assert_bitwise(bounded, want)


def test_a_step_without_prefills_attends_nothing() -> None:
    step = MixedStep("hca", [30, 4], [1, 1], padding=2)
    assert step.plan(100) == []
    assert step.attend([], 100, None)[0].shape[0] == 0
    out, top, lse = prefill_attention(
        torch.randn(2, 3, 16),
        torch.full((4, 16), torch.nan),
        LayerCache(torch.empty(0)),
        [],
        query_start_loc=torch.zeros(1, dtype=torch.int32),
        seq_lens=torch.zeros(0, dtype=torch.int32),
        block_tables=BlockTables(torch.empty(0, 0, dtype=torch.int32)),
        window=8,
        ratio=1,
        cache_format="plain",
        scale=1.0,
    )
    assert not out.any() and top.isneginf().all() and lse.isposinf().all()


def test_plans_cover_every_token_once_within_the_workspace(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        queries = [1] * rng.randint(0, 3) + [rng.randint(2, 60) for _ in range(rng.randint(0, 6))]
        lens = [q + rng.randint(0, 300) for q in queries]
        starts = [sum(queries[:r]) for r in range(len(queries) + 1)]
        tokens, ratio = starts[-1] + rng.randint(0, 3), rng.choice((1, 4, 128))
        split = split_decodes_and_prefills(starts, num_tokens=tokens)
        steps = plan_prefill(starts, lens, split, window=16, ratio=ratio, max_rows=500)
        covered = [t for step in steps for t in range(step.tokens.start, step.tokens.stop)]
        assert covered == list(range(split.num_prefill_tokens))
        for step in steps:
            assert (step.requests.stop - step.requests.start) * step.m <= 500
            assert step.entries == (sum(n // ratio for n in lens[step.requests]) if ratio > 1 else 0)


def test_a_workspace_that_is_too_small_raises() -> None:
    step = MixedStep("swa", [1], [89], padding=0)
    with pytest.raises(DSV4Error, match="E204"):
        step.plan(20)
    with pytest.raises(DSV4Error, match="a workspace of 50 rows for"):
        step.attend(step.plan(90), 50, None)


@pytest.mark.parametrize("first", [0, 3])
def test_queries_that_the_plan_does_not_cover_raise(first: int) -> None:
    step = MixedStep("csa", [5, 0], [1, 20], padding=0)
    steps, step.prefill = step.plan(400), slice(first, None)
    message = rf"(?s)E201.*queries of {21 - first} tokens, steps of 20.*fix   pass q\[split.num_decode_tokens:\]"
    with pytest.raises(DSV4Error, match=message):
        step.attend(steps, 400, None)
    with pytest.raises(DSV4Error, match=message):
        step.topk(steps)


def test_the_cache_of_another_layer_raises() -> None:
    step = MixedStep("csa", [5], [20], padding=0)
    steps, step.cache = step.plan(400), LayerCache(step.cache.window)
    with pytest.raises(DSV4Error, match=r"(?s)E201.*a cache without entries, with ratio 4"):
        step.attend(steps, 400, None)
    with pytest.raises(DSV4Error, match=r"(?s)E201.*a cache without keys, with ratio 4"):
        step.topk(steps)


def test_a_plan_takes_the_whole_batch() -> None:
    split = split_decodes_and_prefills([0, 1, 20])
    with pytest.raises(DSV4Error, match=r"(?s)E201.*fix   pass the whole batch"):
        plan_prefill([0, 1, 20], [30], split, window=8, ratio=1, max_rows=100)
