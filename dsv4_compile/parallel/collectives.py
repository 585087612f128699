"""Collectives of a split model: functional ones inside its graph, and objects on the host before and after it.

A graph has the same collectives in the same order on every rank, since all ranks trace the same code on the same
shapes. Their results are the same bits on all ranks, which `agreement` checks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._compat import functional_collectives
from .peers import gather, naming
from .ranks import Ranks


def all_reduce(x: Tensor, ranks: Ranks | None) -> Tensor:
    """Return the sum of `x` over the ranks, in x's dtype; x itself without ranks, or with one."""
    if ranks is None or ranks.size == 1:
        return x
    if ranks.symmetric:
        out: Tensor = torch.ops.dsv4_collectives.all_reduce(x.contiguous(), ranks.name)
        return out
    return functional_all_reduce(x.contiguous(), ranks.name)


def functional_all_reduce(x: Tensor, name: str) -> Tensor:
    """Return the sum of `x` over the ranks of the group `name`, by the collective of its backend."""
    return _waited(functional_collectives.all_reduce(x, "sum", name))


def all_gather(x: Tensor, ranks: Ranks | None) -> Tensor:
    """Return the last dims of `x` `[..., n]` of all ranks side by side, `[..., ranks * n]`."""
    if ranks is None or ranks.size == 1:
        return x
    out: Tensor = functional_collectives.all_gather_into_tensor(x.contiguous(), ranks.size, ranks.name)
    return torch.unflatten(_waited(out), 0, (ranks.size, -1)).movedim(0, -2).flatten(-2)


def _waited(x: Tensor) -> Tensor:
    waited: Tensor = functional_collectives.wait_tensor(x)
    return waited


def gather_objects(value: Any, ranks: Ranks) -> list[Any]:
    """Return the picklable `value` of every rank, in their order. Synchronises the host with all ranks.

    Raises E703 with the ranks that did not come, if the gather fails.
    """
    with naming(ranks):
        return gather(value, ranks)


def first_object(value: Any, ranks: Ranks) -> Any:
    """Return the picklable `value` of rank 0. Synchronises the host with all ranks."""
    return gather_objects(value if ranks.rank == 0 else None, ranks)[0]
