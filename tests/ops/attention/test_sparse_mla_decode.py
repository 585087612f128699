"""Sparse attention over paged caches, against float64 loops over single keys.

Tests of its options, `sparse_mla_decode_out` and `sparse_mla_decode_quant` are in test_sparse_mla_decode_fused.py.
"""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.ops.attention.sparse_mla_decode import sparse_mla_decode
from dsv4_compile.reference.attention import attend as reference
from dsv4_compile.testing import (
    RandomCache,
    assert_bitwise,
    assert_close,
    check_op,
    hostile_indices,
    padded,
    poison_,
    random_cache,
    strided,
)
from tests.ops.attention import sparse_mla_oracle as oracle

INF, NAN = math.inf, math.nan


def pick(cache: RandomCache, *shape: int) -> Tensor:
    """Return random live slots, int32."""
    return cache.slots[torch.randint(len(cache.slots), shape)].int()


def with_invalid(cache: RandomCache, indices: Tensor) -> Tensor:
    """Replace about a third of the columns by indices outside the cache."""
    capacity = cache.cache.shape[0] * cache.block_size
    hostile = hostile_indices(tuple(indices.shape), capacity, fraction=1.0)
    return torch.where(torch.rand(indices.shape) < 0.3, hostile, indices)


def sample(
    tokens: int = 3,
    heads: int = 2,
    window: int = 7,
    extra: int | None = 5,
    fmt: str = "plain",
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    sink: bool = True,
) -> tuple[Any, ...]:
    """Return arguments with invalid columns anywhere, lengths of every kind, and NaN in memory that is not selected."""
    first = random_cache(fmt, 3, 64, live=40, head_dim=dim, dtype=dtype)
    second = random_cache(fmt, 9, 2, live=9, head_dim=dim, dtype=dtype)

    def lens(width: int) -> Tensor:
        return torch.tensor([-5, 0, 1, width // 2, width, width + 1, 2**31 - 1], dtype=torch.int32)[
            torch.randint(7, (tokens,))
        ]

    parts: tuple[Any, ...] = (None, None, None, 0)
    if extra is not None:
        parts = (second.cache, with_invalid(second, pick(second, tokens, extra)), lens(extra), 2)
    return (
        torch.randn(tokens, heads, dim).to(dtype),
        first.cache,
        with_invalid(first, pick(first, tokens, window)),
        lens(window),
        64,
        fmt,
        dim**-0.5,
        torch.randn(heads) if sink else None,
        *parts,
        first.kv_scale,
    )


def exact(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    q, cache, indices, lens, block, fmt, scale, sink, extra, extra_indices, extra_lens, extra_block, kv_scale = args
    keys = []
    for t in range(q.shape[0]):
        factor = 1.0 if kv_scale is None else float(kv_scale)
        keys.append(oracle.selected(cache, fmt, block, indices[t], int(lens[t]), factor))
        if extra is not None:
            keys[t] += oracle.selected(extra, fmt, extra_block, extra_indices[t], int(extra_lens[t]), factor)
    out, _, lse = oracle.attend(q, keys, scale, sink)
    return out, lse


def assert_exact(args: tuple[Any, ...]) -> None:
    """Check that float32 results are as good as float32 sums, and bfloat16 ones the exact value rounded once."""
    out, lse = sparse_mla_decode(*args)
    want_out, want_lse = exact(args)
    assert lse.dtype is torch.float32
    assert_close(lse, want_lse, "attention_float32", label="lse")
    if out.dtype is torch.float32:
        assert_close(out, want_out, "attention_float32", label="out")
    else:
        ulp = torch.exp2(torch.floor(torch.log2(want_out.abs().clamp_min(1e-30))) - 7)
        assert ((out.double() - want_out).abs() <= 0.51 * ulp + 1e-6).all()


@pytest.mark.parametrize("fmt", ["plain", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (4, 8), (2, 64), (1, 128)])
def test_bfloat16_is_the_exact_value_rounded_once(fmt: str, tokens: int, heads: int) -> None:
    assert_exact(sample(tokens, heads, fmt=fmt, dim=512, dtype=torch.bfloat16))


@pytest.mark.parametrize("fmt", ["plain", "fp8"])
@pytest.mark.parametrize("extra", [None, 0, 5])
@pytest.mark.parametrize("sink", [False, True])
def test_float32_stays_float32(fmt: str, extra: int | None, sink: bool) -> None:
    assert_exact(sample(6, 3, extra=extra, fmt=fmt, sink=sink))


def test_large_scores_do_not_overflow() -> None:
    args = sample(4)
    assert_close(
        sparse_mla_decode(args[0] * 1000, *args[1:])[0], exact((args[0] * 1000, *args[1:]))[0], "attention_bfloat16"
    )


def one_key(sink: float | None, value: float = 2.0) -> tuple[Any, ...]:
    """Return arguments with one key with a score of 0, because q is zero."""
    cache = torch.full((1, 2, 4), value)
    ones = torch.ones(1, dtype=torch.int32)
    return (
        torch.zeros(1, 1, 4),
        cache,
        ones[None],
        ones,
        2,
        "plain",
        0.5,
        None if sink is None else torch.tensor([sink]),
    )


@pytest.mark.parametrize(("sink", "kept"), [(None, 1.0), (-INF, 1.0), (0.0, 0.5), (math.log(3), 0.25), (INF, 0.0)])
def test_the_sink_scales_the_output_and_leaves_lse_unchanged(sink: float | None, kept: float) -> None:
    out, lse = sparse_mla_decode(*one_key(sink))
    assert_close(out, torch.full((1, 1, 4), 2.0 * kept), "attention_float32")
    assert lse.item() == 0.0


def test_scale_applies_to_scores_and_not_to_the_sink() -> None:
    cache = torch.tensor([[[3.0, 1.0]]])
    indices, lens, sink = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), torch.tensor([0.7])
    out, lse = sparse_mla_decode(torch.tensor([[[2.0, 0.0]]]), cache, indices, lens, 1, "plain", 0.25, sink)
    assert lse.item() == 1.5
    weight = math.exp(1.5) / (math.exp(1.5) + math.exp(0.7))
    assert_close(out[0, 0], torch.tensor([3.0, 1.0]).double() * weight, "attention_float32")


@pytest.mark.parametrize("sink", [None, -INF, 0.0, INF])
@pytest.mark.parametrize("empty", ["index -1", "index past the cache", "length 0", "no columns", "no pages"])
def test_nothing_to_attend_gives_zero_and_infinite_lse(sink: float | None, empty: str) -> None:
    q, cache, indices, lens, *rest = one_key(sink, value=NAN)
    q = torch.full_like(q, NAN)
    if empty.startswith("index"):
        indices = torch.full_like(indices, -1 if empty == "index -1" else 2)
    elif empty == "length 0":
        lens = torch.zeros_like(lens)
    else:
        indices, cache = (indices[:, :0], cache) if empty == "no columns" else (indices, cache[:0])
    out, lse = sparse_mla_decode(q, cache, indices, lens, *rest)
    assert_bitwise(out, torch.zeros(1, 1, 4))
    assert_bitwise(lse, torch.full((1, 1), INF))


def test_scores_that_overflow_are_nothing_to_attend() -> None:
    q, cache, *rest = one_key(None, value=-1e30)
    out, lse = sparse_mla_decode(torch.full_like(q, 1e30), cache, *rest)
    assert_bitwise(out, torch.zeros(1, 1, 4))
    assert_bitwise(lse, torch.full((1, 1), INF))


def test_a_slot_listed_twice_counts_twice() -> None:
    cache = torch.eye(4)[None]
    indices = torch.tensor([[0, 0, 1]], dtype=torch.int32)
    out, lse = sparse_mla_decode(torch.zeros(1, 1, 4), cache, indices, torch.tensor([3]), 4, "plain", 1.0)
    assert_close(out[0, 0], torch.tensor([2 / 3, 1 / 3, 0, 0]), "attention_float32")
    assert_close(lse, torch.tensor([[math.log(3)]]), "attention_float32")


def test_both_caches_are_in_one_softmax() -> None:
    """Averaging two separate softmaxes would give each cache half of the weight."""
    cache, one = torch.eye(4)[None], torch.ones(1, dtype=torch.int32)
    indices = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    out, _ = sparse_mla_decode(
        torch.zeros(1, 1, 4), cache, indices, 3 * one, 4, "plain", 1.0, None, cache, indices[:, :1] + 3, one, 4
    )
    assert_close(out[0, 0], torch.full((4,), 0.25), "attention_float32")


@pytest.mark.parametrize("fmt", ["plain", "fp8", "fp8_ds_mla"])
def test_every_kind_of_invalid_index_is_the_same(fmt: str) -> None:
    dtype = torch.float32 if fmt == "plain" else torch.bfloat16
    args = list(sample(16, fmt=fmt, dim=512, dtype=dtype))
    for position, capacity in ((2, 3 * 64), (9, 9 * 2)):
        indices = args[position]
        args[position] = torch.where((indices < 0) | (indices >= capacity), -1, indices)
    want = sparse_mla_decode(*args)
    for position, capacity in ((2, 3 * 64), (9, 9 * 2)):
        hostile = hostile_indices(tuple(args[position].shape), capacity, fraction=1.0)
        args[position] = torch.where(args[position] < 0, hostile, args[position])
    for got, expected in zip(sparse_mla_decode(*args), want, strict=True):
        assert_bitwise(got, expected)
        assert not got.isnan().any()


def test_columns_past_the_length_are_not_read() -> None:
    args = list(sample(8))
    want = sparse_mla_decode(*args)
    for indices, lens in ((2, 3), (9, 10)):
        past = torch.arange(args[indices].shape[1]) >= args[lens][:, None]
        args[indices] = torch.where(past, hostile_indices(tuple(past.shape), 10), args[indices])
    for got, expected in zip(sparse_mla_decode(*args), want, strict=True):
        assert_bitwise(got, expected)


@given(st.integers(0, 2**32), st.data())
def test_moving_and_adding_padding_changes_nothing_but_rounding(seed: int, data: st.DataObject) -> None:
    torch.manual_seed(seed)
    q, cache, indices, _, *rest = sample(1, extra=None)
    live = indices[(indices >= 0) & (indices < 3 * 64)]
    slots = data.draw(st.permutations([*live.tolist(), *[-1] * data.draw(st.integers(0, 9))]))
    row = torch.tensor([slots], dtype=torch.int32)
    got = sparse_mla_decode(q, cache, row, torch.tensor([len(slots)]), *rest)
    want = sparse_mla_decode(q, cache, live[None], torch.tensor([len(live)]), *rest)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, "attention_float32")


