"""Triton's interpreter without what it does again and again for nothing, which is half of its time.

Results are the same, bit by bit. Tests and `generated_triton` run kernels so.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import triton.language as tl

from .._compat import triton_interpreter


@functools.cache
def quicken() -> None:
    """Make the interpreter quick, for the rest of this process."""
    _patch_once_a_launch()
    _leave_out_what_nobody_reads()
    _share_sizes()
    _look_up_dtypes()


def _leave_out_what_nobody_reads() -> None:
    """No second calculation of every sum and product in 64 bits.

    It is for an assertion that overflow did not happen, which Triton 3.6 and 3.7 then drop: the interpreter's options
    say that nothing is being debugged.
    """
    builder = triton_interpreter.interpreter_builder
    assert not builder.options.debug, "the assertions are made in this version"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _share_sizes() -> None:
    """Tensors of a shape share the constants that describe it, and the type of these constants."""

    @functools.cache
    def sizes(*shape: int) -> tuple[Any, Any]:
        return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])

    def initialize(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = sizes(*type.shape) if type.is_block() else sizes()

    tl.tensor.__init__ = initialize


def _look_up_dtypes() -> None:
    """NumPy's dtype of a Triton type from one table, instead of from a new one each time."""
    original, known = triton_interpreter._get_np_dtype, dict[str, Any]()

    def look_up(kind: Any) -> Any:
        scalar = kind.scalar
        if isinstance(scalar, tl.pointer_type):
            return original(scalar)
        if scalar.name not in known:
            known[scalar.name] = original(scalar)
        return known[scalar.name]

    triton_interpreter._get_np_dtype = look_up


def _patch_once_a_launch() -> None:
    """Let a launch replace Triton's language once, and not again at each call within it.

    Left alone, Triton 3.6 and 3.7 look through all of the language at every call of a device function, which takes a
    third of the time of a kernel that has many.
    """
    original, nothing = triton_interpreter._patch_lang, triton_interpreter._LangPatchScope
    replaced: set[str] = set()

    @functools.cache
    def seen_by(fn: Any) -> frozenset[str]:
        return frozenset(each.__name__ for each in fn.__globals__.values() if each is tl or each is tl.core)

    def patch(fn: Any) -> Any:
        seen = seen_by(fn)
        if seen and seen <= replaced:
            return nothing()
        scope = original(fn)
        restore = scope.restore

        def end() -> None:
            restore()
            replaced.clear()

        scope.restore = end
        replaced.update(seen)
        return scope

    triton_interpreter._patch_lang = patch
