"""Query norm and rotation, and the rotated insert into the cache: values of the one, bytes of the other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.errors import InputError
from dsv4_compile.ops.preprocess.kv_rope_insert import kv_rope_insert
from dsv4_compile.ops.preprocess.q_norm_rope import q_norm_rope, q_norm_rope_kv_insert
from dsv4_compile.testing import assert_bitwise, check_op, padded, poison_, strided
from tests.support import scalar

EPS = 1e-6
EDGES = torch.tensor([0, 2, 3, 4, 126, 127, 128, 255, 256])


def rope_table(rope_dim: int = 64, max_pos: int = 260) -> Tensor:
    angle = torch.arange(max_pos)[:, None] * 10000.0 ** (-torch.arange(rope_dim // 2) / (rope_dim // 2))
    return torch.cat((angle.cos(), angle.sin()), dim=1)


def exact_q(q: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """float64, one head at a time."""
    out = torch.empty(q.shape, dtype=torch.float64)
    rope, half = table.shape[1], table.shape[1] // 2
    for t, position in enumerate(positions.tolist()):
        cos, sin = table[position, :half].double(), table[position, half:].double()
        for h in range(q.shape[1]):
            x = q[t, h].double()
            x = x / math.sqrt(x.square().mean().item() + EPS)
            pair = torch.view_as_complex(x[-rope:].view(half, 2).contiguous()) * torch.complex(cos, sin)
            out[t, h] = torch.cat((x[:-rope], torch.view_as_real(pair).flatten()))
    return out


def ulp(x: Tensor, mantissa_bits: int) -> Tensor:
    return torch.exp2(x.abs().clamp_min(1e-30).log2().floor() - mantissa_bits)


@pytest.mark.parametrize(("heads", "dim", "rope"), [(5, 64, 16), (2, 512, 64), (3, 16, 16)])
def test_queries_are_the_exact_value_rounded_once(heads: int, dim: int, rope: int) -> None:
    q, table = torch.randn(9, heads, dim).bfloat16() * 3, rope_table(rope)
    want = exact_q(q, EDGES, table)
    got = q_norm_rope(q, EDGES, table, EPS)
    # A rounding between norm and rotation, or before either, would miss by up to one more half ulp.
    assert ((got.double() - want).abs() <= 0.5 * ulp(want, 7) + 1e-6).all()


def test_float32_queries_stay_float32() -> None:
    q, table = torch.randn(9, 2, 64), rope_table(16)
    got = q_norm_rope(q, EDGES, table, EPS)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got.double(), exact_q(q, EDGES, table), rtol=0, atol=2e-6)


def test_a_pair_is_two_neighbours_of_the_last_dims() -> None:
    table = rope_table(4)
    q = torch.zeros(1, 1, 8)
    q[0, 0, 6] = 1.0
    cos, sin = table[3, 1].item(), table[3, 3].item()
    want = [0.0] * 6 + [math.sqrt(8) * cos, math.sqrt(8) * sin]
    torch.testing.assert_close(q_norm_rope(q, torch.tensor([3]), table, 0.0)[0, 0], torch.tensor(want))


@pytest.mark.parametrize(("padded_heads", "heads"), [(0, 3), (2, 3), (3, 3), (8, 8)])
def test_missing_heads_are_zeros(padded_heads: int, heads: int) -> None:
    q, table = torch.randn(4, 3, 64).bfloat16(), rope_table(16)
    got = q_norm_rope(q, EDGES[:4], table, EPS, padded_heads)
    assert got.shape == (4, heads, 64)
    assert got.is_contiguous()
    assert_bitwise(got[:, :3], q_norm_rope(q, EDGES[:4], table, EPS))
    assert not got[:, 3:].any()


def test_zero_heads_give_zeros() -> None:
    assert not q_norm_rope(torch.zeros(2, 3, 64), EDGES[:2], rope_table(16), EPS).any()


def test_positions_may_be_longer_than_the_batch_of_either_width_and_anything_in_padding_rows() -> None:
    q, table = torch.randn(3, 2, 64).bfloat16(), rope_table(16)
    want = q_norm_rope(q, EDGES[:3], table, EPS)
    assert_bitwise(q_norm_rope(q, EDGES.int(), table, EPS), want)
    hostile = torch.tensor([0, 2, -(2**31)]), torch.tensor([0, 2, 2**31 - 1])
    for positions in hostile:
        got = q_norm_rope(q, positions, table, EPS)
        assert_bitwise(got[:2], want[:2])
        assert got.isfinite().all()


def test_fp8_queries_are_quantised_from_the_unrounded_value() -> None:
    q, table, scale = torch.randn(4, 3, 64).bfloat16(), rope_table(16), torch.tensor([0.0123])
    exact = q_norm_rope(q.float(), EDGES[:4], table, EPS)
    got = q_norm_rope(q, EDGES[:4], table, EPS, 4, scale)
    inverse = scalar.f32(1 / scale.item())
    want = [scalar.e4m3_code(scalar.f32(x * inverse)) for x in exact.flatten().tolist()]
    assert got.dtype is torch.float8_e4m3fn
    assert got[:, :3].flatten().view(torch.uint8).tolist() == want
    assert not got[:, 3].view(torch.uint8).any()


def poisoned_cache(fmt: str, blocks: int, block_size: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return storage full of NaN, and a cache in it with a page stride above the page size."""
    shape = layout.cache_shape(fmt, blocks, block_size, dim)
    used = math.prod(shape[1:])
    stride = layout.PAGE_LAYOUTS[fmt].page_stride(block_size) if fmt in layout.PAGE_LAYOUTS else used + 32
    storage = poison_(torch.empty(blocks * stride, dtype=dtype if fmt == "plain" else torch.uint8))
    inner = (1,) if len(shape) == 2 else (shape[2], 1)
    return storage, storage.as_strided(shape, (stride, *inner))


