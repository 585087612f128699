"""Fixture: captures, each of which collects garbage, spare what earlier files have left."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def earlier_objects_are_frozen() -> None:
    gc.collect()
    gc.freeze()
