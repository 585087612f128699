"""Properties of a GPU that tilings and launch options depend on."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import NamedTuple

import torch

from ..._compat import triton_known

SM90 = 90
"""Compute capability of the GPUs that the Gluon kernels are written for (Hopper)."""


class Gpu(NamedTuple):
    """A GPU: "cuda" or "hip", its compute capability (90 for sm_90; 0 if it has none), and its number of SMs."""

    backend: str
    capability: int
    sms: int


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """Return the GPU of `device`. A CPU, for the interpreter, counts as a GPU of 8 SMs."""
    if device.type != "cuda":
        return Gpu("interpreter", 0, 8)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    if torch.version.hip is not None:
        return Gpu("hip", 0, sms)
    major, minor = torch.cuda.get_device_capability(device)
    return Gpu("cuda", 10 * major + minor, sms)


def shared_memory(gpu: Gpu) -> int:
    """Return the most shared memory of a CTA in bytes: the least among the GPUs that `gpu` may stand for."""
    if gpu.backend == "hip":
        kib = 64
    elif gpu.backend == "cuda" and gpu.capability // 10 not in (9, 10, 11):
        kib = 163 if gpu.capability in (80, 87) else 99
    else:
        kib = 227
    return kib * 1024


def register_limit(device: torch.device, most: int) -> dict[str, int]:
    """Return the launch option that limits registers per thread; 0 sets no limit. AMD's compiler has no such option."""
    return {"maxnreg": most} if most and gpu_of(device).backend == "cuda" else {}


@functools.cache
def sm90_module(gpu: Gpu, name: str) -> ModuleType | None:
    """Import the sm_90 kernel module `name` ("family.file" in kernels/).

    None on other GPUs, and with Triton versions that the kernels have not been tested with.
    """
    if gpu.capability != SM90 or not triton_known():
        return None
    return importlib.import_module(f"..{name}", __package__)
