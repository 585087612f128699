"""All-reduce over symmetric memory: each GPU reads its peers' buffers through NVLink, in one or two kernels.

Up to `ONE_SHOT_BYTES` every rank reads the inputs of all others; up to the size of the buffer each reduces a part and
reads the other parts; above it NCCL runs. The op is opaque to torch.compile and captured with the step. Multicast
(NVLS) is not used. A rank that stops leaves these kernels of the others waiting until `watchdog` ends their processes.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from ..errors import check
from . import boundary
from .collectives import functional_all_reduce, gather_objects
from .fake_group import BACKEND, is_fake
from .ranks import Ranks

ONE_SHOT_BYTES = 1 << 20
"""Largest input that is read whole by every rank, with the copy to the buffer in the same kernel."""
BUFFER_BYTES = 8 << 20
"""Largest input that is reduced in parts; for the all-reduce of a larger one bandwidth counts, not latency."""
_ALIGNMENT = 16
"""Bytes that the kernels load at once; other sizes go to NCCL."""

_buffers: dict[tuple[str, torch.device], Tensor] = {}
_prepared: dict[tuple[str, torch.device], int] = {}
"""The group that a buffer was made for: torch names groups anew after destroy_process_group."""


def prepare(ranks: Ranks, device: torch.device) -> None:
    """Allocate this rank's buffers and exchange addresses with all ranks. Raises E302 on all of them if one cannot."""
    why, key, group = _why_unsupported(ranks, device), (ranks.name, device), id(ranks.group)
    known = _prepared.get(key) == group
    if not why and not known:
        # torch reads it at the first allocation of symmetric memory.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        try:
            _buffers[key] = _rendezvous(ranks, device)
        except RuntimeError as fault:
            why = str(fault).splitlines()[0]
    reasons = gather_objects(why, ranks)
    faults = "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)
    check(not faults, "E302", got='collectives="symmetric"', why=faults, fix='pass collectives="functional"')
    if not known:
        boundary.prepare(ranks, device)
        _prepared[key] = group


def _why_unsupported(ranks: Ranks, device: torch.device) -> str:
    """Return why `ranks` have no symmetric memory on `device`, or ""."""
    if is_fake(ranks):
        return f"the other {ranks.size - 1} ranks of group {ranks.name} do not exist: its backend is {BACKEND!r}"
    if device.type != "cuda":
        return f"symmetric memory is on GPUs, the model is on {device}"
    if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_copy"):
        return f"torch {torch.__version__} has no symm_mem.one_shot_all_reduce_copy"
    return ""


def _rendezvous(ranks: Ranks, device: torch.device) -> Tensor:
    from .._compat import symmetric_memory

    memory: Any = symmetric_memory
    buffer: Tensor = memory.empty(BUFFER_BYTES, dtype=torch.uint8, device=device)
    memory.rendezvous(buffer, ranks.name)
    return buffer


@torch.library.custom_op("dsv4_collectives::all_reduce", mutates_args=())
def all_reduce(x: Tensor, name: str) -> Tensor:
    """Return the sum of `x`, contiguous, over the ranks of the group `name`, after `prepare` for it."""
    buffer = _buffers.get((name, x.device))
    size = x.nbytes
    if buffer is None or size > BUFFER_BYTES or size % _ALIGNMENT or not size:
        return functional_all_reduce(x, name)
    summand = buffer[:size].view(x.dtype)
    if size <= ONE_SHOT_BYTES:
        out: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(summand, x.view(-1), "sum", name)
        return out.view(x.shape)
    summand.copy_(x.view(-1))
    torch.ops.symm_mem.two_shot_all_reduce_(summand, "sum", name)
    return summand.clone().view(x.shape)


@all_reduce.register_fake
def _(x: Tensor, name: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
