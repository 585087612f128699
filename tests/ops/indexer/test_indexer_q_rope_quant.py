from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.errors import InputError
from dsv4_compile.ops.indexer.indexer_q_rope_quant import indexer_q_rope_quant
from dsv4_compile.reference.indexer.indexer_q_rope_quant import indexer_q_rope_quant as reference
from dsv4_compile.testing import assert_bitwise, check_op, padded, refuse_synchronization, strided
from tests.support import scalar
from tests.support.scalar import bf16, f32

FORMATS = pytest.mark.parametrize("fmt", layout.INDEXER_FORMATS)
FLOATS = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def rope_table(rope_dim: int, positions: int = 40) -> Tensor:
    angles = torch.arange(positions)[:, None] * 0.3 ** torch.arange(rope_dim // 2)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def arguments(
    tokens: int, heads: int = 3, dim: int = 128, rope_dim: int = 64, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q = torch.randn(tokens, heads, dim) * torch.logspace(-3, 2, tokens * heads).view(tokens, heads, 1)
    return q.to(dtype), torch.randperm(40)[:tokens], rope_table(rope_dim), torch.randn(tokens, heads).to(dtype)


def scalar_weight(weight: float, scale: float, dim: int, heads: int) -> float:
    """float32 products in the order that the kernels keep: scale, dims, heads."""
    return f32(f32(f32(weight * scale) * f32(dim**-0.5)) * f32(heads**-0.5))


def scalar_query(fmt: str, values: list[float]) -> tuple[bytes, bytes, float]:
    """Value bytes, scale bytes and the scale that goes into the weight, of a query already rounded."""
    if fmt == "indexer_fp8":
        data, byte = scalar.quantize_tile(values, layout.KV_AMAX_FLOOR)
        return data, b"", 2.0 ** (byte - layout.UE8M0_BIAS)
    codes, scales = [], []
    for start in range(0, len(values), layout.MX_TILE):
        tile = values[start : start + layout.MX_TILE]
        exponent = scalar.ue8m0_exponent(max(layout.MXFP4_AMAX_FLOOR, *map(abs, tile)), layout.E2M1_MAX)
        codes += [scalar.e2m1_code(math.ldexp(v, -exponent)) for v in tile]
        scales.append(exponent + layout.UE8M0_BIAS)
    return bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)), bytes(scales), 1.0


def check_bytes(
    got: tuple[Tensor, Tensor, Tensor], fmt: str, rounded: list[list[list[float]]], weights: Tensor
) -> None:
    """Every byte of the result of `fmt` for queries `rounded` [T][H][D]."""
    heads, dim = weights.shape[1], len(rounded[0][0])
    for t, token in enumerate(rounded):
        for h, values in enumerate(token):
            data, scales, folded = scalar_query(fmt, values)
            assert bytes(got[0][t, h].view(torch.uint8).tolist()) == data
            assert bytes(got[1][t, h].view(torch.uint8).tolist()) == scales
            assert got[2][t, h].item() == scalar_weight(weights[t, h].item(), folded, dim, heads)


@FLOATS
@pytest.mark.parametrize("fmt", ["indexer_fp8", "indexer_mxfp4"])
def test_quantised_queries_and_weights_are_exact_to_the_bit(fmt: str, dtype: torch.dtype) -> None:
    """Rotated in float32, rounded to bfloat16 once, then quantised; over five decades of magnitude."""
    q, positions, table, weights = arguments(5, dtype=dtype)
    rounded = [
        [[bf16(v) for v in scalar.rotate(row.tolist(), table[positions[t]].tolist())] for row in token]
        for t, token in enumerate(q)
    ]
    check_bytes(indexer_q_rope_quant(q, positions, table, weights, fmt), fmt, rounded, weights)


@FLOATS
def test_plain_queries_are_rounded_once_to_their_own_dtype(dtype: torch.dtype) -> None:
    q, positions, table, weights = arguments(4, dim=24, rope_dim=16, dtype=dtype)
    values, scale, folded = indexer_q_rope_quant(q, positions, table, weights, "plain")
    rows = [[scalar.rotate(row.tolist(), table[positions[t]].tolist()) for row in token] for t, token in enumerate(q)]
    assert_bitwise(values, torch.tensor(rows).to(dtype))
    assert scale.shape == (4, 3, 0)
    expected = [[scalar_weight(w, 1.0, 24, 3) for w in row] for row in weights.tolist()]
    assert_bitwise(folded, torch.tensor(expected))


@pytest.mark.parametrize("fmt", ["indexer_fp8", "indexer_mxfp4"])
def test_hadamard_queries_are_exact_to_the_bit(fmt: str) -> None:
    """Small integers at position 0, so that no sum of the transform is rounded before the last product."""
    q = torch.randint(-5, 6, (3, 2, 128)).bfloat16()
    weights = torch.randn(3, 2)
    factor = f32(128**-0.5)
    rounded = [
        [
            [bf16(f32(sum(v * (-1) ** (i & j).bit_count() for j, v in enumerate(row)) * factor)) for i in range(128)]
            for row in token
        ]
        for token in q.int().tolist()
    ]
    got = indexer_q_rope_quant(q, torch.zeros(3, dtype=torch.int64), rope_table(64), weights, fmt, True)
    check_bytes(got, fmt, rounded, weights)


