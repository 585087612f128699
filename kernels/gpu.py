"""The facts about a GPU that decide how a launch is cut up."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


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
