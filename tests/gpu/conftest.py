"""GPU tests run what they test, whether or not it has passed here before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dsv4_compile import proven


@pytest.fixture(autouse=True)
def trusted() -> Iterator[None]:
    with proven.trust():
        yield