def test_hadamard_on_both_sides_keeps_dot_products() -> None:
    """float32 queries are never rounded to bfloat16 on the way."""
    q, positions, table, weights = arguments(6, heads=1, dim=32, rope_dim=16, dtype=torch.float32)
    plain = indexer_q_rope_quant(q, positions, table, weights, "plain")[0][:, 0].double()
    transformed = indexer_q_rope_quant(q, positions, table, weights, "plain", True)[0][:, 0].double()
    assert not torch.allclose(plain, transformed, rtol=0.1)
    bound = plain.norm(dim=1)[:, None] * plain.norm(dim=1)
    assert ((transformed @ transformed.T - plain @ plain.T).abs() < 1e-6 * bound).all()


def test_a_zero_query_takes_the_smallest_scale() -> None:
    q, positions, table, weights = arguments(1)
    positions = torch.zeros_like(positions)  # no rotation, so no negative zero
    values, _, folded = indexer_q_rope_quant(torch.zeros_like(q), positions, table, weights, "indexer_fp8")
    assert not values.float().any()
    assert folded[0, 0].item() == scalar_weight(weights[0, 0].item(), 2.0**-22, 128, 3)
    values, scale, _ = indexer_q_rope_quant(torch.zeros_like(q), positions, table, weights, "indexer_mxfp4")
    assert not values.any()
    assert scale.unique().tolist() == [1]


@FORMATS
def test_heads_do_not_influence_each_other(fmt: str) -> None:
    q, positions, table, weights = arguments(2)
    clean = indexer_q_rope_quant(q, positions, table, weights, fmt)
    q[0, 1], weights[1, 2] = torch.nan, torch.nan
    dirty = indexer_q_rope_quant(q, positions, table, weights, fmt)
    for a, b in zip(clean, dirty, strict=True):
        assert_bitwise(a[[0, 0, 1, 1], [0, 2, 0, 1]], b[[0, 0, 1, 1], [0, 2, 0, 1]])


@FORMATS
def test_layout_of_the_arguments_does_not_matter(fmt: str) -> None:
    """Queries are often a view of a wider projection, and positions a prefix of a persistent buffer."""
    q, positions, table, weights = arguments(4)
    expected = indexer_q_rope_quant(q, positions, table, weights, fmt)
    buffer = torch.cat((positions, torch.full((3,), -1))).int()
    got = indexer_q_rope_quant(strided(q), buffer, padded(table), strided(weights), fmt)
    for a, b in zip(got, expected, strict=True):
        assert_bitwise(a, b, strides=True)


@FORMATS
@pytest.mark.parametrize("hadamard", [False, True])
def test_op_keeps_its_promises(fmt: str, hadamard: bool) -> None:
    q, positions, table, weights = arguments(5)
    samples = [
        (q, positions, table, weights),
        (q[:1], positions[:1], table, weights[:1]),
        (q[:0], positions[:0], table, weights[:0]),
        (padded(q.float()), positions.int(), table, strided(weights)),
        (q[:, :1], positions, table, weights[:, :1]),
    ]
    calls = [(*sample, fmt, hadamard) for sample in samples]
    check_op(indexer_q_rope_quant, calls, utilities=(fmt, hadamard) == ("indexer_fp8", False))


@FORMATS
@FLOATS
def test_rounded_weights_are_those_of_a_cast_in_front(fmt: str, dtype: torch.dtype) -> None:
    q, positions, table, _ = arguments(5, dtype=dtype)
    weights = torch.randn(5, 3) * 1.01
    got = indexer_q_rope_quant(q, positions, table, weights, fmt, False, True)
    for ours, theirs in zip(got, indexer_q_rope_quant(q, positions, table, weights.to(dtype), fmt), strict=True):
        assert_bitwise(ours, theirs)
    unrounded = indexer_q_rope_quant(q, positions, table, weights, fmt)[2]
    assert torch.equal(got[2], unrounded) == (dtype is torch.float32)


@FORMATS
def test_reference_never_synchronises(fmt: str) -> None:
    args = arguments(3)
    with refuse_synchronization():
        reference(*args, fmt, True)


@pytest.mark.parametrize(
    ("fmt", "backend"), [("indexer_fp8", "inductor"), ("indexer_mxfp4", "aot_eager"), ("plain", "aot_eager")]
)
def test_compiles_once_for_every_token_count(fmt: str, backend: str) -> None:
    table = rope_table(64)

    def step(q: Tensor, positions: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, scale, folded = indexer_q_rope_quant(q, positions, table, weights, fmt)
        return values, scale, folded * 2

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (3, 7, 20):
            q, positions, _, weights = arguments(tokens)
            for x in (q, positions, weights):
                torch._dynamo.mark_dynamic(x, 0)
            for got, want in zip(compiled(q, positions, weights), step(q, positions, weights), strict=True):
                assert_bitwise(got, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(2, 3, 64)}, "vectors of 128 dims"),
        ({0: torch.zeros(2, 3 * 128)}, r"q \[T, H, D\]"),
        ({1: torch.zeros(1, dtype=torch.int64)}, "row for every token"),
        ({2: torch.zeros(4, 130)}, "at most 128"),
        ({2: torch.zeros(4, 64, dtype=torch.bfloat16)}, "cos_sin_cache"),
        ({3: torch.zeros(2, 4)}, "same heads"),
        ({3: torch.zeros(3, 3)}, "same tokens"),
        ({4: "fp8_ds_mla"}, "unknown cache format"),
        ({0: torch.zeros(2, 3, 96), 4: "plain", 5: True}, "power of two"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[int, object], message: str) -> None:
    args: list[object] = [*arguments(2), "indexer_fp8", False]
    for index, value in change.items():
        args[index] = value
    with pytest.raises(InputError, match=message):
        indexer_q_rope_quant(*args)
