"""`dsv4 bench`: what is timed is right, what is wrong has no number, and a record says where it comes from."""

from __future__ import annotations

import importlib.util
import json
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import bench, cli, costs, measured, progress
from dsv4_compile.bench import gate, pictures, preprocess, preprocess_tiles, runner, table, timing
from dsv4_compile.config import DeepseekV4Config
from dsv4_compile.errors import fail

CPU = torch.device("cpu")
TINY = DeepseekV4Config(num_heads=2, o_groups=1, q_lora_rank=48)


def double(x: Tensor, out: Tensor) -> Tensor:
    out.copy_(x + 1)
    return x * 2


def problem(**implementations: Callable[[], Callable[..., Any]]) -> bench.Problem:
    return bench.Problem(
        op="double",
        params={"heads": 3, "tokens": 4},
        make=lambda seed: (torch.full((4,), seed + 1.0), torch.zeros(4)),
        written=(1,),
        cost=costs.Cost(48, 0),
        reference=double,
        implementations=implementations,
        published={"somebody": 1.5},
    )


def rows(**implementations: Callable[[], Callable[..., Any]]) -> dict[str, dict[str, Any]]:
    return {row["impl"]: row for row in runner.rows_of(problem(**implementations), {}, CPU)}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples are enough for tests."""
    monkeypatch.setattr(timing, "_MAX_REPEATS", 2)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scenario with a small layer and few tokens."""
    original = preprocess.problems

    def problems(device: torch.device, only: bench.Only) -> Iterator[bench.Problem]:
        return original(device, only, configs=(TINY,), tokens=(1, 5))

    monkeypatch.setattr(preprocess, "problems", problems)


def test_what_agrees_with_the_reference_is_timed() -> None:
    row = rows(same=lambda: double)["same"]
    assert row["us"] > 0
    assert (row["status"], row["clock"], row["cold_us"], row["launches"]) == ("ok", "wall clock", None, None)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, out: (out.copy_(x + 1), x * 2.001)[1],
        lambda x, out: x * 2,
        lambda x, out: (out.copy_(x + 1), torch.full_like(x, torch.nan))[1],
        lambda x, out: (out.copy_(x + 1), (x * 2).double())[1],
        lambda x, out: (out.copy_(x + 1), torch.stack((x * 2, x), 1)[:, 0])[1],
    ],
    ids=["a value", "an argument not written", "NaN", "dtype", "strides"],
)
def test_what_is_wrong_gets_no_number(wrong: Callable[..., Any]) -> None:
    found = rows(wrong=lambda: wrong, right=lambda: double)
    assert (found["wrong"]["status"], found["wrong"]["us"]) == ("wrong", None)
    assert found["wrong"]["note"].startswith("result ")
    assert found["right"]["us"] > 0


def test_what_is_missing_says_why_and_stops_nobody() -> None:
    def refuse() -> Callable[..., Any]:
        fail("E302", got="double", why="it is Friday")

    found = rows(gone=refuse, right=lambda: double)
    assert (found["gone"]["status"], found["gone"]["note"], found["gone"]["us"]) == (
        "unavailable",
        "it is Friday",
        None,
    )
    assert found["right"]["us"] > 0


def test_a_cold_figure_needs_more_data_than_the_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = type("Facts", (), {"L2_cache_size": 50 * 2**20})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    cuda = torch.device("cuda")
    assert timing.cold_sets(200 * 2**20, cuda) == 1
    assert timing.cold_sets(2**20, cuda) == 101
    assert timing.cold_sets(100 * 2**10, cuda) == 0
    assert timing.cold_sets(2**20, CPU) == 0


def test_a_few_quantised_values_may_be_neighbours_and_no_more() -> None:
    want = torch.zeros(100_000, dtype=torch.uint8)
    for flipped, agrees in ((0, True), (3, True), (4, False)):
        got = want.clone()
        got[:flipped] = 1
        assert (gate.disagreement([got], [want]) == "") is agrees


def test_results_are_compared_in_chunks_to_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "CHUNK", 8)
    want = torch.ones(7, 3)
    got = want.clone()
    assert gate.disagreement([got], [want]) == ""
    got[6, 2] = 1.1
    assert gate.disagreement([got], [want]) == "result 0: 1 of 21 elements are wrong"
    assert gate.disagreement([want[:0]], [want[:0]]) == ""


