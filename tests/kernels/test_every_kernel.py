"""What every op with a kernel has, whoever wrote it: tests of three kinds, and one of each is found here by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsv4_compile.ops.common.kernels import KERNELS

HERE = Path(__file__).parent
TEXTS = {path.name: path.read_text() for path in HERE.rglob("test_*.py")}


def about(op: str, module: str) -> str:
    """The tests that name the op, and those of the file that launches it."""
    named = re.compile(rf"\b{op}\b")
    file_names = re.compile(rf"test_{module.split('.')[-1]}(_compiles)?\.py")
    return "\n".join(text for name, text in TEXTS.items() if file_names.fullmatch(name) or named.search(text))


@pytest.mark.parametrize(("op", "module"), KERNELS.items())
def test_a_kernel_is_interpreted_with_every_access_checked_compiled_for_every_gpu_and_run_on_one(
    op: str, module: str
) -> None:
    text = about(op, module)
    assert "@interpreted" in text and "checked(" in text
    assert "TARGETS" in text or "compiled_for(target)" in text
    family, file = module.split(".")[-2:]
    assert list((HERE.parent / "gpu" / family).glob(f"test_{file}*.py"))
