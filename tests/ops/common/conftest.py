"""Fixtures of the tests of C++ kernels for CPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from dsv4_compile.cpu import native


@pytest.fixture(scope="module")
def native_kernels() -> Iterator[None]:
    """Build the C++ kernels, as a compiled model does; for a different CPU if tests/tools/isa.py says so."""
    march = os.environ.get("DSV4_TEST_MARCH", "native")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(native, "_state", {})
        patched.setattr(native, "_FLAGS", tuple(f.replace("-march=native", f"-march={march}") for f in native._FLAGS))
        native.build()
        assert native._state["loaded"] is not None
        yield
