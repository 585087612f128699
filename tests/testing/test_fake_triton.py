"""Ahead-of-time compilation: a kernel with PDL must wait, and SASS is parsed with its scoreboards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dsv4_compile.kernels.host.pdl import pdl_prologue
from tests.support import fake_triton


@triton.jit
def _copy_kernel(p_out, p_x, PDL: tl.constexpr):
    pdl_prologue(PDL)
    tl.store(p_out, tl.load(p_x))


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("launch_pdl", [True, False])
def test_a_kernel_that_starts_early_has_to_wait(waits: bool, launch_pdl: bool) -> None:
    x, kernel = torch.zeros(1), _copy_kernel[(1,)]
    options: dict[str, Any] = {"launch_pdl": True} if launch_pdl else {}
    with fake_triton.compiled_for(fake_triton.HOPPER) as compiled:
        if launch_pdl and not waits:
            with pytest.raises(AssertionError, match="_copy_kernel has PDL and does not wait"):
                kernel(x, x, PDL=waits, **options)
        else:
            kernel(x, x, PDL=waits, **options)
    assert (fake_triton.WAIT in compiled[0].asm["ptx"]) is waits


@triton.jit
def _double_kernel(p_out, p_x):
    tl.store(p_out, tl.load(p_x) * 2)


def test_instructions_are_code_without_labels_and_addresses() -> None:
    x = torch.zeros(1)
    with fake_triton.compiled_for(fake_triton.HOPPER) as compiled:
        _double_kernel[(1,)](x, x)
    code = fake_triton.instructions(compiled[0])
    for name in ("LDG.E", "FADD", "STG.E", "EXIT"):
        assert any(name in line for line in code), name
    assert not any(line.startswith((".", "/")) or line.endswith((":", ";")) for line in code)