@given(st.integers(0, 2**32), st.data())
def test_keys_may_live_in_either_cache(seed: int, data: st.DataObject) -> None:
    torch.manual_seed(seed)
    q, cache, indices, lens, *rest = sample(2, window=8, extra=None)
    want = sparse_mla_decode(q, cache, indices, lens, *rest)
    indices = torch.where(torch.arange(8) < lens[:, None], indices, -1)
    split = data.draw(st.integers(0, 8))
    full = torch.full((2,), 8, dtype=torch.int32)
    block, fmt, scale, sink = rest[:4]
    got = sparse_mla_decode(
        q, cache, indices[:, split:], full, block, fmt, scale, sink, cache, indices[:, :split], full, block
    )
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, "attention_float32")


@pytest.mark.parametrize("fmt", ["plain", "fp8_ds_mla"])
def test_tokens_do_not_influence_each_other(fmt: str, gemms_by_size: None) -> None:
    dim, dtype = (64, torch.float32) if fmt == "plain" else (512, torch.bfloat16)
    args = list(sample(9, fmt=fmt, dim=dim, dtype=dtype))
    for slots, lens in ((2, 3), (9, 10)):
        args[lens] = args[lens].clamp(max=args[slots].shape[1])
    out, lse = sparse_mla_decode(*args, batch_invariant=True)

    def rows(index: Any) -> tuple[Any, ...]:
        return tuple(x[index] if i in (0, 2, 3, 9, 10) else x for i, x in enumerate(args))

    for t in range(9):
        alone = sparse_mla_decode(*rows(slice(t, t + 1)), batch_invariant=True)
        assert_bitwise(alone[0][0], out[t])
        assert_bitwise(alone[1][0], lse[t])
    wider = [torch.nn.functional.pad(x, (0, 5), value=1) if i in (2, 9) else x for i, x in enumerate(args)]
    for got, want in zip(sparse_mla_decode(*wider, batch_invariant=True), (out, lse), strict=True):
        assert_bitwise(got, want)
    poisoned = list(args)
    poisoned[0] = args[0].clone()
    poison_(poisoned[0][4])
    keep = torch.arange(9) != 4
    assert_bitwise(sparse_mla_decode(*poisoned, batch_invariant=True)[0][keep], out[keep])


