"""Tests of starts: `hf.load(warm_up=)`, which returns a model nobody waits for, and where a start's seconds go."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_compile import _compat, cli, hf, progress
from dsv4_compile.debug import strict
from dsv4_compile.debug.serving import LateWork
from dsv4_compile.errors import DSV4Error
from dsv4_compile.hf import start
from dsv4_compile.hf.loading import load as load_module
from dsv4_compile.hf.model.warm_up import compile_and_warm_up, count_compilations
from dsv4_compile.hf.tiny import tiny_drafts, tiny_model
from dsv4_compile.runtime import counting, start_times
from dsv4_compile.runtime.start_times import spent, start_line
from dsv4_compile.runtime.structured_log import TRACE

SIZES: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 64, "device": "cpu"}
ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
STRICT = {"dsv4.strict": "after_warmup"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    tiny_model(**ONE_LAYER).save_pretrained(path)
    return path


@pytest.fixture
def traced() -> Iterator[None]:
    """The backend without Inductor, which takes half a minute; Dynamo and the rules are the real ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dsv4_compile._compat.compile_fx", lambda gm, inputs, **_: gm.forward, raising=False)
        torch.compiler.reset()
        yield
    torch.compiler.reset()
    logging.getLogger(TRACE).removeHandler(strict._causes)


@pytest.mark.usefixtures("traced")
def test_a_model_that_load_warmed_up_compiles_nothing(folder: Path) -> None:
    lines: list[str] = []
    with (
        torch.no_grad(),
        torch.device("meta"),
        progress.listen(lambda event: lines.append(f"{event.stage} {event.note}")),
    ):
        model = hf.load(folder, **SIZES, warm_up=STRICT)
        assert torch.zeros(1).device.type == "meta"
    assert any(line.startswith("warm up trace ") for line in lines), lines
    original, ids = tiny_model(**ONE_LAYER), torch.tensor([[3, 4, 5], [7, 8, 9]])  # calls leave default devices
    for batch in (ids, ids[:1]):
        with torch.set_grad_enabled(len(batch) == 1), torch.device("cpu" if len(batch) == 2 else "meta"):
            got = model.generate(batch, attention_mask=batch > 0, max_new_tokens=3, do_sample=False)
        assert torch.equal(got, original.generate(batch, attention_mask=batch > 0, max_new_tokens=3, do_sample=False))
    with pytest.raises(DSV4Error, match="E430"):  # `generate` makes no such call, and strict is on
        model(ids)


@pytest.mark.usefixtures("traced")
def test_warm_up_covers_calls_with_drafts_and_without() -> None:
    torch.manual_seed(0)
    model = tiny_model(**ONE_LAYER)
    drafts = tiny_drafts(model, "mtp", num_drafts=1)
    hf.convert(model, max_batch_size=1, max_seq_len=64, max_step_tokens=40, drafts=drafts)
    captured = {"dsv4.cudagraph": "full", "dsv4.cudagraph.graphs": "standin", "dsv4.impl": "eager"}
    with torch.inference_mode():  # whatever the modes of its caller are
        compile_and_warm_up(model, {**STRICT, **captured})
    with counting() as counts:
        for columns in (9, 50, 41):
            ids = torch.randint(1, 512, (1, columns))
            options: dict[str, Any] = {"attention_mask": ids > 0, "max_new_tokens": 5, "do_sample": False}
            assert torch.equal(*(model.generate(ids, drafts=drafts, **options) for drafts in (None, False)))
            assert model.draft_statistics is None
    assert counts.captures == counts.compiled == 0 and counts.replays > 20


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("yes", "E201"),
        (1, "E201"),
        (None, "E201"),
        ([("dsv4.strict", "off")], "E201"),
        ({"dsv4.strikt": "off"}, "E301"),
        ({"dsv4.cudagraph": "full"}, "E420"),
        ({"dsv4.cudagraph": "off", "dsv4.cudagraph.max_tokens": 8}, "E301"),
    ],
)
def test_what_could_not_be_compiled_is_refused_before_weights_are_read(
    folder: Path, value: Any, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_module, "read_checkpoint", lambda path: pytest.fail("read"))
    with pytest.raises(DSV4Error, match=code):
        hf.load(folder, **SIZES, warm_up=value)


