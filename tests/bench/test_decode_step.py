"""Scenario `decode_step`: a whole step runs, agrees with the ops, and is timed warm and cold."""

from __future__ import annotations

import itertools
import time
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from dsv4_compile import bench
from dsv4_compile.backend import dsv4
from dsv4_compile.bench import decode_layers, decode_stages, decode_step, nodes, table, timing
from dsv4_compile.bench.runner import rows_of
from dsv4_compile.config import DeepseekV4Config
from dsv4_compile.modules import DeepseekV4Attention
from dsv4_compile.selection import costs

CPU = torch.device("cpu")
TINY = DeepseekV4Config(
    hidden_size=128, num_heads=2, q_lora_rank=128, o_groups=1, o_lora_rank=128, index_n_heads=2, index_topk=16
)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples are enough for tests, and three layers for a stack."""
    monkeypatch.setattr(timing, "_MAX_REPEATS", 2)
    monkeypatch.setattr(decode_step, "LAYERS", {**decode_step.LAYERS, "stack": (1, 4, 128)})


def found(**only: str) -> list[bench.Problem]:
    return list(decode_step.problems(CPU, {name: {value} for name, value in only.items()}, TINY, 128))


@pytest.mark.parametrize("impl", ["dsv4", "graph", "graph side stream"])
def test_a_checkout_that_is_not_installed_is_measured_too(impl: str) -> None:
    """torch does not know its backend by name."""
    calls: list[dict[str, Any]] = []
    step = mock.Mock(**{"compiled.side_effect": lambda **options: calls.append(options)})
    step.with_side_stream.return_value = step
    prepare, _ = decode_step._prepared(step, impl, [1])
    prepare(1, False)
    assert calls == [{"backend": dsv4}]


@pytest.mark.parametrize("weights", decode_step.WEIGHTS)
def test_replays_of_a_step_agree_with_the_ops_and_are_timed(weights: str) -> None:
    only = {"weights": {weights}, "impl": {"eager", "eager graph"}}
    rows = [row for p in decode_step.problems(CPU, only, TINY, 128) for row in rows_of(p, only, CPU)]
    assert [(row["layer"], row["impl"], row["status"]) for row in rows] == [
        (layer, impl, "ok") for layer in decode_step.LAYERS for impl in ("eager", "eager graph")
    ], rows
    assert rows[0]["context"] == 128


class Events:
    """A timer that records its flushes and events as a list of names."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def begin(self, part: int) -> None:
        self.found += ["flush", f"begin {part}"]

    def end(self, part: int) -> None:
        self.found.append(f"end {part}")


def test_the_cache_is_flushed_before_each_layer_and_events_are_around_the_layer_alone() -> None:
    events = Events()
    layers = [nn.Identity() for _ in range(3)]
    for index, layer in enumerate(layers):
        layer.forward = lambda *args, index=index: events.found.append(f"layer {index}")  # type: ignore[method-assign]
    decode_layers.Layers(layers, events)(None, None, [None] * 3)  # type: ignore[arg-type]
    assert events.found == [name for i in range(3) for name in ("flush", f"begin {i}", f"layer {i}", f"end {i}")]


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, Any, Any]:
    """Return the count of flushes, a step of three layers, and how it is timed cold."""
    flushes = torch.zeros((), dtype=torch.int64)
    monkeypatch.setattr(timing.ColdTimer, "flush", lambda self: flushes.add_(1))
    step = decode_layers.DecodeStep.build(TINY.with_layers(1, 4, 128), False, 2, 128, CPU)
    prepare, time_cold = decode_step._prepared(step, "graph", [2])
    assert time_cold is not None
    return flushes, prepare(2, False), partial(time_cold, 2, False)


HIDDEN = torch.randn(2, TINY.hidden_size, generator=torch.Generator().manual_seed(3)).bfloat16()


