"""Launch kernels, and tell the recorder of a launch cache (launch_cache.py) what is launched.

Inside `building` kernels are built for their arguments, which need no memory, and not launched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import triton.language as tl
from torch import Tensor

from .build_hooks import prepare_builds


class Recorder(Protocol):
    """Records what a launcher does."""

    def launched(self, compiled: Any, grid: tuple[int, ...], values: list[Any]) -> None:
        """Record the launch `compiled[grid](*values)`; `compiled` is None for a kernel that was not compiled."""

    def made(self, make: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
        """Return `make(*args)`, and record how it is made."""


Build = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
"""Takes a kernel with the arguments and the constants and options of a launch, and builds it."""


class _Recording(threading.local):
    """The recorder of this thread, which receives launches instead of the GPU."""

    recorder: Recorder | None = None
    build: Build | None = None


recording = _Recording()
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
"""Constants of a launch that name the floating dtypes."""
FUSING = {"enable_fp_fusion": True}
"""Default option of every launch. Triton's own depends on an environment variable, and is to change in 3.10."""


@contextmanager
def building(build: Build) -> Iterator[None]:
    """Call `build` for each launch of this thread inside the block, in its place."""
    recording.build = build
    try:
        yield
    finally:
        recording.build = None


def is_building() -> bool:
    """Return whether this thread is in a block of `building`, where counters and other state need no memory."""
    return recording.build is not None


def built_only(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> bool:
    """Build the kernel if this thread is in a block of `building`, and return whether it is."""
    prepare_builds()
    if recording.build is None:
        return False
    recording.build(kernel, args, FUSING | constants)
    return True


def launch_kernel(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch `kernel[grid](*args, **constants)`, with FMA contraction unless `enable_fp_fusion=False`."""
    if built_only(kernel, args, constants):
        return
    compiled = kernel[grid](*args, **(FUSING | constants))
    if recording.recorder is not None:
        note(compiled, grid, [] if compiled is None else bound(kernel, args, constants))


def bound(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> list[Any]:
    """Return every argument of a kernel in the order of its parameters, as a compiled kernel takes them."""
    rest = kernel.params[len(args) :]
    return [*args, *(constants.get(param.name, param.default) for param in rest)]


def note(compiled: Any, grid: tuple[int, ...], values: list[Any]) -> None:
    """Tell the recorder of this thread, if there is one, that `compiled[grid](*values)` was launched."""
    if recording.recorder is not None:
        recording.recorder.launched(compiled, grid, values)


def per_call(make: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return `make(*args)`; a launch cache calls it again for each call."""
    return make(*args) if recording.recorder is None else recording.recorder.made(make, args)
