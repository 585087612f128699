"""Semaphores: one set for each stream, new ones for each captured launch, none given out twice; CTAs store, then
arrive.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_compile.kernels.host import semaphores
from tests.support.fake_triton import TARGETS
from tests.tools.compiled_facts import compiled_for


@triton.jit
def join_kernel(p_part, p_counter, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(p_part + tl.program_id(0) * SIZE + o, o)
    if semaphores.arrive(p_counter) == 7:
        tl.store(p_part + o, tl.load(p_part + SIZE + o, cache_modifier=".cg") + 1)


STEPS = {
    "cuda": {
        "store": r"st\.global",
        "barrier": r"bar\.sync",
        "arrival": r"atom\.global\.gpu\.acq_rel",
        "read": r"ld\.global\.cg",
    },
    "hip": {
        "store": r"(buffer|global)_store",
        "wait": r"s_waitcnt vmcnt\(0\)",
        "barrier": r"s_barrier",
        "arrival": r"(buffer|global)_atomic_add",
        "read": r"(buffer|global)_load.* sc0",
    },
}
"""In this order, by backend. A barrier alone lets stores of AMD waves that do not arrive themselves be late."""


def steps_of(compiled: Any, backend: str) -> list[str]:
    """Names of `STEPS` in the order of a compiled kernel's instructions, each once in a row."""
    seen: list[str] = []
    for line in compiled.asm["ptx" if backend == "cuda" else "amdgcn"].splitlines():
        found = [name for name, pattern in STEPS[backend].items() if re.search(rf"^\s*(@\S+ )?{pattern}", line)]
        seen += [name for name in found if not seen or seen[-1] != name]
    return seen


@pytest.mark.parametrize("target", TARGETS)
def test_every_thread_has_stored_before_one_arrives(target: str) -> None:
    with compiled_for(target) as compiled:
        join_kernel[(8,)](torch.zeros(8192, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), SIZE=1024)
    backend = TARGETS[target].backend
    steps, seen = STEPS[backend], compiled[0].ask(steps_of, backend)
    arrival = seen.index("arrival")
    stored = max(index for index in range(arrival) if seen[index] == "store")
    assert seen[stored:][: len(steps) - 2] == list(steps)[:-2], seen
    assert "read" in seen[arrival:], seen


def test_programs_meet_nowhere_else_and_those_of_other_ranks_in_an_exchange() -> None:
    folder = Path(semaphores.__file__).parents[1]
    atomic = [path for path in sorted(folder.rglob("*.py")) if "tl.atomic" in path.read_text()]
    assert [path.name for path in atomic] == ["exchange.py", "semaphores.py"]


class Stream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream, self.waited = handle, 0

    def wait_event(self, event: object) -> None:
        self.waited += 1


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> semaphores._Pool:
    monkeypatch.setattr(torch.cuda, "Event", mock.Mock)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(0))
    monkeypatch.setattr(semaphores, "POOL", 3 * semaphores.STREAM_SHARE)
    return semaphores._Pool(torch.device("cpu"))


def span(counters: Tensor | None) -> tuple[int, int]:
    assert counters is not None
    return counters.storage_offset(), counters.storage_offset() + len(counters)


def test_a_stream_keeps_its_share_and_waits_once_for_the_fill(pool: semaphores._Pool) -> None:
    first, second = Stream(7), Stream(9)
    spans = [span(pool.of_stream(stream)) for stream in (first, second, first)]
    assert spans == [(0, 1024), (1024, 2048), (0, 1024)]
    assert (first.waited, second.waited) == (1, 1)


def test_captured_launches_get_counters_of_their_own_until_there_are_none(pool: semaphores._Pool) -> None:
    assert [span(pool.take(count)) for count in (5, 100)] == [(0, 5), (5, 105)]
    assert span(pool.of_stream(Stream(1))) == (105, 1129)
    assert pool.take(semaphores.POOL) is None
    assert span(pool.take(10)) == (1129, 1139)


def test_without_a_pool_counters_are_new() -> None:
    counters = semaphores.arrival_counters(12, torch.device("cpu"))
    assert len(counters) == 12 and counters.dtype is torch.int32 and not counters.any()


def test_what_outlives_a_call_is_not_allocated_by_the_thread_that_calls(
    pool: semaphores._Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor's CUDA graphs route what their thread allocates into a pool, and reuse all of it but their results."""
    threads, zeros = list[int](), torch.zeros

    def recorded(*args: Any, **kwargs: Any) -> Tensor:
        threads.append(threading.get_ident())
        return zeros(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", recorded)
    semaphores._Pool(torch.device("cpu"))
    assert len(threads) == 1 and threads[0] != threading.get_ident()
