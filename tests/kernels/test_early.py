"""Which launches start before the kernel in front has ended."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile.kernels.host import pdl as early
from tests.kernels.gpus import GPUS, sees

CPU = torch.device("cpu")


@pytest.mark.parametrize("target", GPUS)
def test_launches_of_few_programs_start_early_where_the_gpu_can(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    can, few = sees(monkeypatch, target), early.MAX_CTAS_PER_SM * GPUS[target][0].sms
    assert early.pdl_arguments(CPU, few) == ({"PDL": True, "launch_pdl": True} if can else {"PDL": False})
    assert early.pdl_arguments(CPU, few + 1) == {"PDL": False}


def test_nothing_starts_early_in_the_interpreter() -> None:
    assert early.pdl_arguments(CPU, 1) == {"PDL": False}