def test_a_missing_compiler_and_autocast_are_refused_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_module, "read_checkpoint", lambda path: pytest.fail("read"))
    with torch.autocast("cpu"), pytest.raises(DSV4Error, match="E208"):
        hf.load(folder, **SIZES, warm_up=True)

    def missing() -> str:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(_compat.cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(DSV4Error, match=r"E101[\s\S]*No working C\+\+ compiler"):
        hf.load(folder, **SIZES, warm_up=True)


@pytest.mark.usefixtures("traced")
def test_seconds_of_a_start_add_up(folder: Path) -> None:
    begin = time.time() - 2.0
    captured = {"dsv4.cudagraph": "full", "dsv4.cudagraph.graphs": "standin", "dsv4.impl": "eager"}
    sizes = {**SIZES, "max_step_tokens": 16, "max_batch_size": 1}
    figures = start._measured({"path": str(folder), **sizes, "warm_up": captured}, begin)
    assert not figures.why and figures.graphs >= 2 and figures.captures >= 2 and figures.capture_bytes > 0
    assert figures.seconds["import"] >= 2 and figures.seconds["trace"] > 0 and figures.seconds["first token"] > 0
    assert list(figures.seconds) == list(start.MEANINGS)
    assert sum(figures.seconds.values()) == pytest.approx(figures.total, abs=0.02)
    lines = figures.table(100).splitlines()
    assert len(lines) == len(start.MEANINGS) + 2 and max(map(len, lines)) <= 100
    assert f"{figures.seconds['trace']:.1f}" in next(line for line in lines if line.startswith("trace"))


def test_one_line_names_kinds_of_work_that_took_time() -> None:
    assert start_line({"read": 3.14, "trace": 0.04, "capture": 12.0}) == "read 3.1 s, capture 12.0 s"


def test_a_start_runs_in_a_process_that_imports_nothing_from_the_current_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("torch", "json", "sitecustomize", "dsv4_compile"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    arguments = ["doctor", str(folder), "--start", "--json", "--max-seq-len", "64", "--device", "cuda:99"]
    assert cli.main(arguments) == 1
    report = json.loads(capsys.readouterr().out)
    assert "E201" in report["start"]["why"] and "cuda:99" in report["start"]["why"]
    assert {row["level"] for row in report["checks"]} <= {"ok", "warn"}
    assert not (tmp_path / "ran").exists()


def test_a_broken_folder_is_not_started(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert cli.main(["doctor", str(tmp_path), "--start"]) == 1
    assert "not started" in capsys.readouterr().out
    assert cli.main(["doctor", "--start"]) == 2
    assert "E201" in capsys.readouterr().err


def test_a_process_that_dies_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_PROGRAM", "import sys; print('noise'); sys.exit(7)")
    figures = start.measure_start(folder)
    assert "ended with 7" in figures.why and figures.why in figures.table(80)


@pytest.mark.parametrize(("late", "build"), [(2.0, 2.0), (9.0, 3.0)])
def test_kernels_that_threads_build_are_no_seconds_of_calls(
    late: float, build: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late builds are, but for those inside a compilation, which has counted them: calls take no negative time."""
    monkeypatch.setattr(start_times, "_spent", {})
    before, log = spent(), [LateWork("kernel", "a", "", 0, 5.0, early=True), LateWork("kernel", "b", "", 0, late)]
    start_times.count("run", 3.0)
    count_compilations(log, before)
    assert {kind: seconds for kind, seconds in spent().items() if seconds} == {
        kind: seconds for kind, seconds in {"build": build, "run": 3.0 - build}.items() if seconds
    }
