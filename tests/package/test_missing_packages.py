"""Packages that are not installed: what needs one raises E101 with the line that installs it, and all else works."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from tests.warm import ROOT, WarmPython

Run = Callable[[str, str], str]

ABSENT = """
import importlib.metadata as metadata
import sys

absent = {absent!r}.split()

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

version, distribution = metadata.version, metadata.distribution
def without(read):
    def found(name):
        if name in absent:
            raise metadata.PackageNotFoundError(name)
        return read(name)
    return found
metadata.version, metadata.distribution = without(version), without(distribution)
sys.meta_path.insert(0, Finder())
assert not any(name.partition(".")[0] in absent for name in sys.modules)

import contextlib, io
import torch
import dsv4_compile
from dsv4_compile import DSV4Error
from dsv4_compile.cli import main

def cli(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = main(list(arguments))
    assert "Traceback" not in out.getvalue()
    return status, out.getvalue()

def e101(call, *words):
    try:
        call()
    except DSV4Error as fault:
        text = str(fault)
        assert fault.code == "E101" and isinstance(fault, ImportError), text
        assert all(word in text for word in words), text
    else:
        raise AssertionError("no error")
"""
"""A program's beginning: packages that cannot be imported, nor are among the installed ones."""


@pytest.fixture(scope="module")
def without() -> Iterator[Run]:
    """Run code in a process that has imported torch, where some packages do not exist, and return what it prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DSV4_"))}
    warm = WarmPython(("torch",), env | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, 300)

    def run(absent: str, code: str) -> str:
        done = warm.run("tests.backend.program", str(ROOT), ABSENT.format(absent=absent) + code)
        assert done.returncode == 0, done.stderr
        return done.stdout

    yield run
    warm.close()


def test_a_cpu_compiles_without_triton(without: Run) -> None:
    code = """
import dsv4_compile.debug, dsv4_compile.runtime, dsv4_compile.bench.command
def step(x, weight):
    return torch.ops.dsv4.fused_q_kv_rmsnorm(x, x, weight, weight, 1e-6)
inputs = torch.randn(3, 64), torch.ones(64)
with torch.inference_mode(), dsv4_compile.debug.compile_log() as log:
    got = torch.compile(step, backend="dsv4", options={"dsv4.strict": "after_warmup"})(*inputs)
    torch.testing.assert_close(got, step(*inputs))
assert log
status, text = cli("doctor")
assert "triton" in text and "not needed without a GPU" in text, text
assert "fix" not in {line.split()[0] for line in text.splitlines() if line}, text
assert cli("bench")[0] == 0
print(any(name.partition(".")[0] in absent for name in sys.modules))
"""
    assert without("triton", code) == "False\n"


def test_transformers_is_named_with_its_extra(without: Run) -> None:
    code = """
import tempfile
line = "pip install 'dsv4-compile[hf]'"
for name in ("hf", "hf.demo", "hf.loading.load", "hf.tiny"):
    e101(lambda: __import__(f"dsv4_compile.{name}"), line, "transformers")
e101(lambda: dsv4_compile.hf, line)
e101(lambda: dsv4_compile.hf, line)  # not a half of a module that is left
for command in (["demo"], ["demo", "--json"]):
    status, text = cli(*command)
    assert status == 2 and text.startswith("[E101]") and line in text, text
status, text = cli("doctor", tempfile.mkdtemp())
assert status == 1 and "transformers" in text and line in text, text
assert cli("doctor")[0] == 0
assert dsv4_compile.DeepseekV4Attention and dsv4_compile.loading
print("right")
"""
    assert without("transformers safetensors peft accelerate", code) == "right\n"


def test_other_packages_are_not_needed_or_named(without: Run) -> None:
    code = """
import tempfile
from pathlib import Path
import dsv4_compile.bench.pictures as pictures
from dsv4_compile.loading import load_attention_from_safetensors
e101(pictures.require_drawing, "pip install", "matplotlib")
folder = Path(tempfile.mkdtemp())
post = lambda x: torch.ops.dsv4.mhc_post(x, x[:, 0], x[:, :, 0], x @ x.mT)
report = dsv4_compile.explain(post, torch.ones(2, 4, 4), dump=folder)
assert any("depyf is not installed" in note for note in report.notes) and str(report), report.notes
assert cli("doctor")[0] == 0 and cli("bench")[0] == 0 and cli("explain", "E101")[0] == 0
from dsv4_compile import progress
with progress.stage("work", total=1) as work:
    work.advance("done")
import dsv4_compile.testing
print("right")
"""
    assert without("rich matplotlib depyf safetensors peft accelerate", code) == "right\n"
