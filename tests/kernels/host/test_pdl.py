"""Launches with programmatic dependent launch (PDL)."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile.kernels.host import pdl
from tests.kernels.gpus import GPUS, sees

CPU = torch.device("cpu")


@pytest.mark.parametrize("target", GPUS)
def test_launches_of_few_programs_start_early_where_the_gpu_can(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    can, few = sees(monkeypatch, target), pdl.MAX_CTAS_PER_SM * GPUS[target][0].sms
    assert pdl.pdl_arguments(CPU, few) == ({"PDL": True, "launch_pdl": True} if can else {"PDL": False})
    assert pdl.pdl_arguments(CPU, few + 1) == {"PDL": False}


def test_nothing_starts_early_in_the_interpreter() -> None:
    assert pdl.pdl_arguments(CPU, 1) == {"PDL": False}
