"""Fixtures for tests of the attention backends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.fx.experimental._config

from tests.attention_backends.fakes import flash_mla, flashinfer

__all__ = ["flash_mla", "flashinfer", "sizes_by_themselves"]


@pytest.fixture
def sizes_by_themselves() -> Iterator[None]:
    """Keep sizes that are equal in the first batch by chance as separate symbols."""
    with torch.fx.experimental._config.patch(use_duck_shape=False):
        yield
