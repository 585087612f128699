"""The model with worked numbers, filled once."""

from __future__ import annotations

import pytest

from dsv4_compile.models.v41 import V41Model
from tests.models.v41.worked import worked_model


@pytest.fixture(scope="session")
def worked() -> V41Model:
    return worked_model()


@pytest.fixture(scope="session")
def worked_drafts() -> V41Model:
    """The model with worked numbers, with its draft layers."""
    return worked_model(drafts=True)
