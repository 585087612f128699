"""The GPUs that kernels are compiled for ahead of time, as launchers see them."""

from __future__ import annotations

from dsv4_compile.kernels.gpu import Gpu

GPUS = {
    "sm_90": (Gpu("cuda", 90, 132), 227),
    "sm_100": (Gpu("cuda", 100, 148), 227),
    "sm_120": (Gpu("cuda", 120, 170), 99),
    "gfx942": (Gpu("hip", 0, 304), 64),
    "gfx950": (Gpu("hip", 0, 256), 160),
}
"""By target: the GPU, and the KiB of shared memory that a program may have."""
