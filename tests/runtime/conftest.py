"""Fixture: spare the objects of earlier files when captures collect garbage."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def earlier_objects_are_frozen() -> None:
    gc.collect()
    gc.freeze()
