"""Ranks of vLLM's tensor parallel group: which part of a layer this process has, and the all-reduce after it.

Heads and output groups of attention are split, and experts by their rows or, with vLLM's expert parallel, by expert.
Caches, indexer, router and hyper-connections are the same on every rank.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...parallel import Ranks
from ._compat import get_tp_group, tensor_model_parallel_all_reduce


def ranks_here() -> Ranks | None:
    """Return the ranks of vLLM's tensor parallel group, or None for one rank."""
    group: Any = get_tp_group()
    if group.world_size == 1:
        return None
    return Ranks(group.rank_in_group, group.world_size, str(group.device_group.group_name))


def add_up(x: Tensor, ranks: Ranks | None) -> Tensor:
    """Return the sum of `x` over the ranks by vLLM's all-reduce, which may write into x; x itself without ranks."""
    if ranks is None:
        return x
    out: Tensor = tensor_model_parallel_all_reduce(x)
    return out
