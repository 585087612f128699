"""`dsv4 bench`: only right results are timed, faults are named, and a record says where it comes from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import bench, progress
from dsv4_compile.bench import gate, preprocess, runner, timing
from dsv4_compile.bench import problem as problems_of
from dsv4_compile.errors import fail
from dsv4_compile.selection import costs

CPU = torch.device("cpu")


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
        published={"a peer": 1.5},
    )


def rows(**implementations: Callable[[], Callable[..., Any]]) -> dict[str, dict[str, Any]]:
    return {row["impl"]: row for row in runner.rows_of(problem(**implementations), {}, CPU)}


def test_an_implementation_that_agrees_with_the_reference_is_timed() -> None:
    row = rows(same=lambda: double)["same"]
    assert row["us"] > 0
    assert (row["status"], row["clock"], row["cold_us"], row["launches"]) == ("ok", "wall clock", None, None)


def test_a_cold_time_of_its_own_is_divided_by_the_repeats_and_not_changed_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timing, "measure", lambda *_, clock, **__: timing.Timing(24.0, None, clock))
    calls: list[Any] = []

    def time_cold(call: Callable[..., Any], args: Any) -> timing.ColdTime:
        calls.append((call, args))
        return timing.ColdTime(36.0, 0.5)

    of = replace(problem(same=lambda: double), time_cold=time_cold, repeats=4, clock="stream")
    (row,) = runner.rows_of(of, {}, CPU)
    assert (row["us"], row["cold_us"], row["empty_pair_us"], row["clock"]) == (6.0, 9.0, 0.5, "stream")
    assert calls[0][0] is double and torch.equal(calls[0][1][0], problem().make(0)[0])


def test_arguments_are_arranged_for_an_implementation_before_it_is_compared_and_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[Any] = []

    def measure(call: Any, sets: Any, device: Any, *, cold: bool, clock: str) -> timing.Timing:
        measured.append((call is double, sets[0][0].tolist(), cold, clock))
        return timing.Timing(24.0, None, clock)

    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(timing, "cold_sets", lambda *_: 2)

    def loose(got: Any, want: Any) -> str:
        return "" if torch.equal(got[0], want[0]) else "the result is another"

    of = replace(
        problem(same=lambda: double, waits=lambda: lambda x, out: double(2 * x, out.clone())),
        arrange={"waits": lambda args: (args[0] / 2, args[1])},
        uncaptured={"waits"},
        differs_of={"waits": loose},
    )
    assert [(row["impl"], row["status"]) for row in runner.rows_of(of, {}, CPU)] == [("same", "ok"), ("waits", "ok")]
    assert measured == [(True, [1.0] * 4, True, ""), (False, [0.5] * 4, True, "stream")]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, out: (out.copy_(x + 1), x * 2.001)[1],
        lambda x, out: x * 2,
        lambda x, out: (out.copy_(x + 1), torch.full_like(x, torch.nan))[1],
        lambda x, out: (out.copy_(x + 1), (x * 2).double())[1],
        lambda x, out: (out.copy_(x + 1), torch.stack((x * 2, x), 1)[:, 0])[1],
        lambda x, out: (out.copy_(x + 1), (x * 2, x + 1))[1],
    ],
    ids=["a value", "an argument not written", "NaN", "dtype", "strides", "a result too many"],
)
def test_a_wrong_result_gets_no_number(wrong: Callable[..., Any]) -> None:
    by_impl = rows(wrong=lambda: wrong, right=lambda: double)
    assert (by_impl["wrong"]["status"], by_impl["wrong"]["us"]) == ("wrong", None)
    assert by_impl["wrong"]["note"].startswith("result ")
    assert by_impl["right"]["us"] > 0


def test_all_are_prepared_and_compared_before_the_first_is_timed() -> None:
    order: list[str] = []

    def prepared(name: str) -> Callable[[], Callable[..., Any]]:
        return lambda: order.append(f"prepare {name}") or double

    many = problem(first=prepared("first"), second=prepared("second"))
    for row in runner.rows_of(many, {}, CPU, lambda: order.append("begin")):
        order.append(f"row of {row['impl']}")
    assert order == ["prepare first", "prepare second", "begin", "row of first", "begin", "row of second"]


def test_compiled_code_serves_all_sizes_after_other_code_is_compiled() -> None:
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        compiled.append(len(inputs))
        return graph.forward

    calls = [problems_of.compiled(f, backend, lambda: (torch.ones(4),), (0,)) for f in (torch.sin, torch.cos)]
    for size in (3, 5, 6):
        assert [call(torch.ones(size)).shape for call in calls] == [(size,)] * 2
    assert len(compiled) == 2


def unsupported() -> Callable[..., Any]:
    fail("E302", got="double", why="it is Friday")


def unsupported_in_a_backend() -> Callable[..., Any]:
    try:
        unsupported()
    except Exception as fault:
        raise RuntimeError("backend='dsv4' raised") from fault
    raise AssertionError


def without_library() -> Callable[..., Any]:
    raise ModuleNotFoundError("No module named 'flash_mla'")


def without_gpu() -> Callable[..., Any]:
    raise problems_of.Unavailable("hand-written kernels run on GPUs")


@pytest.mark.parametrize(
    ("prepare", "note"),
    [
        (unsupported, "it is Friday"),
        (unsupported_in_a_backend, "it is Friday"),
        (without_library, "No module named 'flash_mla'"),
        (without_gpu, "hand-written kernels run on GPUs"),
    ],
)
def test_an_unavailable_implementation_says_why_and_the_others_are_timed(
    prepare: Callable[[], Callable[..., Any]], note: str
) -> None:
    by_impl = rows(gone=prepare, right=lambda: double)
    assert (by_impl["gone"]["status"], by_impl["gone"]["note"], by_impl["gone"]["us"]) == ("unavailable", note, None)
    assert by_impl["right"]["us"] > 0


def illegal(*args: Any) -> Any:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")


def test_a_fault_is_named_and_not_unavailable() -> None:
    by_impl = rows(bad=lambda: illegal, right=lambda: double)
    note = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert (by_impl["bad"]["status"], by_impl["bad"]["note"], by_impl["bad"]["us"]) == ("failed", note, None)
    assert by_impl["right"]["us"] > 0


def test_a_fault_while_it_is_timed_is_named_too() -> None:
    calls: list[int] = []

    def once(x: Tensor, out: Tensor) -> Tensor:
        calls.append(1)
        return double(x, out) if len(calls) == 1 else illegal()

    by_impl = rows(late=lambda: once, right=lambda: double)
    assert by_impl["late"]["status"] == "failed" and by_impl["late"]["note"].startswith("RuntimeError: CUDA error")
    assert by_impl["late"]["us"] is None and by_impl["right"]["us"] > 0


@pytest.mark.parametrize("late", [False, True])
def test_an_implementation_that_loses_the_device_is_the_last_row(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """Not blamed on one that agreed before it, nor on one that comes after."""
    calls: list[int] = []

    def bad(x: Tensor, out: Tensor) -> Tensor:
        calls.append(1)
        return double(x, out) if late and len(calls) == 1 else illegal()

    monkeypatch.setattr(runner, "_is_lost", lambda device: len(calls) > late)
    by_impl = rows(first=lambda: double, bad=lambda: bad, after=lambda: double)
    assert list(by_impl) == (["first", "bad"] if late else ["bad"])
    assert "illegal memory access" in by_impl["bad"]["note"] and by_impl["bad"]["status"] == "failed"


@pytest.mark.parametrize("lost", [False, True])
def test_a_run_ends_with_a_record_when_its_device_is_lost(monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    """Every later call would fail for the same reason."""

    class Scenario:
        COLUMNS = ("op", "tokens", "impl")

        @staticmethod
        def problems(device: torch.device, only: bench.Only) -> Any:
            return iter([problem(bad=lambda: illegal), problem(right=lambda: double)])

    monkeypatch.setattr(runner, "_is_lost", lambda device: lost)
    monkeypatch.setattr(timing, "copy_rate", lambda device: pytest.fail("used the device") if lost else 1e9)
    saved: list[dict[str, Any]] = []
    record = bench.run("mine", device=CPU, modules=[Scenario], so_far=saved.append)
    statuses = [row["status"] for row in record["rows"]]
    assert statuses == (["failed"] if lost else ["failed", "ok"])
    assert len(saved) == len(statuses)


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
    limits = {"impl": {"eager", "ir"}, "op": {"fused_q_kv_rmsnorm", "inv_rope_fp8_quant"}}
    record = bench.run("preprocess", only=limits, device=CPU)
    assert [(row["op"], row["tokens"], row["impl"]) for row in record["rows"]] == [
        (op, tokens, impl)
        for op in ("fused_q_kv_rmsnorm", "inv_rope_fp8_quant")
        for tokens in (1, 5)
        for impl in ("eager", "ir")
    ]
    assert {row["status"] for row in record["rows"]} <= {"ok", "unavailable"}
    assert all(row["status"] == "ok" for row in record["rows"] if row["impl"] == "eager")


@pytest.mark.usefixtures("tiny")
def test_an_interrupted_run_has_reported_its_cases_and_left_a_record(tmp_path: Path) -> None:
    told: list[str] = []

    def interrupt(record: dict[str, Any]) -> None:
        bench.write(record, tmp_path)
        raise KeyboardInterrupt

    only = {"op": {"inv_rope"}, "impl": {"eager"}}
    with progress.listen(lambda event: told.append(event.note)), pytest.raises(KeyboardInterrupt):
        bench.run("preprocess", only=only, device=CPU, so_far=interrupt)
    [row] = json.loads((tmp_path / "preprocess.json").read_text())["rows"]
    assert any(f"eager: {row['us']:.2f} us" in note for note in told)


@pytest.mark.usefixtures("tiny")
def test_a_run_waits_for_its_turn_once_before_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    measure = timing.measure
    monkeypatch.setattr(timing, "measure", lambda *args, **kwargs: order.append("measure") or measure(*args, **kwargs))
    monkeypatch.setattr(timing, "copy_rate", lambda device: order.append("copy") or 1e9)
    only = {"op": {"inv_rope"}, "impl": {"eager"}}
    record = bench.run("preprocess", only=only, device=CPU, turn=lambda: order.append("turn"))
    assert record["copy_gb_s"] == 1.0
    assert order == ["turn", "copy", *["measure"] * len(record["rows"])]


@pytest.mark.usefixtures("tiny")
def test_arguments_of_a_seed_repeat_in_fresh_memory() -> None:
    for problem in preprocess.problems(CPU, {"tokens": {"5"}}):
        first, again, other = ([a for a in problem.make(seed) if isinstance(a, Tensor)] for seed in (0, 0, 1))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert all(a.data_ptr() != b.data_ptr() for a, b in zip(first, again, strict=True))
        assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.usefixtures("tiny")
def test_traffic_is_the_bytes_of_arguments_and_results() -> None:
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


def test_the_copy_rate_is_of_the_fastest_copy(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_record_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record: dict[str, Any] = {"scenario": "one", "rows": []}
    list(bench.record.collect(record, iter([{"us": 1.0}]), tmp_path))

    def interrupt(new: Path, path: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(bench.record.collect(record, iter([{"us": 2.0}]), tmp_path))
    (row,) = json.loads((tmp_path / "one.json").read_text())["rows"]
    assert row["us"] == 1.0


def test_rows_are_on_disk_with_their_dates_when_they_are_yielded(tmp_path: Path) -> None:
    record: dict[str, Any] = {"scenario": "one", "rows": []}
    yielded = bench.record.collect(record, iter([{"us": 1.0}, {"us": 2.0}]), tmp_path / "made")
    for count, row in enumerate(yielded, 1):
        saved = json.loads((tmp_path / "made" / "one.json").read_text())
        assert saved == record and len(saved["rows"]) == count and saved["rows"][-1] == row
        assert row["date"] and row["commit"] == "unknown"
