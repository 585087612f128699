"""Check the boundary that adds up the parts of all ranks, on GPUs of one host:
torchrun --nproc-per-node 2 tests/gpu/exchange.py

Its bits are those of the all-reduce and the boundary, on all ranks, in calls of many sizes in turn and in replays of a
graph with an odd number of them; a rank that does not come is named at the next call. Prints what was checked, exits
with 1 if something differs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout that is not installed

from dsv4_compile.errors import RankError
from dsv4_compile.hf.model.split import with_collectives
from dsv4_compile.parallel import Ranks, boundary, gather_objects
from tests.kernels.hyper_connections.calls import arguments

TOKENS = (1, 2, 3, 5, 8, 9, 40, 300)
"""Numbers of tokens, the last three too many for one launch."""
ops: Any = torch.ops


class Call:
    """One boundary of V4-Flash on this rank."""

    def __init__(self, tokens: int, ranks: Ranks, seed: int = 0) -> None:
        device = f"cuda:{torch.cuda.current_device()}"
        self.streams, _, *self.rest = arguments("mhc_boundary", tokens, 4096, seed=seed, device=device)
        generator = torch.Generator(device).manual_seed(1000 * seed + ranks.rank + 1)
        self.part = torch.randn(tokens, 4096, device=device, generator=generator).bfloat16()
        self.name = ranks.name

    def fused(self) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = ops.dsv4_collectives.all_reduce_mhc_boundary(
            self.streams, self.part, *self.rest, self.name
        )
        return results

    def apart(self) -> tuple[Tensor, ...]:
        total = ops.dsv4_collectives.all_reduce(self.part, self.name)
        results: tuple[Tensor, ...] = ops.dsv4.mhc_boundary(self.streams, total, *self.rest)
        return results


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...], ranks: Ranks) -> bool:
    """Return whether results are equal, and the same bits on all ranks."""
    digests = [float(result.double().sum()) for result in got]
    everywhere = gather_objects(digests, ranks)
    return all(map(torch.equal, got, want)) and all(digest == everywhere[0] for digest in everywhere)


def calls_in_turn(ranks: Ranks) -> str:
    """Return what was checked, call by call, or raise."""
    for repeat in range(5):
        for tokens in TOKENS:
            call = Call(tokens, ranks, seed=repeat)
            assert same(call.fused(), call.apart(), ranks), f"{tokens} tokens, repeat {repeat}"
    return f"{5 * len(TOKENS)} calls of {TOKENS} tokens"


def replays(ranks: Ranks) -> str:
    """Return what was checked in replays, or raise."""
    calls = [Call(tokens, ranks, seed) for seed, tokens in enumerate((1, 8, 32, 1, 3))]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call.fused() for call in calls]
    for repeat in range(200):
        for call in calls:
            call.part.copy_(torch.roll(call.part, 1, -1))
        graph.replay()
        if repeat % 20 == 0:
            for call, result in zip(calls, results, strict=True):
                assert same(result, call.apart(), ranks), f"replay {repeat}, {len(call.part)} tokens"
    return "200 replays of a graph with 5 exchanges"


def a_rank_is_late(ranks: Ranks) -> str:
    """Return what was checked when the last rank does not come, or raise."""
    boundary.POLLS = 1_000_000
    call = Call(4, ranks)
    if ranks.rank == ranks.size - 1:
        time.sleep(4)
        return "the last rank did not come"
    start = time.perf_counter()
    call.fused()
    torch.cuda.synchronize()
    waited = time.perf_counter() - start
    start = time.perf_counter()
    try:
        call.fused()
    except RankError as error:
        assert f"rank {ranks.size - 1} of group" in str(error), error
        return f"rank {ranks.size - 1} was named after {waited:.2f} s of {boundary.POLLS} polls"
    raise AssertionError("no error")


def main() -> int:
    """Run all checks."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))
    ranks = with_collectives(Ranks.of(mesh), "symmetric", torch.device("cuda", torch.cuda.current_device()))
    assert boundary._exchanges, "the kernel of mhc_boundary is not proven here"
    checks: tuple[Callable[[Ranks], str], ...] = (calls_in_turn, replays, a_rank_is_late)
    for check in checks:
        print(f"rank {ranks.rank}: {check(ranks)}", flush=True)
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
