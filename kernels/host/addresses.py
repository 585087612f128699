"""The address of a tensor's first byte, for launchers that need aligned loads."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from .launch_cache import ALIGN


def first_byte(x: Tensor) -> int:
    """Return how many bytes after a multiple of ALIGN the first element of `x` is.

    An offset in a storage does not tell: DLPack and CUDA's array interface hand over tensors that begin anywhere, with
    offset 0. While a graph compiles nothing else is known; its storages are then taken to be aligned.
    """
    # A fake tensor names a GPU and has no memory; its storage is on the meta device.
    if x.untyped_storage().device.type == "meta":
        offset: Any = x.storage_offset()  # a SymInt where it is dynamic; int() would fix it
        return cast(int, offset * x.element_size() % ALIGN)
    return x.data_ptr() % ALIGN
