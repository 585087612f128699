"""`moe_route` against the reference, in the checking interpreter, and compiled for every GPU."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.host import pdl
from dsv4_compile.kernels.moe import moe_route as kernels
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.testing import assert_bitwise, hostile_indices, padded, poisoned_empty, strided
from tests.kernels.gpus import GPUS, begins_early
from tests.kernels.moe.programs import random_order
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
WRITTEN = ("results[0]", "results[1]", "tensors[0]", "tensors[1]", "p_logits", "p_arrived")
BF16, F32 = torch.bfloat16, torch.float32
TARGETS = fake_triton.TARGETS


def problem(tokens: int, experts: int, size: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    gate = torch.randn(experts, size) * size**-0.5
    return torch.randn(tokens, size).bfloat16(), gate.to(dtype), torch.randn(experts) * 0.1


def check(*args: Any, seed: int = 0) -> tuple[Tensor, Tensor]:
    counters = torch.zeros(64, dtype=torch.int32)
    with (
        mock.patch.object(kernels, "arrival_counters", lambda count, device: counters),
        poisoned_empty(),
        checked(mutated=WRITTEN) as seen,
        random_order(seed),
    ):
        ids, weights = kernels.moe_route(*args)
    tokens = len(args[0])
    assert seen == ["moe_route_kernel"] * (tokens > 0) + ["moe_choose_kernel"] * (tokens > 1)
    assert not counters.any()
    want_ids, want_weights = REFERENCES["moe_route"](*args)
    assert_bitwise(ids, want_ids)
    assert ids.is_contiguous() and weights.is_contiguous()
    torch.testing.assert_close(weights, want_weights, rtol=2e-5, atol=1e-7, equal_nan=True)
    return ids, weights


@interpreted
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
    ("tokens", "experts", "size", "top_k"), [(1, 64, 640, 6), (5, 48, 1024, 8), (18, 20, 100, 1), (33, 384, 128, 6)]
)
def test_choice_and_weights_are_the_references(
    tokens: int, experts: int, size: int, top_k: int, dtype: torch.dtype
) -> None:
    check(*problem(tokens, experts, size, dtype), None, None, top_k, 1.5, seed=tokens)


@interpreted
def test_a_float32_gate_is_multiplied_exactly() -> None:
    """Logits differ in the last bits of the gate alone."""
    x, gate = torch.zeros(1, 64).bfloat16(), torch.ones(16, 64)
    x[0, 0] = 1
    gate[:, 0] = torch.tensor([1 + k * 2.0**-23 for k in torch.randperm(16).tolist()])
    logits = torch.zeros(kernels.CHUNKS, 1, 16)
    empty = torch.empty
    with mock.patch.object(torch, "empty", lambda shape, **how: logits if len(shape) == 3 else empty(shape, **how)):
        kernels.moe_route(x, gate, None, None, None, 4)
    assert_bitwise(logits.sum(0)[0], gate[:, 0])


@interpreted
def test_of_equal_scores_the_smaller_id_comes_first() -> None:
    x, gate, bias = problem(9, 40, 128)
    gate[1::2], bias[1::2] = gate[::2], bias[::2]
    check(x, gate, bias, None, None, 6)
    check(torch.zeros_like(x), gate, None, None, None, 6)


@interpreted
def test_infinities_and_nan_choose_experts_all_the_same() -> None:
    x, gate, bias = problem(7, 20, 128)
    x[1], x[2, 5] = torch.nan, torch.inf
    x[3] = -1e30
    bias[3], bias[7], bias[11] = -torch.inf, torch.inf, torch.nan
    ids, _ = check(x, gate, bias, None, None, 20)
    assert all(sorted(row) == [*range(20)] for row in ids.tolist())
    small = torch.full((20, 128), -1.0).bfloat16() * torch.arange(1, 21)[:, None]
    check(torch.full((2, 128), 0.01).bfloat16(), small, None, None, None, 20)


@interpreted
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_a_table_gives_the_experts_and_hostile_ids_none(kind: torch.dtype) -> None:
    x, gate, _ = problem(40, 24, 200)
    table = hostile_indices((50, 3), 24, fraction=0.1, dtype=kind)
    check(x, gate, None, hostile_indices((40,), 50, dtype=kind), table, 3, 1.5)
    check(x, gate.float(), None, strided(torch.arange(40, dtype=kind)), padded(table), 3)


@interpreted
def test_arguments_are_read_where_they_are_and_no_token_gives_an_empty_result() -> None:
    x, gate, bias = problem(6, 30, 192)
    check(padded(x), strided(gate), strided(bias), None, None, 5)
    check(strided(x), padded(gate.float()), None, None, None, 5)
    check(x[:0], gate, bias, None, None, 5)


@interpreted
def test_a_token_is_routed_by_the_same_bits_in_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    # Exact sums: the interpreter's matmul adds in an order that depends on shapes, which a tensor core does not.
    x, gate, bias = problem(40, 70, 1024)
    x, gate = (8 * x).round().clamp(-8, 8), (256 * gate).round() / 256
    together = kernels.moe_route(x, gate, bias, None, None, 6)
    alone = [kernels.moe_route(x[t : t + 1], gate, bias, None, None, 6) for t in (0, 17, 39)]
    monkeypatch.setattr(kernels, "FEW_TOKENS", 0)
    many = kernels.moe_route(x, gate, bias, None, None, 6)
    for got, want in zip(many, together, strict=True):
        assert_bitwise(got, want)
    for t, one in zip((0, 17, 39), alone, strict=True):
        for got, want in zip(one, together, strict=True):
            assert_bitwise(got, want[t : t + 1])


def test_unsupported_calls_say_why() -> None:
    x, gate, _ = problem(2, 8, 16)
    why = kernels.why_unsupported_moe_route
    assert why(x, gate) == ""
    assert "x is torch.float32" in why(x.float(), gate)
    assert "torch.float16" in why(x, gate.half())
    assert "up to 32 of 1024 experts, not 6 of 2000" in why(x, torch.empty(2000, 16).bfloat16())
    assert "D is 0" in why(x[:, :0], gate[:, :0])


@pytest.mark.parametrize("tokens", [1, 128, 5000])
@pytest.mark.parametrize("target", TARGETS)
def test_they_compile_ahead_of_time_within_shared_memory(
    target: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pdl, "gpu_of", lambda device: GPUS[target][0])
    gate = torch.empty(384 if tokens == 128 else 256, 4096, dtype=F32 if tokens != 1 else BF16)
    x, table = torch.empty(tokens, 4096, dtype=BF16), torch.empty(129280, 6, dtype=torch.int64)
    with compiled_for(target) as compiled:
        if tokens == 128:
            kernels.moe_route(x, gate, None, torch.empty(tokens, dtype=torch.int64), table)
        else:
            kernels.moe_route(x, gate, torch.empty(len(gate)))
        if tokens == 1:
            kernels.moe_route(x, gate, None, torch.empty(tokens, dtype=torch.int64), table)
    assert len(compiled) == 2, "by scores and by a table for one token, in two launches for more"
    for kernel in compiled:
        assert kernel.assembled and kernel.metadata.shared <= GPUS[target][1] * 1024
        if target.startswith("sm_"):
            assert begins_early(kernel) or (kernel is not compiled[0] and tokens == 5000)  # too many CTAs for PDL
            # Other instructions would round otherwise.
            assert "wgmma" not in kernel.asm["ptx"] and "tcgen05" not in kernel.asm["ptx"]
