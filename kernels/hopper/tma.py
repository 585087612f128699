"""Asynchronous copies on Hopper under one name each; Triton 3.8 renamed them."""

from __future__ import annotations

from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

copy_elements = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
"""Copy up to 16 bytes a thread from global addresses to shared memory (cp.async)."""
copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""Copy a tile of a described tensor to shared memory (TMA)."""
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
"""Copy a tile from shared memory to a described tensor (TMA)."""
