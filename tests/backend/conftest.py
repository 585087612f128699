"""Fixtures: an interpreter with torch's compiler alone, for tests that start processes; lowerings in C++ as on GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from dsv4_compile.lowering import registry
from tests.warm import ROOT, WarmPython


@pytest.fixture(scope="session")
def torch_alone() -> Iterator[WarmPython]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # a fresh cache folder would try four kinds of vector instructions first
    warm = WarmPython(("torch._inductor.compile_fx", "tests.inductor_patterns"), env, 300)
    yield warm
    warm.close()


@pytest.fixture(scope="module", autouse=True)
def lowered_to_cpp() -> Iterator[None]:
    """Let `auto` use lowerings on a CPU too, as it does on GPUs: these tests are about its choices there."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(registry, "COMPILES_LONG", "")
        yield
