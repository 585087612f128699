"""Facts about compiled kernels: what changed is compiled, what a test did not ask before too, and faults are seen."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton

from tests.support.fake_triton import WAIT
from tests.tools import compiled_facts
from tests.tools.compiled_facts import Kernel, Record, compiled_for

TEXT = '''
import triton
import triton.language as tl

STEP = tl.constexpr(3)

@triton.jit
def inner(x):
    """Say what it returns."""
    return x + STEP  # a comment

@triton.jit
def kernel(p, SIZE: tl.constexpr, FUNCTION: tl.constexpr = 1):
    o = tl.arange(0, SIZE)
    tl.store(p + o, inner(tl.load(p + o)))
'''
Make = Callable[..., Any]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a function that makes a module of `TEXT` with a replacement."""

    def make(old: str = "", new: str = "") -> Any:
        number = len(list(tmp_path.glob("*.py")))
        name, path = f"dsv4_compile_facts_{number}", tmp_path / f"facts_{number}.py"
        path.write_text(TEXT.replace(old, new) if old else TEXT)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return make


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[Record]:
    """Keep an empty record."""
    record = Record()
    record.mode, record.known = "changed", {}
    monkeypatch.setattr(compiled_facts, "RECORD", record)
    yield record


def launch(module: Any, size: int = 64, target: str = "sm_90", **options: Any) -> Kernel:
    with compiled_for(target) as compiled:
        module.kernel[(1,)](torch.zeros(64, dtype=torch.int32), SIZE=size, **options)
    (kernel,) = compiled
    return kernel


def learn(record: Record) -> None:
    record.known, record.compiled = record.asked, 0


def test_an_unchanged_kernel_is_not_compiled_and_has_the_same_answers(record: Record, module: Make) -> None:
    first = launch(module())
    want = first.asm["ptx"].count("ld.global"), first.resources(), first.metadata, first.assembled
    assert record.compiled == 1
    learn(record)
    with mock.patch.object(Kernel, "_compiled", side_effect=AssertionError("compiled")):
        for again in (launch(module()), launch(module("# a comment", "# another")), launch(module("Say", "Tell"))):
            assert again.hash == first.hash
            assert (again.asm["ptx"].count("ld.global"), again.resources(), again.metadata, again.assembled) == want
    assert record.compiled == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [("x + STEP", "x - STEP"), ("constexpr(3)", "constexpr(4)"), ("tl.arange(0, SIZE)", "tl.arange(0, SIZE) + 0")],
    ids=["a function that it calls", "a constant", "its own"],
)
def test_a_changed_source_is_compiled(old: str, new: str, record: Record, module: Make) -> None:
    launch(module())
    learn(record)
    launch(module(old, new))
    assert record.compiled == 1


def test_other_types_constants_options_and_targets_are_compiled(record: Record, module: Make) -> None:
    here = module()
    launch(here)
    learn(record)
    launch(here, size=32)
    launch(here, num_warps=8)
    launch(here, target="sm_100")
    launch(here, FUNCTION=here.inner)
    with compiled_for("sm_90"):
        here.kernel[(1,)](torch.zeros(64, dtype=torch.int64), SIZE=64)
    assert record.compiled == 5


def test_a_function_that_is_passed_counts_with_its_source(record: Record, module: Make) -> None:
    here = module()
    kernels = [launch(here, FUNCTION=module(*change).inner) for change in (("", ""), ("x + STEP", "x - STEP"))]
    assert kernels[0].hash != kernels[1].hash


def test_a_constant_counts_with_the_value_that_it_has_now(
    record: Record, module: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = module()
    first = launch(here)
    monkeypatch.setattr(here, "STEP", triton.language.constexpr(5))
    assert launch(here).hash != first.hash


def test_what_was_not_asked_before_is_asked_of_the_compiled_kernel(record: Record, module: Make) -> None:
    launch(module())
    learn(record)
    again = launch(module())
    assert again.asm["ptx"].count("st.global") > 0
    assert WAIT not in again.asm["ptx"]
    with pytest.raises(ValueError, match="substring"):
        again.asm["ptx"].index("never there")
    (facts,) = record.asked[record.file].values()
    assert set(facts) == {"metadata", "ptx.count('st.global')", f"ptx.__contains__({WAIT!r})"}


def words(compiled: Any, count: int) -> list[str]:
    return compiled.metadata.name.split("_") * count


def words_too(compiled: Any, count: int) -> list[str]:
    return [*compiled.metadata.name.split("_") * count]


def test_another_function_or_argument_is_another_question(record: Record, module: Make) -> None:
    kernel = launch(module())
    assert kernel.ask(words, 2) == kernel.ask(words_too, 2) == ["kernel"] * 2
    assert kernel.ask(words, 1) == ["kernel"]
    assert len(record.asked[record.file][kernel.hash]) == 1 + 3


def test_a_kernel_that_does_not_compile_is_not_recorded(record: Record, module: Make) -> None:
    with pytest.raises(triton.CompilationError):
        launch(module("x + STEP", "x.nothing"))
    with pytest.raises(AssertionError, match="has PDL and does not wait"):
        launch(module(), launch_pdl=True)
    assert not record.asked


def test_all_compiles_and_finds_an_answer_that_is_not_the_recorded_one(record: Record, module: Make) -> None:
    launch(module()).asm["ptx"].count("ld.global")
    learn(record)
    record.mode = "all"
    with (
        mock.patch.object(Kernel, "_compiled", side_effect=AssertionError("compiled")),
        pytest.raises(AssertionError, match="compiled"),
    ):
        launch(module())
    kernel = launch(module())
    kernel.asm["ptx"].count("ld.global")
    record.known[record.file][kernel.hash]["ptx.count('ld.global')"] += 1
    with pytest.raises(AssertionError, match="for the same sources"):
        kernel.asm["ptx"].count("ld.global")


def test_files_that_ran_replace_their_rows(record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_facts, "FILE", tmp_path / "facts.json")
    record.asked = {"a": {"2": {"x": 1}, "1": {"x": [2]}}, "b": {"3": {}}}
    record.write()
    record.asked = {"a": {"4": {"x": 3}}}
    record.write()
    assert json.loads((tmp_path / "facts.json").read_text()) == {
        "triton": triton.__version__,
        "files": {"a": {"4": {"x": 3}}, "b": {"3": {}}},
    }


def test_another_version_or_other_tools_have_no_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSV4_COMPILE", raising=False)
    monkeypatch.setattr(compiled_facts, "FILE", tmp_path / "facts.json")
    (tmp_path / "facts.json").write_text(json.dumps({"triton": triton.__version__, "files": {"a": {}}}))
    assert Record().known == {"a": {}}
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/somewhere/ptxas")
    assert Record().known == {}
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    (tmp_path / "facts.json").write_text(json.dumps({"triton": "3.0.0", "files": {"a": {}}}))
    assert Record().known == {}


def test_the_record_is_of_tests_that_exist() -> None:
    files = json.loads(compiled_facts.FILE.read_text())["files"]
    root = compiled_facts.FILE.parents[2]
    assert [file for file in files if not (root / file).exists()] == []