def test_the_chunk_size_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    args = sample(11)
    want = sparse_mla_decode(*args)
    for limit in (1, 3 * 4 * 12 * 64, 2**40):
        monkeypatch.setattr(reference, "GATHER_BYTES_CPU", limit)
        for got, expected in zip(sparse_mla_decode(*args), want, strict=True):
            assert_close(got, expected, "attention_float32")


def test_chunks_bound_the_gathered_keys() -> None:
    for device, limit in (("cpu", reference.GATHER_BYTES_CPU), ("cuda", reference.GATHER_BYTES)):
        chunks = list(reference.token_chunks(1000, 640, 512, torch.device(device)))
        assert [t for rows in chunks for t in range(1000)[rows]] == list(range(1000))
        assert max(rows.stop - rows.start for rows in chunks) * 640 * 512 * 4 <= limit
    assert len(list(reference.token_chunks(3, 2**20, 512, torch.device("cpu")))) == 3


def test_quantised_queries_give_bfloat16() -> None:
    args = sample(3, dtype=torch.bfloat16)
    quantised = args[0].to(torch.float8_e4m3fn)
    out, lse = sparse_mla_decode(quantised, *args[1:])
    want = sparse_mla_decode(quantised.float(), *args[1:])
    assert out.dtype is torch.bfloat16
    assert_bitwise(out, want[0].bfloat16())
    assert_bitwise(lse, want[1])