SLOTS = torch.tensor([-1, 7, 0, 3, -5, 8, 2**40, 5])
"""Of a cache with 4 pages of 2 tokens: valid are 7 (the last), 0, 3 and 5."""


def expected_storage(
    storage: Tensor, fmt: str, stride: int, kv: Tensor, positions: Tensor, table: Tensor, scale: float
) -> Tensor:
    """The storage after the insert of `SLOTS`, element by element."""
    memory = bytearray(storage.view(torch.uint8).numpy().tobytes())
    dim, width = kv.shape[1], storage.element_size()
    for token, slot in enumerate(SLOTS.tolist()):
        if not 0 <= slot < 8:
            continue
        row = scalar.rotate(kv[token].tolist(), table[positions[token]].tolist())
        if fmt == "fp8_ds_mla":
            scalar.store(memory, fmt, stride, 2, slot, *scalar.mla_row(row))
            continue
        if fmt == "fp8":
            data = bytes(scalar.e4m3_code(scalar.f32(x * scalar.f32(1 / scale))) for x in row)
        else:
            data = torch.tensor(row).to(storage.dtype).view(torch.uint8).numpy().tobytes()
        first = slot // 2 * stride * width + slot % 2 * dim * width
        memory[first : first + len(data)] = data
    return torch.frombuffer(memory, dtype=torch.uint8).view(storage.dtype)


def test_both_halves_in_one_op_are_the_two_ops() -> None:
    (one, cache), (two, other) = (poisoned_cache("fp8_ds_mla", 4, 2, 512, torch.uint8) for _ in range(2))
    q, kv, table = torch.randn(9, 3, 512).bfloat16(), torch.randn(8, 512).bfloat16(), rope_table()
    got = q_norm_rope_kv_insert(q, kv, cache, SLOTS, EDGES, table, EPS, 2, "fp8_ds_mla", 8)
    kv_rope_insert(kv, other, SLOTS, EDGES, table, 2, "fp8_ds_mla")
    assert_bitwise(got, q_norm_rope(q, EDGES, table, EPS, 8), strides=True)
    assert_bitwise(one, two)


def test_query_op_keeps_its_promises() -> None:
    table, one = rope_table(16), torch.tensor(0.5)
    q = torch.randn(5, 3, 64).bfloat16()
    check_op(
        q_norm_rope,
        [
            (q, EDGES[:5], table, EPS),
            (padded(q), strided(EDGES[:5]), padded(table), EPS, 8),
            (strided(q.float()), EDGES, table, EPS, 2),
            (q, EDGES[:5].int(), table, EPS, 4, one),
            (q[:1], EDGES[:1], table, EPS, 8),
            (q[:0], EDGES[:0], table, EPS, 8, one),
        ],
    )


