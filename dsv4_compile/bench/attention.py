"""Scenario `attention`: decode over paged caches, then prefill over a workspace.

Together what `sparse_mla_decode` and `sparse_mla_prefill` measure, in one record, with one roofline of both. A limit of
a column that only one of them has leaves out the other: `--only fused=none` is decode alone, `--only pattern=random`
prefill alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from . import sparse_mla_decode, sparse_mla_prefill
from .problem import Only, Problem

PARTS = (sparse_mla_decode, sparse_mla_prefill)
COLUMNS = tuple(dict.fromkeys(column for part in PARTS for column in part.COLUMNS))


def problems(device: torch.device, only: Only) -> Iterator[Problem]:
    """Those of each part that has all limited columns."""
    for part in PARTS:
        if set(only) <= set(part.COLUMNS):
            yield from part.problems(device, only)
