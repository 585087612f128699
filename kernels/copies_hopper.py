"""The asynchronous copies of a Hopper GPU under one name each: Triton 3.8 has renamed them."""

from __future__ import annotations

from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

copy_elements = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
"""From addresses to shared memory, up to 16 bytes at a time, by the threads."""
copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""From a described tensor to shared memory, by the copy engine."""
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
"""Back, likewise."""
