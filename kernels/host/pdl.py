"""How kernels begin that start before the one in front has ended; see `gpu.starts_early`.

These read nothing ahead: what they gain is the launch, up to a microsecond of the two that a small one takes. It costs
each program a little too, so that launches of many programs do not, or do not let the next one start before they end:
what that one's programs wait with is a share of a processor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .gpu import early_start, gpu_of, starts_early

PROGRAMS = 16
"""Most programs for each multiprocessor of a launch that starts early."""


@triton.jit
def start(EARLY: tl.constexpr, NEXT: tl.constexpr = True):
    """The first of what a kernel does: let the next one start, with NEXT, and wait for what those in front have
    written."""
    if EARLY:
        if NEXT:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def early_launch(device: torch.device, programs: int) -> dict[str, bool]:
    """The arguments of a launch of `programs` whose kernel begins with `start(EARLY)`."""
    gpu = gpu_of(device)
    early = starts_early(gpu) and programs <= PROGRAMS * gpu.processors
    return {"EARLY": early, **early_start(early)}
