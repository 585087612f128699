"""IR of `mhc_post` on a GPU against the reference on the same GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.lowered import as_ir
from tests.kernels.hyper_connections.calls import arguments, results

OP = "mhc_post"


def call(op: Any, *args: Any) -> list[Tensor]:
    return results(op(*args))


@pytest.mark.parametrize("tokens", [1, 300])
def test_results_are_close_to_the_reference(tokens: int) -> None:
    args = arguments("mhc_boundary", tokens, 4096, device="cuda")[:4]
    for got, want in zip(as_ir(OP, call)(*args), call(getattr(torch.ops.dsv4, OP), *args), strict=True):
        torch.testing.assert_close(got, want, rtol=2.0**-7, atol=1e-5)
