"""Checks that ranks do the same: options, calls and results."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import DSV4Error, check
from .collectives import gather_objects
from .peers import Processes, ranks_of
from .ranks import Ranks

__all__ = [
    "Processes",
    "agree",
    "check_agree",
    "check_equal",
    "compare_barriers",
    "digest",
    "digest_in_order",
    "reject",
    "summary",
]

_REJECTED = "rejected"
_SHOWN = 120
"""Characters of a value that a message shows."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, repr=False)
class _Rejected:
    """A call that a rank did not make. Ranks that reject it with the same code agree."""

    code: str
    text: str = field(compare=False)

    def __repr__(self) -> str:
        return self.text


class _Told(NamedTuple):
    """A rank's stage of a call, the facts that must be equal there, and notes that may differ."""

    what: str
    facts: dict[str, Any]
    notes: Any


def check_agree(what: str, facts: Mapping[str, Any], ranks: Ranks) -> None:
    """Raise E702 on all ranks, naming facts and ranks, unless every rank passes equal `facts`."""
    agree(what, facts, ranks)


def agree(what: str, facts: Mapping[str, Any], ranks: Ranks, notes: Any = None) -> list[Any]:
    """Return the `notes` of every rank. Raises E702 on all ranks unless `what` and `facts` are equal on each."""
    everyone = gather_objects(_Told(what, dict(facts), notes), ranks)
    stages = [told.what if isinstance(told, _Told) else "another collective" for told in everyone]
    if any(stage != stages[0] for stage in stages):
        check_equal("calls", [{"call": stage} for stage in stages])
    rejected = [told.facts.get(_REJECTED) for told in everyone]
    check_equal(what, [{_REJECTED: why} for why in rejected] if any(rejected) else [told.facts for told in everyone])
    return [told.notes for told in everyone]


def reject(what: str, fault: BaseException, ranks: Ranks) -> None:
    """Take this rank's part in `agree` for a call that ended with `fault` on this rank before it was made.

    Raises E702 on all ranks, with the text of `fault`, unless all reject with the same error.
    """
    code = fault.code if isinstance(fault, DSV4Error) else type(fault).__name__
    agree(what, {_REJECTED: _Rejected(code, summary(fault))}, ranks)


def summary(fault: BaseException) -> str:
    """Return code, input and reason of an error of this package, or class and first line of any other, in a line."""
    if isinstance(fault, DSV4Error):
        return f"[{fault.code}] {fault.got}" + (f", {fault.why}" if fault.why else "")
    return f"{type(fault).__name__}: {fault}".splitlines()[0].removesuffix(": ")


def compare_barriers() -> None:
    """Let torch.distributed.barrier raise E702 or E703 in groups of ranks that have met."""
    distributed: Any = torch.distributed
    barrier = distributed.barrier
    if hasattr(barrier, "dsv4_compares"):
        return

    @functools.wraps(barrier)
    def compared_barrier(group: Any = None, async_op: bool = False, *args: Any, **kwargs: Any) -> Any:
        ranks = None if async_op or not distributed.is_initialized() else ranks_of(group)
        if ranks is not None:
            agree("torch.distributed.barrier", {}, ranks)
        return barrier(group, async_op, *args, **kwargs)

    compared_barrier.dsv4_compares = True  # type: ignore[attr-defined]
    distributed.barrier = compared_barrier
    distributed.distributed_c10d.barrier = compared_barrier


def check_equal(what: str, facts: Sequence[Mapping[str, Any]]) -> None:
    """Raise E702, naming facts and ranks, unless the `facts` of all ranks are equal."""
    differing = []
    for name in sorted({name for rank_facts in facts for name in rank_facts}):
        values = [rank_facts.get(name) for rank_facts in facts]
        if any(value != values[0] for value in values):
            shown = (f"{text} on rank {rank}" for rank, text in enumerate(_excerpts([*map(repr, values)])))
            differing.append(f"{name} = {', '.join(shown)}")
    check(not differing, "E702", got=f"{what}: {'; '.join(differing)}")


def _excerpts(texts: Sequence[str]) -> Sequence[str]:
    """Return `texts`, which differ; of long ones what is around the first difference."""
    if max(map(len, texts)) <= _SHOWN or len(set(texts)) == 1:
        return texts
    same = next(i for i, column in enumerate(zip_longest(*texts)) if len(set(column)) > 1)
    begin = max(0, same - _SHOWN // 3)
    end = begin + _SHOWN
    return [f"{'...' * (begin > 0)}{text[begin:end]}{'...' * (len(text) > end)}" for text in texts]


def digest(*tensors: Tensor) -> int:
    """Return a sum of the tensors' bits that does not depend on the order of its terms. Synchronises."""
    total: Tensor | None = None
    for tensor in tensors:
        if tensor.numel() and not tensor.is_meta:
            word = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()])
            one = word.sum(dtype=torch.int64) * 31 + tensor.numel()
            total = one if total is None else total * 17 + one
    return 0 if total is None else int(total)


def digest_in_order(tensor: Tensor) -> str:
    """Return a digest of the bits of a tensor that tells two orders of its values apart. Synchronises."""
    if not tensor.numel() or tensor.is_meta:
        return "0"
    # Two words of a complex value are one after the other.
    bits = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    word = bits.detach().contiguous().view(-1).view(_WORDS[bits.element_size()]).to(torch.int64)
    places = torch.arange(1, word.numel() + 1, device=word.device) * 0x9E3779B97F4A7C1
    return f"{int(((word + 1) * places).sum()) & 0xFFFFFFFFFFFFFFFF:x}"
