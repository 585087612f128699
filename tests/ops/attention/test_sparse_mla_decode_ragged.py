"""Sparse attention over lists of slots: against loops over single keys, and bit for bit against padded rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.ops.attention.sparse_mla_decode import sparse_mla_decode, sparse_mla_decode_ragged
from dsv4_compile.testing import assert_bitwise, assert_close, check_op, padded, poison_, random_cache
from tests.ops.attention import sparse_mla_oracle as oracle

FORMATS = ["plain", "fp8", "fp8_ds_mla"]


def lists(rows: list[list[int]], spare: int = 4) -> tuple[Tensor, Tensor]:
    """Return rows one after the other, int32, with a poisoned tail, and their offsets."""
    ends = [sum(len(row) for row in rows[:t]) for t in range(len(rows) + 1)]
    flat = [slot for row in rows for slot in row]
    return torch.cat((torch.tensor(flat, dtype=torch.int32), poison_(torch.empty(spare, dtype=torch.int32)))), (
        torch.tensor(ends, dtype=torch.int32)
    )


def random_rows(live: Tensor, tokens: int, width: int) -> list[list[int]]:
    """Return up to `width` live slots per token; the first row is empty, the second full, some slots are invalid."""
    rows = [live[torch.randint(len(live), (int(n),))].tolist() for n in torch.randint(width + 1, (tokens,))]
    rows[:2] = [[], live[torch.randint(len(live), (width,))].tolist()][: len(rows[:2])]
    return [[-1 if torch.rand(()) < 0.2 else slot for slot in row] for row in rows]


def padded_rows(rows: list[list[int]], width: int) -> tuple[Tensor, Tensor]:
    dense = torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows], dtype=torch.int32)
    return dense.view(len(rows), width), torch.tensor([len(row) for row in rows], dtype=torch.int32)


def case(fmt: str, tokens: int = 5, heads: int = 3, extra: bool = True, bounds: bool = True) -> tuple[Any, Any]:
    """Return arguments of the ragged and of the dense op for the same entries, with NaN in memory not selected."""
    dim, dtype = (512, torch.bfloat16) if fmt == "fp8_ds_mla" else (64, torch.float32)
    first = random_cache(fmt, 3, 64, live=40, head_dim=dim, dtype=dtype)
    second = random_cache(fmt, 9, 2, live=9, head_dim=dim, dtype=dtype)
    rows, more = random_rows(first.slots, tokens, 7), random_rows(second.slots, tokens, 4)
    q, sink = torch.randn(tokens, heads, dim).to(dtype), torch.randn(heads)
    attend = (64, fmt, dim**-0.5, sink)
    flat, indptr = lists(rows)
    ragged = [q, first.cache, flat, indptr, *attend, None, None, None, 0, first.kv_scale]
    dense = [q, first.cache, *padded_rows(rows, 7), *attend, None, None, None, 0, first.kv_scale]
    if extra:
        ragged[8:12] = [second.cache, *lists(more), 2]
        dense[8:12] = [second.cache, *padded_rows(more, 4), 2]
    return [*ragged, *((7, 4) if bounds else (0, 0))], dense


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("extra", [False, True])
def test_lists_give_the_bits_of_padded_rows(fmt: str, extra: bool) -> None:
    ragged, dense = case(fmt, extra=extra)
    for actual, expected in zip(sparse_mla_decode_ragged(*ragged), sparse_mla_decode(*dense), strict=True):
        assert_bitwise(actual, expected, strides=True)


def test_result_is_the_exact_value_without_a_bound_on_the_rows() -> None:
    ragged, dense = case("plain", bounds=False)
    q, cache, rows, lens, block, fmt, scale, sink, extra, more, more_lens, extra_block, _ = dense
    keys = [
        oracle.selected(cache, fmt, block, rows[t], int(lens[t]), 1.0)
        + oracle.selected(extra, fmt, extra_block, more[t], int(more_lens[t]), 1.0)
        for t in range(q.shape[0])
    ]
    out, _, lse = oracle.attend(q, keys, scale, sink)
    actual = sparse_mla_decode_ragged(*ragged)
    assert_close(actual[0], out, "attention_float32")
    assert_close(actual[1], lse, "attention_float32")


def test_entries_past_the_bound_are_ignored() -> None:
    (q, cache, flat, indptr, *rest), _ = case("plain", extra=False)
    ends = indptr[:-1] + (indptr[1:] - indptr[:-1]).clamp(max=3)
    shorter = torch.cat([flat[int(a) : int(b)] for a, b in zip(indptr[:-1], ends, strict=True)])
    lens = torch.cat((torch.zeros(1), (ends - indptr[:-1]).cumsum(0))).int()
    rest[-2] = 3
    for a, b in zip(
        sparse_mla_decode_ragged(q, cache, flat, indptr, *rest),
        sparse_mla_decode_ragged(q, cache, shorter, lens, *rest),
        strict=True,
    ):
        assert_bitwise(a, b)


@pytest.mark.parametrize("ends", [[3, 1, 1], [-5, -2, -2], [10**6, 2 * 10**6, 2**31 - 1], [-(2**31), 2**31 - 1, 0]])
def test_hostile_ends_read_nothing_outside_the_list(ends: list[int]) -> None:
    (q, cache, flat, _, *rest), _ = case("plain", tokens=2, extra=False)
    live = flat[:1].clamp_min(0).expand(4).contiguous()
    cache = torch.nan_to_num(cache)
    out, lse = sparse_mla_decode_ragged(q, cache, live, torch.tensor(ends, dtype=torch.int32), *rest)
    assert not out.isnan().any()
    assert not lse.isnan().any()


def test_a_row_without_entries_gives_zero_and_infinity() -> None:
    ragged, _ = case("plain", extra=False)
    out, lse = sparse_mla_decode_ragged(*ragged)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert (lse[0] == math.inf).all()


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("bounds", [False, True])
def test_no_token_and_one_token(tokens: int, bounds: bool) -> None:
    ragged, _ = case("plain", tokens=tokens, bounds=bounds)
    out, lse = sparse_mla_decode_ragged(*ragged)
    assert (out.shape, lse.shape) == ((tokens, 3, 64), (tokens, 3))


def test_an_empty_list_is_nothing_to_attend() -> None:
    (q, cache, _, indptr, *rest), _ = case("plain", extra=False)
    out, _ = sparse_mla_decode_ragged(q, cache, torch.empty(0, dtype=torch.int32), indptr, *rest)
    assert torch.equal(out, torch.zeros_like(out))


def test_a_workspace_is_a_plain_cache_of_pages_of_one_token() -> None:
    kv, q = torch.randn(20, 64), torch.randn(2, 3, 64)
    flat, indptr = lists([[3, 19, 4], [0]])
    out, _ = sparse_mla_decode_ragged(q, kv[:, None], flat, indptr, 1, "plain", 0.125)
    keys = [[kv[i].double() for i in row] for row in ([3, 19, 4], [0])]
    assert_close(out, oracle.attend(q, keys, 0.125, None)[0], "attention_float32")


def test_op_contract() -> None:
    ragged, _ = case("plain")
    spread = [padded(x) if isinstance(x, Tensor) and i in (0, 2, 3, 9, 10) else x for i, x in enumerate(ragged)]
    empty, _ = case("fp8", tokens=0)
    check_op(sparse_mla_decode_ragged, [tuple(ragged), tuple(spread), tuple(empty)])


def test_compiled_gives_the_same_bits_for_any_number_of_tokens() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(*args: Any) -> tuple[Tensor, Tensor]:
        return sparse_mla_decode_ragged(*args)

    for tokens in (4, 6, 9):
        ragged, _ = case("plain", tokens=tokens)
        for index in (0, 2, 3, 9, 10):
            torch._dynamo.mark_dynamic(ragged[index], 0)
        for a, b in zip(compiled(*ragged), sparse_mla_decode_ragged(*ragged), strict=True):
            assert_bitwise(a, b, strides=True)


@pytest.mark.parametrize(
    ("position", "value"),
    [(2, torch.zeros(3, 1, dtype=torch.int32)), (3, torch.zeros(3, dtype=torch.int32)), (9, None), (13, -1)],
    ids=["rows", "too few ends", "half a second cache", "negative bound"],
)
def test_wrong_arguments_raise(position: int, value: Any) -> None:
    ragged, _ = case("plain")
    ragged[position] = value
    with pytest.raises(InputError, match="E201"):
        sparse_mla_decode_ragged(*ragged)
