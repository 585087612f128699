"""GEMMs of a compiled graph on a CPU: calls of the package's function, and its results."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from dsv4_compile import backend
from dsv4_compile.cpu import native
from dsv4_compile.cpu.linear.mm import FEW_TOKENS, LARGE_WEIGHT, mm, mm_out


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(native, "_state", {})
        native.build()
        yield


def exact(x: Tensor, rows: Tensor) -> Tensor:
    return (x.double() @ rows.double().t()).float()


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 5, 7, FEW_TOKENS, FEW_TOKENS + 1, 40])
@pytest.mark.parametrize(("columns", "dim"), [(1, 1), (3, 7), (5, 33), (64, 130), (512, LARGE_WEIGHT // 512)])
def test_gemms_of_every_size_are_exact_to_rounding(tokens: int, columns: int, dim: int) -> None:
    wide, rows = torch.randn(tokens, dim + 3), torch.randn(columns, dim)
    for x in (wide[:, :dim].contiguous(), wide[:, 3:]):
        want = exact(x, rows)
        torch.testing.assert_close(mm(x, rows.t()), want, rtol=1e-5, atol=1e-5 * dim**0.5)
        out = torch.full((tokens, columns + 2), torch.nan)
        mm_out(x, rows, out[:, 1:-1])
        torch.testing.assert_close(out[:, 1:-1], want, rtol=1e-5, atol=1e-5 * dim**0.5)
        assert bool(out[:, [0, -1]].isnan().all())


def test_a_nan_stays_in_its_row() -> None:
    for tokens in (3, FEW_TOKENS + 4):
        x, rows = torch.randn(tokens, 512), torch.randn(512, 512)
        x[1, 5] = torch.nan
        assert mm(x, rows.t()).isnan().any(1).tolist() == [row == 1 for row in range(tokens)]


def test_a_graph_calls_the_function_for_weights_and_torch_for_other_matrices() -> None:
    weight, other = torch.randn(48, 32), torch.randn(48, 16)

    def step(x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, weight) @ other

    torch.compiler.reset()
    with torch.no_grad():
        got, (code,) = run_and_get_code(torch.compile(step, backend=backend.dsv4, fullgraph=True), torch.ones(3, 32))
        torch.testing.assert_close(got, step(torch.ones(3, 32)))
        assert (code.count("= dsv4_mm("), code.count("extern_kernels.mm(")) == (1, 1)
        half = torch.compile(lambda x: x @ weight.bfloat16().t(), backend=backend.dsv4, fullgraph=True)
        _, (code,) = run_and_get_code(half, torch.ones(3, 32).bfloat16())
        assert "dsv4_mm" not in code


def test_inductor_alone_keeps_its_gemm() -> None:
    weight = torch.randn(48, 32)
    torch.compiler.reset()
    with torch.no_grad():
        linear = torch.compile(lambda x: torch.nn.functional.linear(x, weight), backend="inductor", fullgraph=True)
        _, (code,) = run_and_get_code(linear, torch.ones(3, 32))
    assert "dsv4_mm" not in code
