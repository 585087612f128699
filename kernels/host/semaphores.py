"""Semaphores in global memory that tell the last CTA of a tile that it is the last; zero between launches.

The last CTA resets its semaphore, so no launch is needed to clear them. Launches that may overlap must not use the same
ones: launches on a stream follow each other, and a captured launch gets semaphores that no other launch ever gets.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import current_target

from .launch import is_building, per_call

POOL = 1 << 20
"""Counters of a device."""
STREAM_SHARE = 1024
"""Counters of a stream: the most that a launch outside a capture may use."""


@triton.constexpr_function
def _wait_for_stores() -> str:
    """Return the instruction that makes an AMD wave wait for its stores; "" elsewhere."""
    target = current_target()
    if target is None or target.backend != "hip":
        return ""
    if target.arch.startswith("gfx9"):
        return "s_waitcnt vmcnt(0)"
    return "s_wait_storecnt 0x0" if target.arch.startswith("gfx12") else "s_waitcnt_vscnt null, 0x0"


@triton.jit
def arrive(p_counter):
    """Increment a counter and return how many CTAs arrived before this one.

    The last CTA sees what the others stored before they arrived, if it reads with `.cg`.
    """
    WAIT: tl.constexpr = _wait_for_stores()
    if WAIT != "":
        # On AMD a barrier does not wait for stores, and the release below waits for those of one wave only.
        tl.inline_asm_elementwise(WAIT + "\nv_mov_b32 $0, 0", "=v", [], dtype=tl.int32, is_pure=False, pack=1)
    # Every thread stores before one signals.
    tl.debug_barrier()
    return tl.atomic_add(p_counter, 1, sem="acq_rel", scope="gpu")


@triton.jit
def settle():
    """Wait until all threads of a CTA have stored, so that others of the CTA may load what they stored."""
    WAIT: tl.constexpr = _wait_for_stores()
    if WAIT != "":
        tl.inline_asm_elementwise(WAIT + "\nv_mov_b32 $0, 0", "=v", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


class _Pool:
    """Counters of one device, each given out once: `STREAM_SHARE` to a stream, others to a captured launch."""

    def __init__(self, device: torch.device) -> None:
        # In a separate thread: Inductor's CUDA graphs reuse memory that this thread allocates while they warm up.
        with ThreadPoolExecutor(1) as thread:
            self.counters, self.filled = thread.submit(_zeros, POOL, device).result()
        self.streams: dict[int, Tensor] = {}
        self.used = 0

    def take(self, count: int) -> Tensor | None:
        """Return `count` counters that were never given out, None if so many are not left."""
        if self.used + count > POOL:
            return None
        self.used += count
        return self.counters[self.used - count : self.used]

    def of_stream(self, stream: torch.cuda.Stream) -> Tensor | None:
        """Return the counters of `stream`, None if none are left for it."""
        known = stream.cuda_stream
        if known not in self.streams:
            share = self.take(STREAM_SHARE)
            if share is None:
                return None
            # The fill runs on its own stream; a capture starts by waiting for all streams.
            stream.wait_event(self.filled)
            self.streams[known] = share
        return self.streams[known]


def _zeros(count: int, device: torch.device) -> tuple[Tensor, torch.cuda.Event]:
    """Return counters, and the event after which they are zero."""
    counters, filled = torch.zeros(count, dtype=torch.int32, device=device), torch.cuda.Event()
    filled.record(torch.cuda.current_stream(device))
    return counters, filled


_pools: dict[torch.device, _Pool] = {}


def arrival_counters(count: int, device: torch.device) -> Tensor:
    """Return int32 `[>= count]`, zero when the next launch on the current stream starts; it must leave them zero.

    They are allocated and filled by a launch if the first call of all is captured, for more than `STREAM_SHARE` outside
    a capture, and once `POOL` are given out.
    """
    if is_building():
        return torch.empty(count, dtype=torch.int32, device=device)
    return per_call(_counters, count, device)


def _counters(count: int, device: torch.device) -> Tensor:
    """Return counters of the pool, or new ones."""
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
