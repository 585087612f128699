"""Which launches start before the kernel in front has ended."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile.kernels.host import pdl as early
from tests.kernels.gpus import GPUS, sees

CPU = torch.device("cpu")


@pytest.mark.parametrize("target", GPUS)
def test_launches_of_few_programs_start_early_where_the_gpu_can(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    can, few = sees(monkeypatch, target), early.PROGRAMS * GPUS[target][0].processors
    assert early.early_launch(CPU, few) == ({"EARLY": True, "launch_pdl": True} if can else {"EARLY": False})
    assert early.early_launch(CPU, few + 1) == {"EARLY": False}


def test_nothing_starts_early_in_the_interpreter() -> None:
    assert early.early_launch(CPU, 1) == {"EARLY": False}
