"""The GPUs that kernels are compiled for ahead of time, as launchers see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

from dsv4_compile.kernels.host import gpu
from dsv4_compile.kernels.host import pdl as early
from dsv4_compile.kernels.host.gpu import Gpu
from tests.tools.compiled_facts import Kernel

GPUS = {
    "sm_90": (Gpu("cuda", 90, 132), 227),
    "sm_100": (Gpu("cuda", 100, 148), 227),
    "sm_120": (Gpu("cuda", 120, 170), 99),
    "gfx942": (Gpu("hip", 0, 304), 64),
    "gfx950": (Gpu("hip", 0, 256), 160),
}
"""By target: the GPU, and the KiB of shared memory that a program may have."""
Variant = TypeVar("Variant")


def shared_out(variants: Sequence[Variant]) -> dict[str, list[Variant]]:
    """Share the variants of a kernel out to targets: all to the first, one each in turn to the others.

    sm_120, which has little shared memory, gets the second variant.
    """
    others = [target for target in GPUS if target != "sm_90"]
    turns = {target: [variants[turn % len(variants)]] for turn, target in enumerate(others)}
    return {target: turns.get(target, list(variants)) for target in GPUS}


def sees(monkeypatch: pytest.MonkeyPatch, target: str) -> bool:
    """Let launchers see the GPU `target`; whether kernels start early there."""
    seen = GPUS[target][0]
    for module in (early, gpu):
        monkeypatch.setattr(module, "gpu_of", lambda device: seen)
    return early.supports_pdl(seen)


def begins_early(kernel: Kernel) -> bool:
    """Whether a kernel lets the next one start, and then waits."""
    return kernel.ask(_begins_early)


def _begins_early(compiled: Any) -> bool:
    steps = [line for line in compiled.asm.get("ptx", "").splitlines() if "griddepcontrol" in line]
    return bool(steps) and "launch_dependents" in steps[0] and "wait" in steps[-1]
