"""Scenario `decode_step`: a whole step runs, is gated, and replays what the ops give."""

from __future__ import annotations

import itertools
import runpy
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

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


@pytest.mark.parametrize("impl", ["dsv4", "graph", "graph aside"])
def test_a_checkout_that_is_not_installed_is_measured_too(impl: str) -> None:
    """Its backend is none that torch knows by name."""
    given: list[dict[str, Any]] = []
    step = mock.Mock(**{"compiled.side_effect": lambda **options: given.append(options)})
    step.aside.return_value = step
    decode_step._prepared(step, impl, [1])(1, False)
    assert given == [{"backend": dsv4}]


@pytest.mark.parametrize("weights", decode_step.WEIGHTS)
def test_replays_of_a_step_agree_with_the_ops_and_are_timed(weights: str) -> None:
    only = {"weights": {weights}, "impl": {"eager", "eager graph"}}
    rows = [row for p in decode_step.problems(CPU, only, TINY, 128) for row in rows_of(p, only, CPU)]
    assert [(row["layer"], row["impl"], row["status"]) for row in rows] == [
        (layer, impl, "ok") for layer in decode_step.LAYERS for impl in ("eager", "eager graph")
    ], rows
    assert rows[0]["context"] == 128


def test_other_memory_is_read_behind_each_layer_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = torch.zeros((), dtype=torch.int64)
    monkeypatch.setattr(decode_step, "reads_of_others", lambda device: lambda: reads.add_(1))
    (problem,) = found(layer="stack", weights="bfloat16", impl="graph cold")
    step = problem.implementations["graph cold"]()
    assert decode_step.differs(step(*problem.make(0)), problem.reference(*problem.make(0))) == ""
    reads.zero_()
    step(*problem.make(0))
    assert problem.beside is not None and reads == 3
    problem.beside()
    assert reads == 6
    (plain,) = found(layer="stack", weights="bfloat16", impl="graph")
    assert plain.beside is None


def test_reads_of_other_memory_are_larger_than_a_cache() -> None:
    read = decode_layers.reads_of_others(CPU)
    assert read().shape == ()
    assert read.args[0].nbytes == decode_layers._OTHERS["cpu"] < 60 << 20 < decode_layers._OTHERS["cuda"]


def test_layers_of_a_kind_share_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    step = decode_layers.Step.build(TINY.with_layers(4, 128, 4, 128, 4), False, 2, 256, CPU)
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


@pytest.mark.parametrize(("fp8", "floors"), [(False, (50, 52, 59)), (True, (25, 27, 32))])
def test_the_cost_of_a_layer_is_its_weights_and_what_its_request_attends(fp8: bool, floors: tuple[int, ...]) -> None:
    flash = DeepseekV4Config.flash().with_layers(1, 128, 4)
    for layer, floor in enumerate(floors):
        cost = decode_stages.total(decode_stages.stage_costs(flash, layer, fp8, 1, 16384))
        module = DeepseekV4Attention(flash, layer, fp8=fp8, device="meta", max_seq_len=1)
        assert cost.bytes == pytest.approx(sum(p.nbytes for p in module.parameters()), rel=0.08)
        assert costs.floor_us(cost, costs.H200) == pytest.approx(floor, rel=0.05)


def test_requests_whose_groups_end_apart_close_few() -> None:
    flash = DeepseekV4Config.flash().with_layers(128)
    together, apart = (decode_stages.stage_costs(flash, 0, False, 256, 16384, each) for each in (False, True))
    assert together["insert"].bytes > 20 * apart["insert"].bytes
    assert all(together[stage] == apart[stage] for stage in together if stage != "insert")
    step = decode_layers.Step.build(TINY.with_layers(128, 4), False, 130, 512, CPU)
    for each, closing in ((False, (130, 130)), (True, (2, 33))):
        step.load(130, each)
        written = [int((step.buffers.tensors[f"{group}_slots"] >= 0).sum()) for group in ("c128", "c4")]
        assert tuple(written) == closing


def test_peers_stand_beside_steps_with_as_much_to_do_at_least() -> None:
    assert decode_step.published("CSA", "fp8", "together", 8) == {"peers": 103}
    assert decode_step.published("CSA", "fp8", "apart", 8) == decode_step.published("CSA", "fp8", "together", 7) == {}
    assert found(layer="HCA", weights="fp8", impl="eager")[0].published == {}


def test_host_time_is_of_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(1e-3))
    calls = itertools.count()
    found = nodes.host_us(lambda: time.sleep(2e-3) if next(calls) % 25 == 0 else None)
    assert 0 <= found["host_us"] < 1000 <= found["host_p99_us"]


def test_what_overlaps_counts_once() -> None:
    assert nodes._exclusive([(0.0, 4.0), (1.0, 6.0), (2.0, 3.0), (7.0, 9.0)]) == [4.0, 2.0, 0.0, 2.0]


def test_nodes_are_found_by_layer_and_by_stage() -> None:
    csa = ["nvjet_a", "preprocess_insert_kernel", "nvjet_b", "indexer_q_rope_quant_kernel", "indexer_score_kernel"]
    csa += ["select_topk_kernel", "sparse_mla_decode_hopper_kernel", "grouped_matmul_kernel", "nvjet_a", "reduce"]
    assert nodes.repeated(["batch_metadata_kernel", *csa * 3], 3) == (1, 10)
    assert nodes.repeated(["batch_metadata_kernel", *csa, *reversed(csa)], 2) == (0, 0)
    times = decode_stages.stage_times([nodes.Node(name, 1.0) for name in csa])
    assert {stage: len(own) for stage, own in times.items()} == {
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


def test_a_row_with_details_is_printed_with_them() -> None:
    stages = {"insert": {"us": 2.5, "floor_us": 0.1, "kernels": []}}
    row = {"op": "decode_step", "tokens": 8, "impl": "graph", "us": 1.0, "published_us": {}, "launches": 6}
    row |= {"note": "", "gb_s": 1.0, "of_copy": 0.1, "clock": "stream", "details": {"host_us": 9.5, "stages": stages}}
    text = table._block("decode_step", [row])
    assert "graph, 8: host_us 9.5" in text and "insert 2.5 (0.1)" in text


def test_compile_times_are_those_of_three_kinds_at_two_sizes() -> None:
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    example = Path(__file__).parents[2] / "examples" / "benchmarks" / "compile_time.py"
    found = runpy.run_path(str(example))["measure"](False, CPU, TINY, backend)
    assert len(graphs) == 6
    assert 0 < found["compile_s"] <= found["first_step_s"]