@pytest.mark.usefixtures("tiny")
def test_every_op_of_the_scenario_agrees_with_itself_and_compiles() -> None:
    limits = {"impl": {"eager", "ir"}, "op": {"fused_q_kv_rmsnorm", "q_norm_rope_kv_insert", "inv_rope_fp8_quant"}}
    record = bench.run("preprocess", only=limits, device=CPU)
    assert [(row["op"], row["tokens"], row["impl"]) for row in record["rows"]] == [
        (op, tokens, impl)
        for op in ("fused_q_kv_rmsnorm", "q_norm_rope_kv_insert", "inv_rope_fp8_quant")
        for tokens in (1, 5)
        for impl in ("eager", "ir")
    ]
    assert {row["status"] for row in record["rows"]} <= {"ok", "unavailable"}
    assert all(row["status"] == "ok" for row in record["rows"] if row["impl"] == "eager")


@pytest.mark.usefixtures("tiny")
def test_a_run_that_is_cut_short_has_told_its_cases_and_left_a_record(tmp_path: Path) -> None:
    told: list[str] = []

    def cut(record: dict[str, Any]) -> None:
        bench.write(record, tmp_path)
        raise KeyboardInterrupt

    only = {"op": {"inv_rope"}, "impl": {"eager"}}
    with progress.listen(lambda event: told.append(event.note)), pytest.raises(KeyboardInterrupt):
        bench.run("preprocess", only=only, device=CPU, so_far=cut)
    [row] = json.loads((tmp_path / "preprocess.json").read_text())["rows"]
    assert any(f"eager: {row['us']:.2f} us" in note for note in told)


@pytest.mark.usefixtures("tiny")
def test_a_run_waits_for_its_turn_once_when_it_is_ready_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    measure = timing.measure
    monkeypatch.setattr(timing, "measure", lambda *args, **kwargs: order.append("measure") or measure(*args, **kwargs))
    monkeypatch.setattr(timing, "copy_rate", lambda device: order.append("copy") or 1e9)
    only = {"op": {"inv_rope"}, "impl": {"eager"}}
    record = bench.run("preprocess", only=only, device=CPU, turn=lambda: order.append("turn"))
    assert record["copy_gb_s"] == 1.0
    assert order == ["turn", "copy", *["measure"] * len(record["rows"])]


