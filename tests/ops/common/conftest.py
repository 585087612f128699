"""Fixtures of the tests of C++ kernels for CPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dsv4_compile.cpu import native


@pytest.fixture(scope="module")
def native_kernels() -> Iterator[None]:
    """Build the C++ kernels, as a compiled model does."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(native, "_state", {})
        native.build()
        assert native._state["loaded"] is not None
        yield
