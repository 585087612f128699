"""Not a test: scenarios of one rank that is gone from a `RunningBatch`, and the errors expected on the others."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable

import torch

from dsv4_compile import hf
from dsv4_compile.errors import DSV4Error
from tests.parallel.ways import Me, divide, kill, linger, model_of, stop


def in_batch(act: Callable[[], object], at: int = 2) -> Callable[[Me], None]:
    """Return a scenario: the odd rank acts in forward `at` of a batch, or before it leads or follows, for 0."""

    def way(me: Me) -> None:
        batch = hf.RunningBatch(model_of(me.mesh), slots=2, prefill_chunk=16)
        if me.odd and not at:
            act()
        count = itertools.count(1)
        if me.odd:
            layer = batch.model.model.layers[1]
            layer.mlp.register_forward_pre_hook(lambda *_: act() if next(count) == at else None)
        if me.mesh.get_rank():
            batch.serve()
        else:
            requests = [batch.submit([1, 2, 3], max_new_tokens=9) for _ in range(3)]
            try:
                batch.run()
            finally:
                assert all(request.error.code in ("E702", "E703") for request in requests)

    return way


def barrier_of_all() -> None:
    torch.distributed.barrier()


def interrupt() -> None:
    raise KeyboardInterrupt


def catches(act: Callable[[Me], None]) -> Callable[[Me], None]:
    """Return a scenario: the odd rank catches what it raises, and lives on."""

    def way(me: Me) -> None:
        try:
            act(me)
        except BaseException:
            if not me.odd:
                raise
            linger()

    return way


def leaves_batch(me: Me) -> None:
    with hf.RunningBatch(model_of(me.mesh), slots=2, prefill_chunk=16) as batch:
        if me.mesh.get_rank() == 0:
            time.sleep(1.0)
            batch.submit([1, 2, 3], max_new_tokens=9)
            batch.run()
        elif not me.odd:
            batch.serve()
    if me.odd:
        linger()


def leads_and_forgets(me: Me) -> None:
    """Rank 0 waits in a barrier for ranks that follow a batch, which it has not closed."""
    batch = hf.RunningBatch(model_of(me.mesh), slots=2)
    torch.distributed.barrier() if me.mesh.get_rank() == 0 else batch.serve()


def other_tokens(me: Me) -> None:
    """The odd rank chooses other tokens than rank 0, which no collective shows."""
    batch = hf.RunningBatch(model_of(me.mesh), slots=2, prefill_chunk=16)
    if me.odd:
        chosen = batch._steps.chosen
        batch._steps.chosen = lambda: [(token + 1) % 512 for token in chosen()]  # type: ignore[method-assign]
    if me.mesh.get_rank():
        batch.serve()
        return
    request, waiting = (batch.submit([1] * n, max_new_tokens=9) for n in (9, 40))
    try:
        batch.run()
    finally:
        assert request.state == waiting.state == "failed" and batch.idle
        for call in (batch.step, lambda: list(waiting), lambda: batch.submit([1], max_new_tokens=1)):
            try:
                call()
            except DSV4Error as fault:
                assert fault.code == "E703" and f"rank {me.last} (process" in str(fault)
            else:
                raise AssertionError(call)
        batch.close()


IN_BATCH: dict[str, tuple[Callable[[Me], object], tuple[str, ...]]] = {
    "killed in a step of a batch": (in_batch(kill), ("ended",)),
    "killed before it follows a batch": (in_batch(kill, 0), ("ended",)),
    "stopped in a step of a batch": (in_batch(stop), ("is stopped",)),
    "stopped before it follows a batch": (in_batch(stop, 0), ("is stopped",)),
    "exits in a step of a batch": (in_batch(lambda: os._exit(3)), ("ended",)),
    "raises in a step of a batch": (in_batch(divide), ("raised ZeroDivisionError",)),
    "raises in a step of a batch, and lives on": (catches(in_batch(divide)), ("raised ZeroDivisionError",)),
    "is interrupted in a batch, and lives on": (catches(in_batch(interrupt)), ("raised KeyboardInterrupt",)),
    "closes a batch that it does not lead": (leaves_batch, ("has left its RunningBatch",)),
    "waits in a barrier for the end of a batch": (in_batch(barrier_of_all, 0), ("E702", "call = ", "on rank 0")),
    "rank 0 is in a barrier while others follow": (catches(leads_and_forgets), ("E702", "call = ", "a RunningBatch")),
    "rank 0 is killed in a step of a batch": (in_batch(kill), ("ended",)),
    "rank 0 is killed before a step of a batch": (in_batch(kill, 0), ("ended",)),
    "rank 0 is stopped in a step of a batch": (in_batch(stop), ("is stopped",)),
    "rank 0 is interrupted in a step of a batch, and lives on": (
        catches(in_batch(interrupt)),
        ("raised KeyboardInterrupt",),
    ),
    "rank 0 raises in a step of a batch, and lives on": (catches(in_batch(divide)), ("raised ZeroDivisionError",)),
    "chooses other tokens in a batch": (other_tokens, ("[E702] steps of a RunningBatch", "checksum of tokens")),
}
"""By scenario, the end of one rank, and texts of E703 on every other, or of E702 if it is one of them."""
