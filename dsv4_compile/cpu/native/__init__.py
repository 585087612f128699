"""C++ kernels of decode steps on a CPU: built for that CPU by the first graph that is compiled there, then loaded.

Forms of ops ask `takes` whether the kernels are loaded and read their tensors, and call torch where they do not.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import printable
from . import library

_log = logging.getLogger("dsv4_compile.cpu")
SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.cpp", "products.cpp"))
_HEADERS = tuple(Path(__file__).with_name(name) for name in ("common.h", "sums.h"))
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-std=c++17")
_OPENMP = ("-fopenmp", "-fopenmp-simd")
"""Flags for threads and, for a compiler without them, for vectors alone."""
FOLDER = "dsv4_compile"
"""Folder of the library in Inductor's cache."""
_SECONDS = 120.0
"""Time after which a compiler is stopped."""
_state: dict[str, ctypes.CDLL | None] = {}
"""The library under "loaded", None if it could not be built; empty before `build`."""
_packers: dict[str, Callable[..., bytes]] = {}


def build() -> None:
    """Load the kernels, once per process, and build them if this machine has not.

    Where that fails, for want of a C++ compiler for example, ops run as calls of torch, and a line in the log says why.
    """
    if "loaded" in _state:
        return
    _state["loaded"] = None
    try:
        _state["loaded"] = _library(library.find_compiler())
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        why = printable(" ".join(str(error).split()))
        _log.warning("W603: C++ kernels for this CPU were not built, ops run as calls of torch: %s", why)


def _library(compiler: Sequence[str]) -> ctypes.CDLL:
    """Load the library of kernels that run on several threads, or on one where that cannot be built or loaded."""
    try:
        return _built(compiler, _OPENMP[0])
    except library.Unusable:
        raise
    except OSError as error:
        loaded = _built(compiler, _OPENMP[1])
        why = printable(" ".join(str(error).split()))
        _log.warning("W603: C++ kernels for this CPU run on one thread: %s", why)
        return loaded


def _built(compiler: Sequence[str], openmp: str) -> ctypes.CDLL:
    """Load the library for this CPU, compiling it into Inductor's cache folder if no whole one is there."""
    command = [*compiler, *_FLAGS, openmp, "-shared", "-fPIC", *map(str, SOURCES)]
    return library.load(_folder(), _key(compiler, openmp), command, _SECONDS)


def _folder() -> Path:
    from ..._compat import cache_dir_utils

    return Path(cache_dir_utils.cache_dir()) / FOLDER


def _key(compiler: Sequence[str], openmp: str) -> str:
    """Return a name of everything that the library is made of, this machine included."""
    text = [path.read_bytes() for path in (*SOURCES, *_HEADERS)]
    made_from = text, list(compiler), (*_FLAGS, openmp), platform.node(), torch.backends.cpu.get_cpu_capability()
    return hashlib.sha256(repr(made_from).encode()).hexdigest()[:32]


def loaded_library() -> Path | None:
    """Return the file of the library that this process has loaded, or None."""
    return library.loaded[-1] if _state.get("loaded") is not None else None


def keep(content: bytes) -> None:
    """Keep a library that was built on an equal machine where `build` looks for one; the log says if that fails."""
    try:
        library.keep(_folder(), _key(library.find_compiler(), _OPENMP[0]), content)
    except OSError as error:
        _log.info("C++ kernels for this CPU are built here: %s", error)


def takes(*tensors: Tensor | None, rows: Tensor | None = None, int64: Any = (), int32: Any = ()) -> bool:
    """Return whether the kernels are loaded and read these tensors.

    Args:
        tensors: contiguous float32, or None.
        rows: float32 `[T, D]`, contiguous in its last dim.
        int64, int32: contiguous tensors of that dtype.
    """
    if _state.get("loaded") is None:
        return False
    for dtype, of_dtype in ((torch.float32, tensors), (torch.int64, int64), (torch.int32, int32)):
        for tensor in of_dtype:
            if tensor is not None and (tensor.dtype is not dtype or not tensor.is_contiguous()):
                return False
    return rows is None or (rows.dtype is torch.float32 and rows.stride(-1) == 1)


def call(kernel: str, *values: Tensor | float | None) -> None:
    """Call a kernel with its struct: addresses of tensors, integers, and floats, which are doubles."""
    library = _state["loaded"]
    assert library is not None
    packed = [value.data_ptr() if isinstance(value, Tensor) else value or 0 for value in values]
    getattr(library, kernel)(_packer(kernel, values)(*packed))


def _packer(kernel: str, values: tuple[Tensor | float | None, ...]) -> Callable[..., bytes]:
    """Return the function that packs the struct of a kernel; the first call determines the fields."""
    pack = _packers.get(kernel)
    if pack is None:
        form = "".join("d" if isinstance(value, float) else "q" for value in values)
        pack = _packers[kernel] = struct.Struct(f"={form}").pack
    return pack
