"""GPU tests run what they test, whether or not it has passed here before, and from a checkout that is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points

import pytest

from dsv4_compile.selection import proven


def pytest_configure() -> None:
    """Torch finds the backend by the entry point of an installed package."""
    if not any(entry_point.name == "dsv4" for entry_point in entry_points(group="torch_dynamo_backends")):
        from torch._dynamo import register_backend

        from dsv4_compile.backend import dsv4

        register_backend(dsv4, name="dsv4")


@pytest.fixture(autouse=True)
def trusted() -> Iterator[None]:
    with proven.trust():
        yield
