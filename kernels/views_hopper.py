"""Another view of the same shared memory under one name: Triton 3.9 has renamed it."""

from __future__ import annotations

from triton.experimental.gluon.language import shared_memory_descriptor

reinterpret = getattr(shared_memory_descriptor, "reinterpret", None) or shared_memory_descriptor._reinterpret
"""Memory as a tensor of another dtype, shape and layout: `reinterpret(memory, dtype, shape, layout)`."""
