"""Not a test: runs scenarios of one rank that differs or is gone, on groups of processes."""

from __future__ import annotations

import datetime
import gc
import json
import logging
import multiprocessing
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from dsv4_compile.errors import DSV4Error
from dsv4_compile.hf.tiny import quiet_libraries
from tests.parallel import ways
from tests.parallel.processes import rank_context
from tests.parallel.serving_ways import IN_BATCH
from tests.parallel.ways import DIFFERS, ENOUGH, Me, model_of

GONE = ways.GONE | IN_BATCH

GLOO_TIMEOUT = 100.0
"""Seconds that no survivor may wait for."""
SHORT = 6.0
"""That timeout where a rank only does not come, which nothing tells from a slow one."""


class Outcome(NamedTuple):
    """How a rank ended: the error, its seconds, and whether its process was there to write them."""

    text: str
    code: str
    seconds: float


def run_ways(size: int, names: Sequence[str], path: Path, together: int = 3) -> dict[str, list[Outcome | None]]:
    """Return how each rank ended, by way; None for a rank that wrote nothing. Ways of `DIFFERS` share a group."""
    context = rank_context()
    differing = [name for name in names if name in DIFFERS]
    jobs = [[name] for name in names if name in GONE]
    jobs = [differing, *jobs] if differing else jobs
    running: list[tuple[list[multiprocessing.process.BaseProcess], float]] = []
    for number, job in enumerate(jobs):
        while len(running) >= together:
            running = [entry for entry in running if not _ended(*entry)]
            time.sleep(0.1)
        at = path / str(number)
        at.mkdir()
        ranks = [context.Process(target=_rank, args=(rank, size, job, str(at))) for rank in range(size)]
        for rank in ranks:
            rank.start()
        ranks.append(ranks.pop(odd_rank(job[0], size)))
        running.append((ranks, time.monotonic() + 3 * ENOUGH + 3 * len(job)))
    while running:
        running = [entry for entry in running if not _ended(*entry)]
        time.sleep(0.1)
    outcomes: dict[str, list[Outcome | None]] = {name: [None] * size for name in names}
    for number in range(len(jobs)):
        for rank in range(size):
            log = path / str(number) / str(rank)
            for line in log.read_text().splitlines() if log.exists() else ():
                name, *outcome = json.loads(line)
                outcomes[name][rank] = Outcome(*outcome)
    return outcomes


def odd_rank(name: str, size: int) -> int:
    """Return the rank that differs or is gone in a way: the last, but where its name says rank 0."""
    return 0 if name.startswith("rank 0 ") else size - 1


def _ended(ranks: Sequence[multiprocessing.process.BaseProcess], deadline: float) -> bool:
    """Return whether all ranks but the odd one, the last, have ended; after `deadline` they are ended."""
    late = time.monotonic() > deadline
    done = late or all(rank.exitcode is not None for rank in ranks[:-1])
    differs = all(rank.exitcode is None for rank in ranks[-1:])
    if done and differs:
        ranks[-1].join(0.5)
    if done:
        for rank in ranks:
            rank.kill()
            rank.join()
    return done


def _rank(rank: int, size: int, names: Sequence[str], path: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    gc.freeze()
    torch.set_num_threads(1)
    quiet_libraries()
    logging.getLogger("dsv4_compile").setLevel(logging.ERROR)
    os.environ["DSV4_APART"] = path
    comes = not any("not come" in name for name in names)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{path}/group",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=GLOO_TIMEOUT if comes else SHORT),
    )
    me = Me(init_device_mesh("cpu", (size,)), rank == odd_rank(names[0], size))
    with (Path(path) / str(rank)).open("w", buffering=1) as log:
        for name in names:
            if name in DIFFERS:
                with suppress(DSV4Error):
                    model_of(me.mesh)
            begin = time.monotonic()
            text, code = "no error", ""
            try:
                {**DIFFERS, **GONE}[name][0](me)
            except BaseException as error:
                text, code = f"{type(error).__name__}: {error}", getattr(error, "code", "")
            log.write(json.dumps([name, text, code, time.monotonic() - begin]) + "\n")


def wrong(name: str, outcomes: Sequence[Outcome | None]) -> list[str]:
    """Return what is wrong with the outcomes of a way, in lines."""
    lines, last = [], odd_rank(name, len(outcomes))
    for rank, outcome in enumerate(outcomes):
        if name in GONE and rank == last:
            continue
        words = (DIFFERS | GONE)[name][1]
        # Of ranks that differ in a batch, the first to notice ends it for the others.
        codes = ("E702",) if name in DIFFERS else ("E702", "E703") if "E702" in words else ("E703",)
        if outcome is None:
            lines.append(f"{name}: rank {rank} hung or died")
            continue
        named = f"on rank {last}" if codes[0] == "E702" else f"rank {last} (process"
        missing = [word for word in (*words, named) if word not in outcome.text]
        if outcome.code not in codes or missing or outcome.seconds > ENOUGH:
            lines.append(f"{name}: rank {rank}, {outcome.seconds:.0f} s, no {missing}: {outcome.text}")
    return lines


if __name__ == "__main__":
    import sys
    import tempfile

    size, *wanted = sys.argv[1:]
    outcomes = run_ways(int(size), wanted or [*DIFFERS, *GONE], Path(tempfile.mkdtemp()))
    for name, ranks in outcomes.items():
        lines = wrong(name, ranks)
        print("\n".join(lines) if lines else f"right: {name} {[run and round(run.seconds, 1) for run in ranks]}")
    print(sum(not wrong(*item) for item in outcomes.items()), "of", len(outcomes), "right")
