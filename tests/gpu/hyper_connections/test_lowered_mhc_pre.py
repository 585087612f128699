"""IR of `mhc_pre` on a GPU against float64."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.gpu.lowered import as_ir
from tests.kernels.hyper_connections.calls import arguments, results, wrong

OP = "mhc_pre"


def call(op: Any, *args: Any) -> list[Tensor]:
    return results(op(*args))


@pytest.mark.parametrize("tokens", [1, 300])
def test_results_are_those_in_float64(tokens: int) -> None:
    args = arguments(OP, tokens, 4096, device="cuda")
    assert wrong(OP, args, as_ir(OP, call)(*args)) == ""
