"""Fixtures of the benchmark tests: few samples, and the scenario of the preprocessing ops with a small layer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dsv4_compile import bench
from dsv4_compile.bench import preprocess, timing
from dsv4_compile.config import DeepseekV4Config

TINY = DeepseekV4Config(num_heads=2, o_groups=1, q_lora_rank=48)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples are enough for tests."""
    monkeypatch.setattr(timing, "_MAX_REPEATS", 2)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scenario with a small layer and few tokens."""
    original = preprocess.problems

    def problems(device: torch.device, only: bench.Only) -> Iterator[bench.Problem]:
        return original(device, only, configs=(TINY,), tokens=(1, 5))

    monkeypatch.setattr(preprocess, "problems", problems)
