"""Fixtures: an interpreter that has imported torch's compiler but not the package, for tests that start processes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.warm import ROOT, WarmPython


@pytest.fixture(scope="session")
def torch_alone() -> Iterator[WarmPython]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # a fresh cache folder would try four kinds of vector instructions first
    warm = WarmPython(("torch._inductor.compile_fx", "tests.inductor_patterns"), env, 300)
    yield warm
    warm.close()
