"""Not a test: runs checks on several ranks, which are processes with a gloo group, once for all checks of a world."""

from __future__ import annotations

import datetime
import gc
import importlib
import json
import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

TIMEOUT = 120.0
"""Seconds until a collective fails if its other ranks do not come, on a machine that has other work."""

PRELOADED = (
    "dsv4_compile.debug",
    "dsv4_compile.hf.tiny",
    "tests.debug.rank_checks",
    "tests.parallel.checks",
    "tests.parallel.draft_checks",
    "tests.parallel.serving_checks",
    "tests.parallel.v41_checks",
    "tests.parallel.ways",
    "tests.parallel.watched",
    "torch._inductor.compile_fx",
)
"""Modules that ranks of all tests need. A test process has one server, which imports them before it forks a rank."""

Check = Callable[[Any], None]
Outcomes = dict[str, list[str]]


def rank_context() -> ForkServerContext:
    """Return the context of processes that are forked from a server that has imported what ranks need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def run_on_ranks(size: int, checks: Sequence[Check], folder: Path) -> Outcomes:
    """Run each check, with the mesh of all ranks, on `size` ranks; return tracebacks by check and rank, "" if passed.

    A check that a rank has not finished has the text "not finished" there.
    """
    names, context = [(check.__module__, check.__name__) for check in checks], rank_context()
    processes = [context.Process(target=_rank, args=(rank, size, names, str(folder))) for rank in range(size)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 4 * TIMEOUT
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
    outcomes = [
        dict(map(json.loads, file.read_text().splitlines())) if file.exists() else {}
        for file in (folder / str(rank) for rank in range(size))
    ]
    return {check.__name__: [outcome.get(check.__name__, "not finished") for outcome in outcomes] for check in checks}


def _rank(rank: int, size: int, names: Sequence[tuple[str, str]], folder: str) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from dsv4_compile.hf.tiny import quiet_libraries

    checks = [getattr(importlib.import_module(module), name) for module, name in names]
    # A fork that looks through all modules for garbage copies their memory.
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    torch.set_num_threads(1)
    quiet_libraries()
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/group",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    mesh = init_device_mesh("cpu", (size,))
    with (Path(folder) / str(rank)).open("w", buffering=1) as log:
        for check in checks:
            torch.manual_seed(0)
            try:
                check(mesh)
                text = ""
            except Exception:
                text = traceback.format_exc()
            log.write(json.dumps([check.__name__, text]) + "\n")
