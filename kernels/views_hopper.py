"""Views of shared memory on Hopper: the layout of what lies as it is, and another view of the same memory."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import shared_memory_descriptor

FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
"""Elements one after another."""

reinterpret = getattr(shared_memory_descriptor, "reinterpret", None) or shared_memory_descriptor._reinterpret
"""Memory as a tensor of another dtype, shape and layout: `reinterpret(memory, dtype, shape, layout)`. Triton
3.9 has renamed it."""
