"""A warpgroup that stores and two that load, in rounds: `compute-sanitizer --tool racecheck python warpgroups.py WAY`.

How the storing one says that a tile is there, and the loading ones that they are done, as decode attention does it:

    one    a barrier among its threads, then one arrival at an mbarrier: right sums
    all    an arrival of each thread: right sums
    early  arrives before it stores: wrong sums

Prints whether the sums are right. On an H200 racecheck reports no hazard for any of the three.
"""

from __future__ import annotations

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ROUNDS, THREADS = 64, 128
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
STORED = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# A thread loads elements that a thread of a different warp has stored.
LOADED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[],
        lane_bases=[[1], [2], [4], [8], [16]],
        warp_bases=[[64], [32]],
        block_bases=[],
        shape=[THREADS],
    )
)
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _stores(p_in, tile, ready, free, rounds, WAY: gl.constexpr):
    SIZE: gl.constexpr = tile.shape[0]
    o = gl.arange(0, SIZE, STORED)
    for i in range(rounds):
        x = gl.load(p_in + i * SIZE + o)
        mbarrier.wait(free, (i & 1) ^ 1)
        if WAY == "early":
            mbarrier.arrive(ready, count=1)
        tile.store(x)
        if WAY == "one":
            thread_barrier()
            mbarrier.arrive(ready, count=1)
        if WAY == "all":
            async_copy.mbarrier_arrive(ready, increment_count=False)


@gluon.jit
def _loads(p_out, tile, ready, free, rounds, WAY: gl.constexpr):
    SIZE: gl.constexpr = tile.shape[0]
    total = gl.zeros([SIZE], gl.int32, LOADED)
    for i in range(rounds):
        mbarrier.wait(ready, i & 1)
        total += tile.load(LOADED)
        if WAY == "all":
            async_copy.mbarrier_arrive(free, increment_count=False)
        else:
            thread_barrier()
            mbarrier.arrive(free, count=1)
    gl.store(p_out + gl.arange(0, SIZE, LOADED), total)


@gluon.jit
def warpgroups_kernel(p_in, p_out, rounds, SIZE: gl.constexpr, WAY: gl.constexpr):
    """Sums of each column of int32 `[rounds, SIZE]`, twice."""
    tile = gl.allocate_shared_memory(gl.int32, [SIZE], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=SIZE if WAY == "all" else 1)
    mbarrier.init(free, count=2 * SIZE if WAY == "all" else 2)
    gl.warp_specialize([
        (_loads, (p_out, tile, ready, free, rounds, WAY)),
        (_loads, (p_out + SIZE, tile, ready, free, rounds, WAY)),
        (_stores, (p_in, tile, ready, free, rounds, WAY)),
    ], [4, 4], [64, 64])  # fmt: skip


def main(way: str) -> int:
    """0 if the sums are right."""
    rows = torch.arange(ROUNDS * THREADS, dtype=torch.int32, device="cuda").view(ROUNDS, THREADS)
    sums = torch.empty(2, THREADS, dtype=torch.int32, device="cuda")
    warpgroups_kernel[(1,)](rows, sums, ROUNDS, SIZE=THREADS, WAY=way, num_warps=4)
    right = torch.equal(sums, rows.sum(0, dtype=torch.int32).expand(2, THREADS))
    print(way, "right" if right else "wrong")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
