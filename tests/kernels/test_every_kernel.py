"""What every op with a kernel has, whoever wrote it: tests of three kinds, and one of each is found here by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsv4_compile.ops._kernels import KERNELS

HERE = Path(__file__).parent
KERNELS_OF = {"sparse_mla_decode_quant": "sparse_mla_decode"}
"""Stems of launchers that have no kernel of their own."""
TEXTS = {path.name: path.read_text() for path in HERE.glob("test_*.py")}


def about(op: str, stem: str) -> str:
    """The tests that name the op, and those of the file that launches it."""
    named = re.compile(rf"\b{op}\b")
    own = re.compile(rf"test_{KERNELS_OF.get(stem, stem)}(_compiles)?\.py")
    return "\n".join(text for name, text in TEXTS.items() if own.fullmatch(name) or named.search(text))


@pytest.mark.parametrize(("op", "stem"), KERNELS.items())
def test_a_kernel_is_interpreted_with_every_access_checked_compiled_for_every_gpu_and_run_on_one(
    op: str, stem: str
) -> None:
    text = about(op, stem)
    assert "@interpreted" in text and "checked(" in text
    assert "TARGETS" in text
    assert (HERE.parent / "gpu" / f"test_{stem}.py").exists()
