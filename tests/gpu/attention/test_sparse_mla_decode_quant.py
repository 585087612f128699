"""The decode kernels with quantised results on a GPU: bit for bit the ops that do each step alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_compile.bench import sparse_mla_decode as scenario
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.testing import assert_bitwise
from tests.gpu.attention.sparse_mla import BF16, CUDA, EPS, KERNELS, garbage, heads_of, kernels_for, on_gpu, rope
from tests.ops.attention.test_sparse_mla_decode import sample

__all__ = ["garbage"]  # a fixture for every test


def grouped(groups: int, heads: int, packed: bool) -> dict[str, Any]:
    return {"n_groups": groups, "heads_per_group": heads, "packed_scales": packed}


def separate(out: torch.Tensor, turn: dict[str, torch.Tensor], groups: dict[str, Any]) -> Any:
    return REFERENCES["inv_rope_fp8_quant"](out, *turn.values(), *groups.values())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("tokens", "heads", "groups", "size"), [(1, 64, 8, 8), (37, 128, 16, 8), (6, 64, 3, 21)])
def test_values_and_scales_are_those_of_inv_rope_fp8_quant(
    kernel: str, packed: bool, splits: int, tokens: int, heads: int, groups: int, size: int
) -> None:
    args = on_gpu(sample(tokens, heads_of(kernel, heads), window=130, extra=517, fmt="fp8_ds_mla", **BF16))
    turn, how = rope(tokens), grouped(groups, heads_of(kernel, size), packed)
    for norm in ({}, {"q_norm_eps": EPS}):
        out, _ = KERNELS[kernel](args, splits, **turn, **norm)
        got = KERNELS[kernel](args, splits, **turn, **norm, inverse_rope=True, **how)
        for a, b in zip(got, separate(out, turn, how), strict=True):
            assert_bitwise(a, b, strides=True)
        rows = got[1].as_strided((groups, got[1].shape[2], -(-tokens // 4) * 4), (*got[1].stride()[1:], 1))
        assert (rows[..., tokens:] == 0).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("splits", [17, 40, 72])
def test_splits_that_are_combined_at_once(splits: int, packed: bool) -> None:
    args = on_gpu(sample(3, 64, window=130, extra=1400, fmt="fp8_ds_mla", **BF16))
    turn, how = rope(3), grouped(8, 8, packed)
    for kernel in kernels_for(64):
        out, _ = kernel(args, splits, **turn, q_norm_eps=EPS)
        got = kernel(args, splits, **turn, q_norm_eps=EPS, inverse_rope=True, **how)
        for a, b in zip(got, separate(out, turn, how), strict=True):
            assert_bitwise(a, b, strides=True)


@pytest.mark.parametrize("heads", [1, 8, 17, 32, 100])
@pytest.mark.parametrize("packed", [False, True])
def test_any_number_of_heads(heads: int, packed: bool) -> None:
    args = (*scenario.arguments(11, heads, CUDA, heads), None)
    turn, how = rope(11), grouped(heads, 1, packed)
    for splits in (1, 4):
        for kernel in kernels_for(heads):
            want = separate(kernel(args, splits)[0], turn, how)
            for a, b in zip(kernel(args, splits, **turn, inverse_rope=True, **how), want, strict=True):
                assert_bitwise(a, b, strides=True)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tokens", [2, 150])
def test_a_captured_graph_follows_its_buffers_and_repeats_itself(kernel: str, tokens: int) -> None:
    args = (*scenario.arguments(tokens, heads_of(kernel, 64), CUDA, 6), None)
    options: dict[str, Any] = {
        **rope(tokens),
        "q_norm_eps": EPS,
        "inverse_rope": True,
        **grouped(8, heads_of(kernel, 8), True),
    }
    KERNELS[kernel](args, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = KERNELS[kernel](args, **options)
    for step in range(4):
        args[0].normal_()
        args[3].fill_((128, 0, 65, 1)[step])
        args[10].fill_((512, 0, 1, 257)[step])
        options["positions"].add_(17)
        for _ in range(25):
            graph.replay()
        for got, want in zip(captured, KERNELS[kernel](args, **options), strict=True):
            assert_bitwise(got, want)


def test_the_op_takes_the_best_kernel() -> None:
    args = scenario.arguments(9, 64, CUDA, 1)
    turn = rope(9)
    out, _ = torch.ops.dsv4.sparse_mla_decode(*args, **turn)
    got = torch.ops.dsv4.sparse_mla_decode_quant(*args, **turn, n_groups=8)
    for a, b in zip(got, separate(out, turn, grouped(8, 8, False)), strict=True):
        assert_bitwise(a, b, strides=True)
    empty = torch.ops.dsv4.sparse_mla_decode_quant(args[0][:0], *args[1:], **turn, n_groups=8)
    assert empty[0].shape == (0, 8, 4096) and empty[1].shape == (0, 8, 32)
