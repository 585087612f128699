"""Tensors of a GPU in page-locked host memory: a kernel reads their rows over the bus, and the device holds none.

table = empty((rows, 256), torch.float8_e4m3fn)   # a tensor of the CPU, to fill
table = on_gpu(table, torch.device("cuda"))       # the same memory as a tensor of the GPU
"""

from __future__ import annotations

import math
import mmap
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..errors import error

_PORTABLE, _MAPPED = 1, 2
"""Flags of cudaHostRegister: memory of all contexts, and at addresses of the device."""


class _Registered:
    """Page-locked memory of a CPU tensor of bytes, by the protocol of arrays on a GPU. Ends with its last tensor."""

    def __init__(self, memory: Tensor, device: torch.device) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": tuple(memory.shape),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }
        # Before the memory is returned; at the end of the process the system does both.
        weakref.finalize(self, _unregister, memory.data_ptr(), device).atexit = False


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor of the CPU in separate pages, which `on_gpu` can lock."""
    size = math.prod(shape) * dtype.itemsize
    # Private: pages that processes share would be counted as files in memory, and never be large.
    pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # a hint: rows at random need fewer entries of the GPU's page tables
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)[:size].view(dtype).view(shape)


def on_gpu(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the memory of a tensor of `empty` as a tensor of a GPU, which reads and writes it over the bus.

    Raises E210 if the system does not let the process lock so much memory.
    """
    memory = tensor.view(-1).view(torch.uint8)
    with torch.cuda.device(device):
        try:
            runtime: Any = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE | _MAPPED))
        except RuntimeError as fault:
            got = f"{memory.numel() / 1e9:.2f} GB of host memory that cannot be locked for {device}"
            raise error("E210", got=got, why=str(fault).splitlines()[0], fix="raise `ulimit -l`") from fault
        return _tensor_of(_Registered(memory, device), device).view(tensor.dtype).view(tensor.shape)


def _tensor_of(registered: _Registered, device: torch.device) -> Tensor:
    return torch.as_tensor(registered, device=device)


def _unregister(address: int, device: torch.device) -> None:
    """Unlock memory after the work that may read it."""
    torch.cuda.synchronize(device)
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)