def test_a_replay_that_is_timed_cold_flushes_before_each_layer_and_has_the_results_of_a_warm_one_that_never_does(
    cold: tuple[torch.Tensor, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes, warm, time_cold = cold
    warm(HIDDEN)
    assert flushes == 0
    with pytest.raises(AssertionError, match="with flushes between layers, layer 0: the relative"):
        time_cold(lambda *args: [out * 1.2 for out in warm(*args)], (HIDDEN,))
    assert time_cold(warm, (HIDDEN,)).us > 0
    monkeypatch.setattr(timing.ColdTimer, "measure", lambda self, replay: replay)
    replay = time_cold(warm, (HIDDEN,))
    flushes.zero_()
    got = [out.clone() for out in replay()]
    assert flushes == 3
    assert decode_step.differs(got, warm(HIDDEN)) == ""
    assert flushes == 3


def test_graphs_alone_are_timed_cold() -> None:
    for impl in decode_step.IMPLEMENTATIONS:
        _, time_cold = decode_step._prepared(mock.Mock(), impl, [1])
        assert (time_cold is not None) == (impl == "graph")
    assert found(layer="SWA", weights="bfloat16", impl="graph")[0].time_cold is None


def test_layers_of_a_kind_share_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    step = decode_layers.DecodeStep.build(TINY.with_layers(4, 128, 4, 128, 4), False, 2, 256, CPU)
    runner = step.runner(step.compiled(backend=backend), (2,))
    assert len(graphs) == 2
    hidden = torch.randn(2, step.width).bfloat16()
    got, want = [out.clone() for out in step.replay(runner, 2)(hidden)], step.call(step.layers, 2)(hidden)
    assert len(want) == 5
    assert decode_step.differs(got, want) == ""


def test_a_wrong_step_is_found() -> None:
    problem = found(layer="CSA", weights="bfloat16", impl="eager")[0]
    want = problem.reference(*problem.make(0))
    assert decode_step.differs(want, want) == ""
    assert decode_step.differs([want[0] * 1.2], want) != ""
    assert decode_step.differs([want[0] * torch.tensor([[1.0], [3.0]])], want) != ""
    assert decode_step.differs(problem.reference(*problem.make(1)), want) != ""


def moved(want: torch.Tensor, tokens: slice, distance: float) -> list[torch.Tensor]:
    """Move some tokens by `distance` times their norm, each in a different direction."""
    got, step = want.clone(), torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    step -= (step * want).sum(-1, keepdim=True) / want.square().sum(-1, keepdim=True) * want
    got[tokens] += (step / step.norm(dim=-1, keepdim=True) * want.norm(dim=-1, keepdim=True) * distance)[tokens]
    return [got]


@pytest.mark.parametrize("keys", [0, 640])
@pytest.mark.parametrize(("tokens", "distance"), [(slice(4), 0.49), (slice(1), 0.49), (slice(7, 8), 0.2)])
def test_one_wrong_token_of_eight_is_found(keys: int, tokens: slice, distance: float) -> None:
    want = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    wrong = decode_step.differs(moved(want, tokens, distance), [want], [keys])
    assert wrong.startswith(
        f"layer 0: the relative distance of token {tokens.start or 0} is {distance:.3f}, at most 0."
    )


def test_a_token_of_another_request_and_one_that_is_not_a_number_are_found() -> None:
    want = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    for change in (lambda x: x[4].copy_(x[5]), lambda x: x[4].fill_(torch.nan), lambda x: x[4].zero_()):
        got = want.clone()
        change(got)
        assert "token 4" in decode_step.differs([got], [want], [640])


def test_each_token_is_held_to_the_tolerance_and_only_few_of_an_indexer_may_exchange_entries() -> None:
    """An exchanged key of 640 is 5.6 % of the norm; with an indexer one token of eight may have a few of them."""
    want = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    assert decode_step.differs(moved(want, slice(8), 0.029), [want]) == ""
    assert "median" in decode_step.differs(moved(want, slice(8), 0.031), [want])
    assert decode_step.differs(moved(want, slice(1), 0.079), [want]) == ""
    assert "token 0" in decode_step.differs(moved(want, slice(1), 0.081), [want])
    assert decode_step.differs(moved(want, slice(1), 0.081), [want], [640]) == ""
    assert "2 tokens" in decode_step.differs(moved(want, slice(2), 0.081), [want], [640])
    assert "token 0" in decode_step.differs(moved(want, slice(1), 0.14), [want], [640])


def test_layers_that_select_some_of_their_entries_have_an_indexer() -> None:
    flash = DeepseekV4Config.flash().with_layers(1, 128, 4)
    assert [decode_step.selected_keys(flash, layer, 16384) for layer in range(3)] == [0, 0, 640]
    assert decode_step.selected_keys(flash, 2, 2048) == 0


@pytest.mark.parametrize(("fp8", "floors"), [(False, (50, 52, 59)), (True, (25, 27, 32))])
def test_the_cost_of_a_layer_is_its_weights_and_what_its_request_attends(fp8: bool, floors: tuple[int, ...]) -> None:
    flash = DeepseekV4Config.flash().with_layers(1, 128, 4)
    for layer, floor in enumerate(floors):
        cost = decode_stages.total(decode_stages.stage_costs(flash, layer, fp8, 1, 16384))
        module = DeepseekV4Attention(flash, layer, fp8=fp8, device="meta", max_seq_len=1)
        assert cost.bytes == pytest.approx(sum(p.nbytes for p in module.parameters()), rel=0.08)
        assert costs.floor_us(cost, costs.H200) == pytest.approx(floor, rel=0.05)


def test_few_requests_close_a_group_if_their_groups_end_apart() -> None:
    flash = DeepseekV4Config.flash().with_layers(128)
    together, apart = (decode_stages.stage_costs(flash, 0, False, 256, 16384, spread) for spread in (False, True))
    assert together["insert"].bytes > 20 * apart["insert"].bytes
    assert all(together[stage] == apart[stage] for stage in together if stage != "insert")
    step = decode_layers.DecodeStep.build(TINY.with_layers(128, 4), False, 130, 512, CPU)
    for spread, closing in ((False, (130, 130)), (True, (2, 33))):
        step.load(130, spread)
        written = [int((step.buffers.tensors[f"{group}_slots"] >= 0).sum()) for group in ("entries_128", "entries_4")]
        assert tuple(written) == closing


def test_peers_are_compared_with_the_steps_of_the_most_work() -> None:
    h200, h100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
    assert decode_step.published("CSA", "fp8", "together", 8, h200) == {"peers": 103}
    assert decode_step.published("CSA", "fp8", "together", 8, h100) == {}
    assert decode_step.published("CSA", "fp8", "apart", 8, h200) == {}
    assert decode_step.published("CSA", "fp8", "together", 7, h200) == {}
    assert found(layer="HCA", weights="fp8", impl="eager")[0].published == {}


def test_the_host_time_of_each_call_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(1e-3))
    calls = itertools.count()
    times = nodes.host_us(lambda: time.sleep(2e-3) if next(calls) % 25 == 0 else None)
    assert 0 <= times["host_us"] < 1000 <= times["host_p99_us"]


def test_the_overlap_of_two_kernels_counts_once() -> None:
    assert nodes._exclusive([(0.0, 4.0), (1.0, 6.0), (2.0, 3.0), (7.0, 9.0)]) == [4.0, 2.0, 0.0, 2.0]


def test_nodes_are_found_by_layer_and_by_stage() -> None:
    csa = ["nvjet_a", "preprocess_insert_kernel", "nvjet_b", "indexer_q_rope_quant_kernel", "indexer_score_kernel"]
    csa += ["select_topk_kernel", "sparse_mla_decode_sm90_kernel", "grouped_matmul_kernel", "nvjet_a", "reduce"]
    assert nodes.repeated(["batch_metadata_kernel", *csa * 3], 3) == (1, 10)
    assert nodes.repeated(["batch_metadata_kernel", *csa, *reversed(csa)], 2) == (0, 0)
    times = decode_stages.stage_times([nodes.Node(name, 1.0) for name in csa])
    assert {stage: len(kernels) for stage, kernels in times.items()} == {
        "of hidden": 1,
        "insert": 1,
        "of latent": 1,
        "indexer queries": 1,
        "indexer": 2,
        "attention": 1,
        "wo_a": 1,
        "wo_b": 2,
    }
    generated = ["triton_per_fused_split_0" if "queries" in name or "q_rope" in name else name for name in csa]
    assert set(decode_stages.stage_times([nodes.Node(name, 1.0) for name in generated])) == set(times)
    assert set(times) == set(decode_stages.stage_costs(DeepseekV4Config.flash().with_layers(4), 0, False, 1, 512))


def test_the_details_of_a_row_are_printed() -> None:
    stages = {"insert": {"us": 2.5, "floor_us": 0.1, "kernels": []}}
    row = {"op": "decode_step", "tokens": 8, "impl": "graph", "us": 1.0, "published_us": {}, "launches": 6}
    row |= {"note": "", "gb_s": 1.0, "of_copy": 0.1, "clock": "stream", "details": {"host_us": 9.5, "stages": stages}}
    text = table._block("decode_step", [row])
    assert "graph, 8: host_us 9.5" in text and "insert 2.5 (0.1)" in text
