"""Scenario `metadata`: both ops are compared before they are timed, and its batches are full."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile import bench
from dsv4_compile.bench import metadata, timing
from dsv4_compile.ops.common.arguments import tensors_in
from dsv4_compile.ops.metadata.batch_metadata import ARGUMENTS

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples are enough for tests."""
    monkeypatch.setattr(timing, "_MAX_REPEATS", 2)


def test_eager_is_timed_and_a_kernel_needs_a_gpu() -> None:
    record = bench.run("metadata", only={"impl": {"eager", "triton"}, "tokens": {"32"}}, device=CPU)
    rows = record["rows"]
    assert "advance, query 4, max_len 16384" in bench.render(record)
    assert {(row["op"], row["impl"], row["status"]) for row in rows} == {
        (op, impl, status)
        for op in ("batch_metadata", "advance")
        for impl, status in (("eager", "ok"), ("triton", "unavailable"))
    }
    assert all(row["floor_us"] > 0 for row in rows)


def test_steps_are_full_and_their_cost_is_the_bytes_of_their_buffers() -> None:
    for problem in metadata.problems(CPU, {}, sizes=((3, 2),), max_lens=(700,)):
        args = problem.make(0)
        written = tensors_in(args[i] for i in problem.written)
        size = sum(x.numel() * x.element_size() for x in written)
        if problem.op == "batch_metadata":
            problem.reference(*args)
            assert args[ARGUMENTS.index("is_valid_token")].all()
            assert problem.cost.bytes == size
        else:
            assert problem.cost.bytes > size // 2
