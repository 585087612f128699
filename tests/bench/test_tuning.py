"""examples/benchmarks/tuning: tilings reach the kernels, and the command measures them like a scenario."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dsv4_compile import bench, layout
from dsv4_compile.bench import preprocess, preprocess_insert, timing
from dsv4_compile.kernels.host.gpu import Gpu
from dsv4_compile.kernels.linear import gemm, gemm_sm90_small
from dsv4_compile.ops.common.kernels import kernel_module

CPU = torch.device("cpu")
FOLDER = Path(__file__).parents[2] / "examples" / "benchmarks" / "tuning"


@pytest.fixture
def tuning(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


def test_tilings_of_preprocess_are_returned_by_the_function_that_chooses(
    tuning: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles, seen = tuning("preprocess_tiles"), []

    def launcher(op: str) -> Callable[..., Any]:
        module, choice = tiles.module_of(op), tiles.CHOICES[op].function
        return lambda *args: seen.append((op, getattr(module, choice)(1)))

    monkeypatch.setattr(tiles, "launcher", launcher)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for problem in tiles.problems(CPU, {"tokens": {"1"}, "heads": {"64"}, "op": {"inv_rope", "q_norm_rope"}}):
        for prepare in problem.implementations.values():
            prepare()()
        names = list(problem.implementations)
        assert names[:2] == (["h1", "h2"] if problem.op == "inv_rope" else ["r1 w1", "r2 w1"])
    assert [value for op, value in seen if op == "inv_rope"] == [1, 2, 4, 8]
    assert [value for op, value in seen if op == "q_norm_rope"][:2] == [(1, 1), (2, 1)]
    assert set(tiles.CHOICES) == set(preprocess.OPS)


def test_tilings_of_gemm_are_returned_by_the_functions_that_choose(
    tuning: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of 24 rows in 2 groups is 2 programs of 8 K-blocks; on 8 SMs, 2 for each are 8 splits of one."""
    tiles, gpu = tuning("gemm_tiles"), Gpu("cuda", 90, 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tiles, "_hopper_module", lambda: gemm_sm90_small)

    def launcher(op: str) -> Callable[..., Any]:
        return lambda *sizes: [
            gemm.choose_tiling(gpu, *sizes),
            gemm_sm90_small.choose_tiling(gpu, *sizes, True, False, False),
        ]

    monkeypatch.setattr(tiles, "launcher", launcher)
    limits = {"layer": {"wo_a"}, "op": {"grouped_linear"}, "model": {"Flash"}, "tokens": {"1"}}
    (problem,) = tiles.problems(CPU, limits)
    tilings = {name: prepare()(5, 2, 24, 8) for name, prepare in problem.implementations.items()}
    assert tilings["n64 w4 s4 p1"] == [gemm.GemmTiling(8, 64, 4, 4, 4), gemm_sm90_small.SmallTiling(64, 4, 1, 4)]
    assert tilings["n256 w8 s3 p2"] == [gemm.GemmTiling(8, 256, 8, 3, 8), gemm_sm90_small.SmallTiling(256, 8, 2, 8)]
    assert tilings["n128 w4 c8 p3"][1] == gemm_sm90_small.SmallTiling(128, 4, 3, 8, True)
    clusters = len(tiles.CLUSTERS) * len(tiles.PROGRAMS_OF_CLUSTERS)
    assert len(tilings) == len(tiles.TILES) * len(tiles.PROGRAMS) + clusters


def test_tilings_of_the_indexer_are_arguments_of_the_launchers(tuning: Callable[[str], ModuleType]) -> None:
    for op, tiles in tuning("indexer_tiles").TILES.items():
        module = kernel_module(op)
        parameters = inspect.signature(getattr(module, op)).parameters
        for tile in tiles.values():
            for name, value in tile.items():
                assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
                assert isinstance(value, int) or all(n & (n - 1) == 0 for n in value[:2])


@pytest.mark.parametrize("kind", preprocess_insert.KINDS)
def test_tilings_of_preprocess_insert_divide_the_work(tuning: Callable[[str], ModuleType], kind: str) -> None:
    tiles = tuning("preprocess_insert_tiles")
    problem = next(tiles.problems(CPU, {"kind": {kind}}))
    assert len(problem.implementations) == len(tiles.CHANGES[kind])
    for tokens in (1, 4096):
        for changes in tiles.CHANGES[kind]:
            tiling = tiles.tiling(kind, tokens, changes)
            assert all(n & (n - 1) == 0 for name, n in tiling._asdict().items() if name not in ("splits", "registers"))
            assert layout.HEAD_DIM // tiling.parts >= 16


def test_tilings_of_decode_attention_have_unique_names_for_every_number_of_heads(
    tuning: Callable[[str], ModuleType],
) -> None:
    for problem in tuning("sparse_mla_decode_tiles").problems(CPU, {"tokens": {"1"}}):
        assert len(problem.implementations) >= 8
        assert ("hopper" in problem.implementations) == (problem.params["heads"] in (64, 128))
        assert not problem.cold


def test_the_command_leaves_a_record_with_its_own_command(
    tuning: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(timing, "copy_rate", lambda device: 1e9)
    limits = ["--only", "op=kv_rope_insert", "--only", "tokens=1", "--only", "heads=64"]
    assert tuning("tune").main(["preprocess", *limits, "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "preprocess_tiles.json").read_text())
    assert record["command"].startswith("python examples/benchmarks/tuning/tune.py preprocess --only op=kv_rope_insert")
    assert {row["status"] for row in record["rows"]} == {"unavailable"}
    assert [row["impl"] for row in record["rows"]][:2] == ["r1 w1", "r2 w1"]


@pytest.mark.parametrize(("limit", "message"), [("token=1", "no column 'token' in gemm_tiles"), ("x", "--only takes")])
def test_unusable_limits_are_errors(
    tuning: Callable[[str], ModuleType], limit: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tuning("tune").main(["gemm", "--only", limit])
    assert message in capsys.readouterr().err


def test_a_module_outside_the_package_is_a_scenario() -> None:
    class Scenario:
        COLUMNS = ("op", "tokens", "impl")

        @staticmethod
        def problems(device: torch.device, only: Any) -> Iterator[bench.Problem]:
            return preprocess.problems(device, {"op": {"inv_rope"}, "heads": {"64"}}, tokens=(1,))

    record = bench.run("mine", only={"impl": {"eager"}}, device=CPU, modules=[Scenario], command="by hand")
    assert (record["scenario"], record["command"]) == ("mine", "by hand")
    assert [row["status"] for row in record["rows"]] == ["ok"]
