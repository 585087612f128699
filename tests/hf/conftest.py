"""The tests of this folder share compiled models: what they count is that nothing is compiled twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Keep compiled code between the tests of a module; it is dropped when the module is done."""


@pytest.fixture(autouse=True, scope="module")
def fresh_compiler_per_module() -> Iterator[None]:
    yield
    torch.compiler.reset()
