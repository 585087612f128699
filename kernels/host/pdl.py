"""Programmatic dependent launch (PDL): a kernel starts while the previous one in the stream still runs.

A kernel launched with PDL calls `gdc_wait` before it touches memory that other kernels write or read, at the latest
before it ends: otherwise the kernel after it would not wait for the kernel before it. Data that it reads earlier, for
instance a weight, must not be a result of the same step, because kernels before the previous one may still run, too.
It calls `gdc_launch_dependents` as soon as its CTAs are resident, so that the next launch may start if it uses PDL.

`pdl_prologue` does both at once. Its gain is the launch latency alone, up to 1 us of the 2 us of a small kernel.
Launches of many CTAs do without: waiting CTAs of the next kernel take up room on the SMs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .gpu import Gpu, gpu_of

PDL_CAPABILITY = 90
"""Lowest compute capability with PDL."""
MAX_CTAS_PER_SM = 16
"""Largest launch that uses PDL, in CTAs per SM."""


def supports_pdl(gpu: Gpu) -> bool:
    """Return whether launches on `gpu` may use PDL."""
    return gpu.backend == "cuda" and gpu.capability >= PDL_CAPABILITY


def pdl_option(enabled: bool) -> dict[str, bool]:
    """Return the launch option that enables PDL."""
    return {"launch_pdl": True} if enabled else {}


def uses_pdl(gpu: Gpu, programs: int) -> bool:
    """Return whether a launch of `programs` CTAs on `gpu` uses PDL."""
    return supports_pdl(gpu) and programs <= MAX_CTAS_PER_SM * gpu.sms


def pdl_constants(enabled: bool) -> dict[str, bool]:
    """Return constant and option for a launch of a kernel that begins with `pdl_prologue(PDL)`."""
    return {"PDL": enabled, **pdl_option(enabled)}


def pdl_arguments(device: torch.device, programs: int) -> dict[str, bool]:
    """Return constant and option for a launch of `programs` CTAs of a kernel that begins with `pdl_prologue(PDL)`."""
    return pdl_constants(uses_pdl(gpu_of(device), programs))


@triton.jit
def pdl_prologue(PDL: tl.constexpr, LAUNCH_DEPENDENTS: tl.constexpr = True):
    """Begin a kernel: let the next kernel start, with LAUNCH_DEPENDENTS, then wait for the results of previous ones."""
    if PDL:
        if LAUNCH_DEPENDENTS:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