@pytest.mark.parametrize("spread", [padded, strided])
def test_strides_do_not_matter(spread: Any) -> None:
    args = list(sample(5))
    want = sparse_mla_decode(*args)
    for i in (0, 1, 2, 3, 7, 8, 9, 10):
        args[i] = spread(args[i])
    for got, expected in zip(sparse_mla_decode(*args), want, strict=True):
        assert_bitwise(got, expected, strides=True)


def test_longer_index_buffers_and_the_accounting_view_are_accepted() -> None:
    args = list(sample(4, fmt="fp8_ds_mla", dim=512, dtype=torch.bfloat16))
    want = sparse_mla_decode(*args)
    for i in (2, 3, 9, 10):
        args[i] = torch.cat((args[i], poison_(torch.empty_like(args[i]))))
    for i, block in ((1, 64), (8, 2)):
        args[i] = args[i].unflatten(1, (block, 584))
    for got, expected in zip(sparse_mla_decode(*args), want, strict=True):
        assert_bitwise(got, expected)


def test_op_contract() -> None:
    check_op(
        sparse_mla_decode,
        [
            sample(),
            sample(1),
            sample(0),
            sample(4, extra=None, sink=False),
            sample(2, window=0, extra=0),
            sample(3, fmt="fp8_ds_mla", dim=512, dtype=torch.bfloat16),
            sample(3, fmt="fp8", dtype=torch.bfloat16),
            (sample()[0].to(torch.float8_e4m3fn), *sample()[1:]),
            tuple(strided(x) if isinstance(x, Tensor) else x for x in sample()),
        ],
    )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_once_for_every_token_count(backend: str) -> None:
    def step(q: Tensor, indices: Tensor, lens: Tensor, *rest: Any) -> Tensor:
        out, lse = sparse_mla_decode(q * 2, rest[0], indices, lens, *rest[1:])
        return out.float() + lse[..., None].clamp(max=0)

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (4, 9, 33):
            q, cache, indices, lens, *rest = sample(tokens, extra=None)
            for x in (q, indices, lens):
                torch._dynamo.mark_dynamic(x, 0)
            assert_bitwise(compiled(q, indices, lens, cache, *rest), step(q, indices, lens, cache, *rest))


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(3, 64), r"q \[T, H, D\]"),
        (0, torch.zeros(3, 2, 64, dtype=torch.int32), r"q \[T, H, D\]"),
        (0, torch.zeros(3, 2, 32), r"\[P, 64, 32\]"),
        (1, torch.zeros(3, 32, 64), r"\[P, 64, 64\]"),
        (2, torch.zeros(3, 7), "indices"),
        (2, torch.zeros(2, 7, dtype=torch.int32), "2 rows for 3 tokens"),
        (3, torch.zeros(3, 1, dtype=torch.int32), "lens"),
        (5, "fp8_ds_mla", "hold vectors of 512"),
        (5, "bf16", "E202"),
        (7, torch.zeros(3), "one logit for every head"),
        (7, torch.zeros(2, dtype=torch.bfloat16), "attn_sink"),
        (8, None, "without extra_k_cache"),
        (10, None, "without extra_lens"),
        (11, 64, "E203"),
        (12, torch.ones(1), "kv_scale"),
    ],
)
def test_wrong_arguments_raise(position: int, value: Any, message: str) -> None:
    args = list(sample())
    args[position] = value
    with pytest.raises(InputError, match=message):
        sparse_mla_decode(*args)
