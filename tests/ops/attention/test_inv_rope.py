"""Inverse RoPE of the attention output and its quantisation: values, scales, and the exact strides of both."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from dsv4_compile.errors import InputError
from dsv4_compile.ops.attention.inv_rope import inv_rope, inv_rope_fp8_quant
from dsv4_compile.ops.preprocess.q_norm_rope import q_norm_rope
from dsv4_compile.testing import assert_bitwise, check_op, padded, strided
from tests.support import scalar

GROUPS, HEADS, DIM, ROPE = 3, 4, 64, 16
SIZE = HEADS * DIM  # two tiles of 128, two heads each


def rope_table(max_pos: int = 40) -> Tensor:
    angle = torch.arange(max_pos)[:, None] * 100.0 ** (-torch.arange(ROPE // 2) / (ROPE // 2))
    return torch.cat((angle.cos(), angle.sin()), dim=1)


def output(tokens: int, heads: int = GROUPS * HEADS, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Return attention outputs of many magnitudes, and positions."""
    o = torch.randn(tokens, heads, DIM) * torch.logspace(-12, 4, heads)[:, None]
    return o.to(dtype), torch.randint(0, 40, (tokens,))


def rotated_back(o: Tensor, positions: Tensor) -> list[list[list[float]]]:
    table = rope_table()
    return [
        [scalar.rotate(head, table[position].tolist(), inverse=True) for head in token]
        for token, position in zip(o.tolist(), positions.tolist(), strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotation_is_undone_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    o, positions = output(5, dtype=dtype)
    got = inv_rope(o, positions, rope_table())
    assert_bitwise(got, torch.tensor(rotated_back(o, positions)).to(dtype))
    assert got.is_contiguous()


def test_inverse_of_the_query_rotation() -> None:
    q, positions = torch.randn(6, 2, DIM), torch.arange(6) * 7
    normed = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6)
    back = inv_rope(q_norm_rope(q, positions, rope_table(), 1e-6), positions, rope_table())
    torch.testing.assert_close(back, normed, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_scales_are_those_of_the_unrounded_rotation(dtype: torch.dtype) -> None:
    o, positions = output(5, dtype=dtype)
    o[0] = 0
    values, scale = inv_rope_fp8_quant(o, positions, rope_table(), GROUPS, HEADS)
    for t, token in enumerate(rotated_back(o, positions)):
        for g in range(GROUPS):
            row = [x for head in token[g * HEADS : g * HEADS + HEADS] for x in head]
            for k in range(SIZE // 128):
                data, byte = scalar.quantize_tile(row[128 * k : 128 * k + 128], 1e-10)
                assert scale[t, g, k].item() == 2.0 ** (byte - 127)
                assert bytes(values[t, g, 128 * k : 128 * k + 128].view(torch.uint8).tolist()) == data


def test_zero_rows_take_the_scale_of_the_floor() -> None:
    o, positions = torch.zeros(2, HEADS, DIM), torch.tensor([0, 39])
    values, scale = inv_rope_fp8_quant(o, positions, rope_table(), 1, HEADS)
    assert not values.float().any()
    assert scale.unique().tolist() == [2.0 ** math.ceil(math.log2(1e-10 / 448))]


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 9])
@pytest.mark.parametrize("packed", [False, True], ids=["float32 scales", "packed scales"])
def test_strides_are_exact_and_pad_rows_are_zero(tokens: int, packed: bool) -> None:
    values, scale = inv_rope_fp8_quant(*output(tokens), rope_table(), GROUPS, HEADS, packed)
    assert (values.shape, values.stride(), values.dtype) == (
        (tokens, GROUPS, SIZE),
        (SIZE, tokens * SIZE, 1),
        torch.float8_e4m3fn,
    )
    assert values.untyped_storage().nbytes() == tokens * GROUPS * SIZE

    aligned, count = (tokens + 3) // 4 * 4, 1 if packed else 2
    assert (scale.shape, scale.stride()) == ((tokens, GROUPS, count), (1, count * aligned, aligned))
    assert scale.dtype is (torch.int32 if packed else torch.float32)
    assert scale.untyped_storage().nbytes() == GROUPS * count * aligned * 4
    storage = scale.as_strided((GROUPS, count, aligned), (count * aligned, aligned, 1), 0)
    assert_bitwise(storage[..., :tokens], scale.permute(1, 2, 0))
    assert not storage[..., tokens:].any()


@pytest.mark.parametrize("heads_per_group", [2, 8, 10])
def test_packed_scales_hold_the_same_bytes_first_tile_lowest(heads_per_group: int) -> None:
    o, positions = output(5, 2 * heads_per_group)
    arguments = o, positions, rope_table(), 2, heads_per_group
    (values, scale), (same, words) = inv_rope_fp8_quant(*arguments), inv_rope_fp8_quant(*arguments, True)
    assert_bitwise(same, values, strides=True)
    tiles = heads_per_group // 2
    assert words.shape[2] == (tiles + 3) // 4
    for tile in range(4 * words.shape[2]):
        byte = (words[..., tile // 4] >> (8 * (tile % 4))) & 0xFF
        want = scale[..., tile].log2().int() + 127 if tile < tiles else torch.zeros_like(byte)
        assert_bitwise(byte, want)


def test_padding_heads_are_not_read() -> None:
    o, positions = output(3, 16)
    o[:, GROUPS * HEADS :] = torch.nan
    sliced = inv_rope_fp8_quant(o[:, : GROUPS * HEADS], positions, rope_table(), GROUPS, HEADS)
    for got, want in zip(inv_rope_fp8_quant(o, positions, rope_table(), GROUPS, HEADS), sliced, strict=True):
        assert_bitwise(got, want, strides=True)
        assert got.float().isfinite().all()


def test_op_contract() -> None:
    (o, positions), table = output(5), rope_table()
    check_op(
        inv_rope,
        [
            (o, positions, table),
            (strided(o.float()), strided(positions), padded(table)),
            (padded(o)[:, :2], positions.int(), table),
            (o[:1], positions, table),
            (o[:0], positions[:0], table),
        ],
    )


def test_op_contract_of_the_quantisation() -> None:
    (o, positions), table = output(5), rope_table()
    check_op(
        inv_rope_fp8_quant,
        [
            (o, positions, table, GROUPS, HEADS),
            (strided(o.float()), strided(positions), padded(table), GROUPS, HEADS, True),
            (padded(o)[:4], positions.int(), table, 1, 2),
            (o[:1], positions[:1], table, GROUPS, HEADS),
            (o[:0], positions[:0], table, GROUPS, HEADS, True),
        ],
    )


@pytest.mark.parametrize("packed", [False, True], ids=["float32 scales", "packed scales"])
def test_inductor_sees_the_strides_that_the_op_returns(packed: bool) -> None:
    """Outputs of a graph are included: torch guards on whether scales are dense, which they are if T divides by 4.

    So there is one graph for those T and one for the others, not more.
    """
    table = rope_table()

    def step(o: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, scale = inv_rope_fp8_quant(o, positions, table, GROUPS, HEADS, packed)
        return values, scale, scale.transpose(0, 1) * 2

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    with torch.no_grad():
        for tokens in (5, 8, 3, 12, 6):
            o, positions = output(tokens)
            torch._dynamo.mark_dynamic(o, 0)
            torch._dynamo.mark_dynamic(positions, 0)
            got, want = compiled(o, positions), step(o, positions)
            assert_bitwise(got[0], want[0], strides=True)
            assert_bitwise(got[1], want[1], strides=True)
            assert_bitwise(got[2], want[2])
    assert counter.frame_count == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"o": torch.zeros(2, 4)}, r"o \[T, H, D\]"),
        ({"o": torch.zeros(2, 11, DIM)}, "at least 3 x 4 heads"),
        ({"heads_per_group": 3}, "whole tiles of 128"),
        ({"positions": torch.tensor([0])}, "positions has a row for every token"),
        ({"cos_sin_cache": torch.zeros(8, 65)}, "even width"),
    ],
)
def test_wrong_arguments_raise(changes: dict[str, object], message: str) -> None:
    arguments = {
        "o": torch.zeros(2, GROUPS * HEADS, DIM),
        "positions": torch.tensor([0, 1]),
        "cos_sin_cache": rope_table(),
        "n_groups": GROUPS,
        "heads_per_group": HEADS,
    }
    with pytest.raises(InputError, match=rf"(?s)\[E201\].*{message}"):
        inv_rope_fp8_quant(*{**arguments, **changes}.values())
