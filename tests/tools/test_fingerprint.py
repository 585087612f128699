"""The committed table of fingerprints: it has every kernel, and only code counts. See test_fingerprints."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from dsv4_compile.ops.common.kernels import KERNELS
from tests.support.fake_triton import TARGETS
from tests.tools import fingerprint
from tests.tools.fingerprint_source import DIGITS, source_of

PTX = """
//
.visible .entry scale_kernel(.param .u64 scale_kernel_param_0) // what it is
{
\t.reg .b32 twice;
\tld.param.b64 %rd1, [scale_kernel_param_0];\t// x.py:3
$L__BB0_1:
\tadd.f32 twice, %f1, %f1;
}
"""


def test_the_table_has_every_kernel_on_every_target() -> None:
    table = fingerprint.read(fingerprint.TABLE)
    assert table.keys() == TARGETS.keys()
    for target, ops in table.items():
        assert sorted(ops) == sorted(KERNELS), f"{target}: python tests/tools/fingerprint.py --write OP"
        assert all(len(value) == DIGITS for value in ops.values())


def test_comments_and_names_do_not_count_and_instructions_do() -> None:
    text = fingerprint.instructions(PTX, "ptx")
    renamed = PTX.replace("scale_kernel", "other_kernel").replace("twice", "doubled").replace("x.py:3", "y.py:40")
    assert fingerprint.instructions(renamed, "ptx") == text
    assert fingerprint.instructions(PTX.replace("add.f32", "mul.f32"), "ptx") != text
    assert fingerprint.instructions(PTX.replace("%f1, %f1", "%f1, %f2"), "ptx") != text


def test_rows_of_some_ops_are_written_beside_those_of_others(tmp_path: Path) -> None:
    old = {target: {"b": "1", "c": "2"} for target in TARGETS}
    new = fingerprint.merged(old, {"sm_90": {"a": "3", "b": "4"}})
    assert new["sm_90"] == {"a": "3", "b": "4", "c": "2"} and new["gfx942"] == old["gfx942"]
    assert fingerprint.differences(old, new) == ["sm_90 a", "sm_90 b"]
    fingerprint.write(tmp_path / "table.json", new)
    assert fingerprint.read(tmp_path / "table.json") == new
    assert json.loads((tmp_path / "table.json").read_text()).keys() - TARGETS.keys() == {"torch", "triton"}


@pytest.mark.parametrize("change", ["grid", "shared"])
def test_how_a_kernel_is_launched_counts(change: str) -> None:
    lines = {"grid": "kernel (8, 1, 1) 1 0 abc", "shared": "kernel (4, 1, 1) 1 64 abc"}
    before = {"advance": {"sm_90": {"a call": ["kernel (4, 1, 1) 1 0 abc"]}}}
    renamed = {"advance": {"sm_90": {"another": ["renamed (4, 1, 1) 1 0 abc"]}}}
    after = {"advance": {"sm_90": {"a call": [lines[change]]}}}
    assert fingerprint.table_of(before) == fingerprint.table_of(renamed) != fingerprint.table_of(after)


def test_sources_of_a_kernel_are_all_that_it_calls_and_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '''
import triton
import triton.language as tl

STEP = tl.constexpr(3)

@triton.jit
def inner(x):
    """Say what it returns."""
    return x + STEP  # a comment

@triton.jit
def kernel(p):
    tl.store(p, inner(tl.load(p)))
'''

    def source(number: int, text: str) -> str:
        name, path = f"dsv4_compile_kernel_{number}", tmp_path / f"kernel_{number}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return source_of(module.kernel)

    changes = [("returns", "gives"), ("  # a comment", ""), ("x + STEP", "x - STEP"), ("(3)", "(4)"), ("p,", "p + 1,")]
    unchanged, *changed = (source(i, text.replace(*change)) for i, change in enumerate([("", ""), *changes]))
    assert [one == unchanged for one in changed] == [True, True, False, False, False]


def test_sources_of_the_table_are_those_of_its_kernels() -> None:
    assert sorted(json.loads(fingerprint.SOURCES.read_text())) == sorted(KERNELS)
