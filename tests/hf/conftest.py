"""Fixtures of the Hugging Face tests, which share compiled models and count their compilations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dsv4_compile.hf.tiny import tiny_model
from tests.hf.drafting import drafting
from tests.hf.small import LAYERS


@pytest.fixture(scope="module")
def original() -> Any:
    """Eager transformers' model, which tests copy before they change it."""
    return tiny_model(**LAYERS)


@pytest.fixture(scope="module")
def dspark() -> Any:
    return drafting("dspark", stages=2)


@pytest.fixture(scope="module")
def mtp() -> Any:
    return drafting("mtp", num_drafts=3)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Keep compiled code between the tests of a module and drop it after the last one."""


@pytest.fixture(autouse=True, scope="module")
def fresh_compiler_per_module() -> Iterator[None]:
    yield
    torch.compiler.reset()
