"""Fixtures of the Hugging Face tests, which share compiled models and count their compilations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Keep compiled code between the tests of a module and drop it after the last one."""


@pytest.fixture(autouse=True, scope="module")
def fresh_compiler_per_module() -> Iterator[None]:
    yield
    torch.compiler.reset()
