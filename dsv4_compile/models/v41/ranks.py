"""Calls of a split model, compared and watched on all ranks. Does nothing for a whole model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from .model import V41Model


def step_of_ranks(model: V41Model) -> AbstractContextManager[None]:
    """Return a context for a step of all ranks. A failed collective raises E703 with the ranks that it waited for."""
    if model.in_step is None:
        return nullcontext()
    step: AbstractContextManager[None] = model.in_step.step()
    return step


@contextmanager
def same_on_ranks(model: V41Model, call: str) -> Iterator[dict[str, Any]]:
    """Yield a dict for facts of the call, compared with those of all ranks after the block.

    Raises E702 on all ranks if they differ, or if the block raises an error on some of them alone; E208 while the other
    ranks follow a `RunningBatch`.
    """
    facts: dict[str, Any] = {"call": call}
    if model.in_step is None:
        yield facts
        return
    model.in_step.processes.check_free()
    try:
        yield facts
    except Exception as fault:
        model.in_step.reject(fault)
        raise
    model.in_step.agree(facts)
