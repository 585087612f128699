"""The fused norm kernel on a GPU against the reference on the same GPU."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile.bench.gate import disagreement
from dsv4_compile.kernels.preprocess import fused_q_kv_rmsnorm as kernels
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.testing import samples  # noqa: F401  (importing the package registers the ops)

EPS = 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 8, 129, 4096, 70_000])
@pytest.mark.parametrize(("q_size", "kv_size"), [(1024, 512), (1536, 512), (97, 64)])
def test_rows_are_neighbours_of_the_reference_at_most(
    tokens: int, q_size: int, kv_size: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator("cuda").manual_seed(tokens)
    projection = torch.randn(tokens, q_size + kv_size, device="cuda", generator=generator).to(dtype) * 3
    weights = [torch.randn(n, device="cuda", generator=generator) for n in (q_size, kv_size)]
    args = projection[:, :q_size], projection[:, q_size:], weights[0].bfloat16(), weights[1], EPS
    got, want = kernels.fused_q_kv_rmsnorm(*args), REFERENCES["fused_q_kv_rmsnorm"](*args)
    assert disagreement(got, want) == ""


def test_the_longest_row_fits() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    qr = torch.randn(9, kernels.MAX_SIZE, device="cuda", generator=generator)
    args = qr, qr[:, :64].contiguous(), qr[0], qr[1, :64], EPS
    assert disagreement(kernels.fused_q_kv_rmsnorm(*args), REFERENCES["fused_q_kv_rmsnorm"](*args)) == ""


def test_a_captured_launch_follows_its_inputs() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    projection = torch.randn(40, 1536, device="cuda", generator=generator).bfloat16()
    args = projection[:, :1024], projection[:, 1024:], projection[0, :1024].clone(), projection[1, :512].clone(), EPS
    kernels.fused_q_kv_rmsnorm(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernels.fused_q_kv_rmsnorm(*args)
    projection.copy_(torch.randn(projection.shape, device="cuda", generator=generator))
    graph.replay()
    for got, want in zip(captured, kernels.fused_q_kv_rmsnorm(*args), strict=True):
        assert torch.equal(got, want)
