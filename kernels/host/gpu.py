"""The facts about a GPU that decide how a launch is cut up."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import NamedTuple

import torch

from ..._compat import triton_known

HOPPER = 90
"""Compute capability of the GPUs that have a kernel of their own in Gluon."""
FIRST_DEPENDENT = 90
"""Compute capability from which a kernel can start before the one that it depends on has ended."""


class Gpu(NamedTuple):
    """What the cutting depends on: "cuda" or "hip", the compute capability (90; 0 for others), and processors."""

    backend: str
    capability: int
    processors: int


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """The GPU that `device` is. A CPU, where the interpreter runs, is a small one."""
    if device.type != "cuda":
        return Gpu("interpreter", 0, 8)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if torch.version.hip is not None:
        return Gpu("hip", 0, processors)
    major, minor = torch.cuda.get_device_capability(device)
    return Gpu("cuda", 10 * major + minor, processors)


def shared_memory(gpu: Gpu) -> int:
    """Bytes of shared memory that a program may have, on the least of the GPUs that `gpu` may be."""
    if gpu.backend == "hip":
        kib = 64
    elif gpu.backend == "cuda" and gpu.capability // 10 not in (9, 10, 11):
        kib = 163 if gpu.capability in (80, 87) else 99
    else:
        kib = 227
    return kib * 1024


def registers(device: torch.device, most: int) -> dict[str, int]:
    """The option of a launch by which a thread has at most so many registers, 0 for any; AMD's compiler has none."""
    return {"maxnreg": most} if most and gpu_of(device).backend == "cuda" else {}


def starts_early(gpu: Gpu) -> bool:
    """Whether a launch there may start before the kernel in front of it has ended.

    What such a kernel does first, for instance copying weights, takes no time then. Each of its programs calls
    `gdc_launch_dependents` as soon as it has its share of a processor, which lets the next launch start where that one
    is of this kind; and `gdc_wait` before it reads or writes what another kernel does, at the latest before it ends,
    or the launch after the next would not wait for the one in front of this. What it reads before must be nobody's
    result in the same step: those in front of the one in front may not have ended either.
    """
    return gpu.backend == "cuda" and gpu.capability >= FIRST_DEPENDENT


def early_start(early: bool) -> dict[str, bool]:
    """The option of such a launch."""
    return {"launch_pdl": True} if early else {}


@functools.cache
def hopper_kernel(gpu: Gpu, stem: str) -> ModuleType | None:
    """The module `stem` ("family.file" in kernels/) of an sm_90 kernel; None on other GPUs and with a Triton it was not tried with."""
    if gpu.capability != HOPPER or not triton_known():
        return None
    return importlib.import_module(f"..{stem}", __package__)
