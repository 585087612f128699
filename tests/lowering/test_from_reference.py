"""Lowering an op out of its reference: what is generated is fused and vectorised, and calls nothing."""

from __future__ import annotations

import re

import torch
from torch._inductor.utils import run_and_get_code

from dsv4_compile import backend
from dsv4_compile.ops.attention.inv_rope import inv_rope


def test_cpp_rotates_whole_vectors_in_one_kernel() -> None:
    o, positions, table = torch.randn(3, 4, 96).bfloat16(), torch.arange(3), torch.randn(9, 32)

    def step(o: torch.Tensor) -> torch.Tensor:
        return inv_rope(o * 2, positions, table)

    torch.compiler.reset()
    compiled = torch.compile(step, backend=backend.dsv4, fullgraph=True)
    with torch.no_grad():
        got, (code,) = run_and_get_code(compiled, o)
    assert torch.equal(got, step(o))
    loops, call = code.split("def call(")
    assert "Vectorized<at::BFloat16>" in loops
    # An element that finds its partner by the parity of its index is not vectorised.
    assert not re.search(r"% static_cast<int64_t>\(2L\)", loops)
    assert call.count("cpp_fused") == 1
    assert "torch.ops" not in call