def test_combined_op_keeps_its_promises() -> None:
    _, cache = poisoned_cache("fp8_ds_mla", 4, 2, 512, torch.bfloat16)
    q, kv, table = torch.randn(8, 2, 512).bfloat16(), torch.randn(8, 512).bfloat16(), rope_table()
    check_op(
        q_norm_rope_kv_insert,
        [
            (q, kv, cache, SLOTS, EDGES, table, EPS, 2, "fp8_ds_mla"),
            (padded(q), strided(kv), cache, SLOTS[:4], EDGES, table, EPS, 2, "fp8_ds_mla", 8, torch.ones(1)),
            (q[:0], kv[:0], cache, SLOTS[:0], EDGES[:0], table, EPS, 2, "fp8_ds_mla", 4),
        ],
    )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_serves_every_token_count(backend: str) -> None:
    table = rope_table()

    def step(q: Tensor, kv: Tensor, cache: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        q = q_norm_rope_kv_insert(q * 2, kv + 1, cache, slots, positions, table, EPS, 2, "fp8_ds_mla", 4)
        return q * 0.5

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    (one, cache), (two, other) = (poisoned_cache("fp8_ds_mla", 4, 2, 512, torch.uint8) for _ in range(2))
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (3, 8, 5):
            dynamic = (torch.randn(tokens, 3, 512).bfloat16(), torch.randn(tokens, 512).bfloat16())
            slots, positions = torch.randperm(12)[:tokens] - 3, torch.randint(0, 256, (tokens,))
            for tensor in (*dynamic, slots, positions):
                torch._dynamo.mark_dynamic(tensor, 0)
            got = compiled(*dynamic, cache, slots, positions)
            assert_bitwise(got, step(*dynamic, other, slots, positions), strides=True)
            assert_bitwise(one, two)


def _arguments(**changes: object) -> tuple[object, ...]:
    _, cache = poisoned_cache("fp8_ds_mla", 4, 2, 512, torch.uint8)
    arguments = {
        "q": torch.randn(2, 3, 512),
        "kv": torch.randn(2, 512),
        "k_cache": cache,
        "slot_mapping": torch.tensor([0, 1]),
        "positions": torch.tensor([0, 1]),
        "cos_sin_cache": rope_table(),
        "eps": EPS,
        "block_size": 2,
        "cache_format": "fp8_ds_mla",
        "padded_heads": 0,
        "q_scale": None,
        "kv_scale": None,
    }
    return tuple({**arguments, **changes}.values())


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"q": torch.randn(2, 512)}, "E201", r"q \[T, H, D\]"),
        ({"kv": torch.randn(2, 512).double()}, "E201", r"kv \[T, D\]"),
        ({"slot_mapping": torch.tensor([0, 1, 2])}, "E201", "3 tokens"),
        ({"positions": torch.tensor([0])}, "E201", "positions has a row for every token"),
        ({"positions": torch.tensor([0.0, 1.0])}, "E201", "int32 or int64"),
        ({"cos_sin_cache": rope_table().bfloat16()}, "E201", "float32"),
        ({"cos_sin_cache": rope_table(1024)}, "E201", "at most 512"),
        ({"cos_sin_cache": rope_table()[:0]}, "E201", "has rows"),
        ({"cache_format": "int8"}, "E202", "int8"),
        ({"block_size": 4}, "E203", "block_size 4"),
        ({"kv": torch.randn(2, 64), "cos_sin_cache": rope_table(16)}, "E201", "512 dims"),
        ({"q_scale": torch.ones(2)}, "E201", "one float32 element"),
        ({"kv_scale": torch.ones(1)}, "E201", "kv_scale with fp8_ds_mla"),
        ({"cache_format": "plain", "k_cache": torch.zeros(4, 2, 64)}, "E203", r"\[P, 2, 512\]"),
        ({"cache_format": "fp8", "k_cache": torch.zeros(4, 2, 512)}, "E201", "uint8"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    changes: dict[str, object], code: str, message: str
) -> None:
    arguments = _arguments(**changes)
    before = arguments[2].clone()
    with pytest.raises(InputError, match=rf"(?s)\[{code}\].*{message}"):
        q_norm_rope_kv_insert(*arguments)
    assert_bitwise(arguments[2], before)
