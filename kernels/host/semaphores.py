"""Counters by which the programs of one launch learn which of them is the last; zero between launches.

The last program of a tile sets its counter back, so nobody has to clear them in front of the next launch. Two launches
that may overlap must not share counters: launches on a stream follow each other, and a captured launch gets counters
that no other launch ever gets.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import current_target

from .launch import each_time

POOL = 1 << 20
STREAM_SHARE = 1024
"""Most counters of a launch outside a capture."""


@triton.constexpr_function
def _wait_for_stores() -> str:
    """The instruction by which an AMD wave waits for its stores; "" elsewhere."""
    target = current_target()
    if target is None or target.backend != "hip":
        return ""
    if target.arch.startswith("gfx9"):
        return "s_waitcnt vmcnt(0)"
    return "s_wait_storecnt 0x0" if target.arch.startswith("gfx12") else "s_waitcnt_vscnt null, 0x0"


@triton.jit
def arrive(p_counter):
    """How many programs have arrived at a counter before this one.

    Who finds that it is the last sees what the others have stored before they arrived, if it reads with `.cg`.
    """
    WAIT: tl.constexpr = _wait_for_stores()
    if WAIT != "":
        # There a barrier waits for no store, and the release below for those of one wave alone.
        tl.inline_asm_elementwise(WAIT + "\nv_mov_b32 $0, 0", "=v", [], dtype=tl.int32, is_pure=False, pack=1)
    # Every thread has stored before one announces it.
    tl.debug_barrier()
    return tl.atomic_add(p_counter, 1, sem="acq_rel", scope="gpu")


class _Pool:
    """Counters of one device, handed out once: a share to each stream, and what it asks for to each captured launch."""

    def __init__(self, device: torch.device) -> None:
        # What this thread allocates while Inductor's CUDA graphs warm up is memory that they take back.
        with ThreadPoolExecutor(1) as thread:
            self.counters, self.filled = thread.submit(_zeros, POOL, device).result()
        self.streams: dict[int, Tensor] = {}
        self.used = 0

    def take(self, count: int) -> Tensor | None:
        """The next `count` counters, None when there are not as many."""
        if self.used + count > POOL:
            return None
        self.used += count
        return self.counters[self.used - count : self.used]

    def of_stream(self, stream: torch.cuda.Stream) -> Tensor | None:
        """The share of `stream`."""
        known = stream.cuda_stream
        if known not in self.streams:
            share = self.take(STREAM_SHARE)
            if share is None:
                return None
            # A stream must not overtake the fill. A capture starts by waiting for everything.
            stream.wait_event(self.filled)
            self.streams[known] = share
        return self.streams[known]


def _zeros(count: int, device: torch.device) -> tuple[Tensor, torch.cuda.Event]:
    """Counters, and when they are zero."""
    counters, filled = torch.zeros(count, dtype=torch.int32, device=device), torch.cuda.Event()
    filled.record(torch.cuda.current_stream(device))
    return counters, filled


_pools: dict[torch.device, _Pool] = {}


def arrival_counters(count: int, device: torch.device) -> Tensor:
    """int32 `[>= count]`, zero when the next launch on the current stream starts; the launch leaves them zero.

    Where the pool cannot serve, the counters are new and a fill precedes the launch: at the first call if that is
    captured, for more than `STREAM_SHARE`, and when a million have been captured.
    """
    return each_time(_counters, count, device)


def _counters(count: int, device: torch.device) -> Tensor:
    """See `arrival_counters`."""
    counters: Tensor | None = None
    if device.type == "cuda":
        capturing = torch.cuda.is_current_stream_capturing()
        if device not in _pools and not capturing:
            _pools[device] = _Pool(device)
        pool = _pools.get(device)
        if pool is not None and capturing:
            counters = pool.take(count)
        elif pool is not None and count <= STREAM_SHARE:
            counters = pool.of_stream(torch.cuda.current_stream(device))
    return torch.zeros(count, dtype=torch.int32, device=device) if counters is None else counters