@pytest.mark.usefixtures("tiny")
def test_a_record_says_when_kernels_were_trusted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--only", "op=inv_rope", "--only", "impl=eager", "--device", "cpu", "--turn", str(tmp_path / "turn")]
    assert cli.main(["bench", "preprocess", *limits, "--trust", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["command"].endswith("--device cpu --trust")


@pytest.mark.usefixtures("tiny")
def test_arguments_of_a_seed_repeat_in_fresh_memory() -> None:
    for found in preprocess.problems(CPU, {"tokens": {"5"}}):
        first, again, other = ([a for a in found.make(seed) if isinstance(a, Tensor)] for seed in (0, 0, 1))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert all(a.data_ptr() != b.data_ptr() for a, b in zip(first, again, strict=True))
        assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.usefixtures("tiny")
def test_traffic_is_what_any_implementation_must_move() -> None:
    """Two heads of 512, a latent of 48. A token reads its position and 64 cosines and sines: 8 + 256 bytes."""
    angles, row, weights = 8 + 256, 512 * 2, {"fused_q_kv_rmsnorm": 48 * 2 + 512 * 2}
    a_token = {
        "fused_q_kv_rmsnorm": 2 * (48 * 2 + row),
        "q_norm_rope": angles + 2 * 2 * row,
        "kv_rope_insert": angles + row + 8 + 584,
        "q_norm_rope_kv_insert": angles + 2 * 2 * row + row + 8 + 584,
        "inv_rope": angles + 2 * 2 * row,
        "inv_rope_fp8_quant": angles + 2 * (row + 512 + 4 * 4),
    }
    assert {p.op: p.cost.bytes for p in preprocess.problems(CPU, {"tokens": {"5"}})} == {
        op: 5 * size + weights.get(op, 0) for op, size in a_token.items()
    }


@pytest.mark.usefixtures("tiny")
def test_the_command_prints_a_table_and_leaves_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--only", "op=inv_rope", "--only", "impl=eager,triton", "--device", "cpu"]
    assert cli.main(["bench", "preprocess", *limits, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "preprocess.json").read_text())
    assert (tmp_path / "preprocess.txt").read_text() == printed
    assert record["command"] == "dsv4 bench preprocess --only op=inv_rope --only impl=eager,triton --device cpu"
    assert {"machine", "driver", "torch", "triton", "date", "copy_gb_s"} <= set(record)
    for line in ("inv_rope, heads 2: us, wall clock", "triton, unavailable: hand-written kernels run on GPUs"):
        assert line in printed
    assert (tmp_path / "preprocess.png").exists() is bool(importlib.util.find_spec("matplotlib"))


@pytest.mark.usefixtures("tiny")
def test_tiles_are_tried_through_the_function_that_chooses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def launcher(op: str) -> Callable[..., Any]:
        module, choice = preprocess_tiles.module_of(op), preprocess_tiles.CHOICES[op].function
        return lambda *args: seen.append((op, getattr(module, choice)(1)))

    monkeypatch.setattr(preprocess_tiles, "launcher", launcher)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for found in preprocess_tiles.problems(CPU, {"tokens": {"5"}, "op": {"inv_rope", "q_norm_rope"}}):
        for prepare in found.implementations.values():
            prepare()()
        names = list(found.implementations)
        assert names[:2] == (["h1", "h2"] if found.op == "inv_rope" else ["r1 w1", "r2 w1"])
    assert [value for op, value in seen if op == "inv_rope"] == [1, 2, 4, 8]
    assert [value for op, value in seen if op == "q_norm_rope"][:2] == [(1, 1), (2, 1)]
    assert set(preprocess_tiles.CHOICES) == set(preprocess.OPS)


@pytest.mark.usefixtures("tiny")
def test_tune_hands_the_record_to_the_table_of_measurements(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(measured, "update", lambda record: seen.append(record) or 0)
    limits = ["--only", "op=inv_rope", "--only", "impl=eager", "--only", "tokens=5", "--device", "cpu"]
    assert cli.main(["bench", "preprocess", *limits, "--tune"]) == 0
    assert seen[0]["rows"][0]["elements"] == 5 * 2 * 512
    assert capsys.readouterr().err.splitlines()[-1].startswith("0 sizes of both ir and triton written to ")


@pytest.mark.usefixtures("tiny")
def test_a_wrong_implementation_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gate, "disagreement", lambda got, want: "result 0 is upside down")
    limits = ["--only", "op=inv_rope", "--only", "impl=eager", "--only", "tokens=1", "--device", "cpu"]
    assert cli.main(["bench", "preprocess", *limits, "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["status"], row["note"], row["us"]) == ("wrong", "result 0 is upside down", None)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nothing"], "no scenario 'nothing'; there is attention, attention_backends"),
        (["preprocess", "--only", "token=1"], "no column 'token' in preprocess; there is op, heads, tokens, impl"),
        (["preprocess", "--only", "tokens=3", "--device", "cpu"], "nothing is left to measure after --only tokens=3"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "copy_rate", lambda device: 1e9)
    assert cli.main(["bench", *argv]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(message)


def test_the_command_lists_the_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(bench.SCENARIOS)


def test_the_example_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "benchmarks" / "preprocess.py"
    monkeypatch.setattr("sys.argv", [str(example), "--only", "size=1"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(example), run_name="__main__")
    assert left.value.code == 2
    assert "no column 'size'" in capsys.readouterr().err


def test_the_ceiling_is_the_fastest_copy_and_each_way_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []

    def one_way(call: Callable[..., Any], sets: Any, device: torch.device) -> timing.Timing:
        result, (source,) = call(*sets[0]), sets[0]
        assert torch.equal(result.abs(), source.abs())
        assert result.data_ptr() != source.data_ptr()
        copied.append(source.numel() * source.element_size())
        return timing.Timing(1e6 / len(copied), None, "")

    monkeypatch.setattr(timing, "measure", one_way)
    assert timing.copy_rate(CPU) == 2 * copied[0] * len(copied)
    assert len(copied) > 1


def test_a_table_shows_warm_and_cold_times_the_best_and_the_launches() -> None:
    row = {"op": "x", "heads": 64, "tokens": 8, "published_us": {"vLLM": 2.8}, "status": "ok", "note": ""}
    row |= {"clock": "cuda graph", "bytes": 1, "flops": 0, "floor_us": 0.75, "gb_s": 100.0, "of_copy": 0.25}
    measured = [
        row | {"impl": "ir", "us": 5.0, "cold_us": 6.0, "launches": 2},
        row | {"impl": "triton", "us": 2.5, "cold_us": 3.25, "launches": 1},
    ]
    facts = dict.fromkeys(("machine", "driver", "torch", "triton", "python", "date", "command", "copy_gb_s"), "?")
    lines = table.render({**facts, "rows": measured}).splitlines()
    assert lines[-4] == "x, heads 64: us warm / cold, CUDA graph"
    assert lines[-3].split() == ["tokens", "ir", "triton", "vLLM", "floor", "best", "GB/s", "of", "copy"]
    assert lines[-2].split() == ["8", "5.00", "/", "6.00", "2.50", "/", "3.25", "2.8", "0.75", "triton", "100", "25%"]
    assert lines[-1].split() == ["launches", "2", "1"]


def test_a_table_shows_what_calls_hold_beside_their_results() -> None:
    """The largest share of any size; of calls that return nothing how much."""
    rows = []
    for size, result, extra in ((1, 64, 16), (8, 512, 384)):
        rows.append(timed(tokens=size, impl="ir", result_bytes=result, temporary_bytes=extra))
        rows.append(timed(tokens=size, impl="triton", result_bytes=0, temporary_bytes=0))
        rows.append(timed(tokens=size, impl="copies", result_bytes=0, temporary_bytes=size << 20))
    rows = [row | {"launches": None, "gb_s": 1.0, "of_copy": 0.1} for row in rows]
    facts = dict.fromkeys(("machine", "driver", "torch", "triton", "python", "date", "command", "copy_gb_s"), "?")
    last = table.render({**facts, "rows": rows}).splitlines()[-1]
    assert last.split() == ["temporaries", "0.75x", "none", "8.0", "MiB"]


def test_implementations_that_lack_the_same_are_named_together() -> None:
    rows = [timed(tokens=t, impl=i, us=None, status="unavailable", note="no GPU") for t in (1, 8) for i in ("a", "b")]
    for row in rows:
        row |= {"gb_s": None, "of_copy": None}
    facts = dict.fromkeys(("machine", "driver", "torch", "triton", "python", "date", "command", "copy_gb_s"), "?")
    assert table.render({**facts, "rows": rows}).splitlines()[-1] == "  a, b, unavailable: no GPU"


def timed(**columns: Any) -> dict[str, Any]:
    row = {"op": "x", "heads": 64, "impl": "ir", "published_us": {"vLLM": 2.8}, "us": 5.0, "cold_us": None, "note": ""}
    return row | {"clock": "wall clock", "bytes": 64, "flops": 0, "floor_us": 0.75} | columns


@pytest.mark.parametrize(("flops", "names"), [(0, ["s.png"]), (1000, ["s.png", "s_roofline.png"])])
def test_pictures_lie_beside_the_record(tmp_path: Path, flops: int, names: list[str]) -> None:
    rows = [timed(tokens=1, flops=flops), timed(tokens=8, us=None, flops=flops)]
    record = {"scenario": "s", "machine": "m", "date": "2026-11-20", "copy_gb_s": 4300.0, "rows": rows}
    assert [path.name for path in bench.draw(record, tmp_path)] == names
    assert all((tmp_path / name).stat().st_size > 1000 for name in names)
    assert bench.draw(record | {"rows": rows[1:]}, tmp_path) == []


def test_a_roof_is_flat_where_products_bound_and_nowhere_else() -> None:
    """790 and 1580 TFLOP/s, each of several sizes; what is bound by memory, or of no products, has no flat roof."""
    rows = [timed(flops=790_000_000 * us, bytes=1000 * us, floor_us=us) for us in (2.0, 99.003)]
    rows += [timed(flops=1_580_000_000, bytes=1000, floor_us=1.001), timed(flops=10**6, bytes=43_000, floor_us=0.01)]
    rows += [timed(flops=10**9, bytes=43_000_000, floor_us=10.0), timed(flops=0, bytes=10**9, floor_us=250.0)]
    rows += [timed(flops=10**9, floor_us=None)]
    assert pictures.flat_roofs({"copy_gb_s": 4300.0, "rows": rows}) == [790.0, 1580.0]


def test_pictures_that_cannot_be_drawn_are_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pictures, "can_draw", lambda: False)
    assert cli.main(["bench", "preprocess", "--device", "cpu", "--png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
