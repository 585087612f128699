"""Fixtures every test gets: a seed of its own, and no compiled code left over from the test before."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    collect_ignore = ["gpu"]


def pytest_report_header() -> list[str]:
    """Say which tests this machine cannot run, so that a green run is not read as more than it is."""
    missing = [] if torch.cuda.is_available() else ["no CUDA device: tests/gpu is not collected"]
    return [f"torch {torch.__version__}, {torch.get_num_threads()} threads", *missing]


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed `random` and torch from the test's name: every case differs, and every failure repeats."""
    value = zlib.crc32(request.node.nodeid.encode())
    random.seed(value)
    torch.manual_seed(value)
    return value


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Forget compiled code after each test, so that no test uses up another's recompile limit."""
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
