"""Not a test: a plugin of pytest that runs a part of the tests of a file. See prove.py."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that `prove.py` gives the processes of a file."""
    parser.addoption("--slice", default="0/1", help="i/n: the i-th of n parts of the tests, counted from 0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep this part's tests, neighbours together: they share kernels and fixtures."""
    index, of = map(int, config.getoption("--slice").split("/"))
    items[:] = items[len(items) * index // of : len(items) * (index + 1) // of]
