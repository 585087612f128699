"""Kernels of `mhc_head` on a GPU: captured, with the bits of a call outside a graph."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile.testing import samples  # noqa: F401  (importing the package registers the ops)
from tests.gpu.hyper_connections.test_mhc_boundary import FLASH, check, launch
from tests.kernels.hyper_connections.calls import arguments


@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_a_captured_launch_follows_its_inputs(tokens: int) -> None:
    args = arguments("mhc_head", tokens, FLASH, device="cuda")
    check("mhc_head", args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = launch("mhc_head", args)
    args[0].copy_(arguments("mhc_head", tokens, FLASH, device="cuda", seed=7)[0])
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, check("mhc_head", args)))
