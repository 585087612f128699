"""What compiling ahead of time notes: a kernel that starts early and never waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dsv4_compile.kernels.early import start
from dsv4_compile.testing import fake_triton


@triton.jit
def _copy_kernel(p_out, p_x, EARLY: tl.constexpr):
    start(EARLY)
    tl.store(p_out, tl.load(p_x))


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("launch_pdl", [True, False])
def test_a_kernel_that_starts_early_has_to_wait(waits: bool, launch_pdl: bool) -> None:
    x, kernel = torch.zeros(1), _copy_kernel[(1,)]
    options: dict[str, Any] = {"launch_pdl": True} if launch_pdl else {}
    with fake_triton.compiled_for(fake_triton.HOPPER) as compiled:
        if launch_pdl and not waits:
            with pytest.raises(AssertionError, match="_copy_kernel starts early and does not wait"):
                kernel(x, x, EARLY=waits, **options)
        else:
            kernel(x, x, EARLY=waits, **options)
    assert (fake_triton.WAIT in compiled[0].asm["ptx"]) is waits
