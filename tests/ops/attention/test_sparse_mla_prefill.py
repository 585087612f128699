"""Sparse attention over a flat workspace, against float64 loops over single keys."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4_compile.errors import InputError
from dsv4_compile.ops.attention.sparse_mla_decode import sparse_mla_decode
from dsv4_compile.ops.attention.sparse_mla_prefill import sparse_mla_prefill, sparse_mla_prefill_ragged
from dsv4_compile.ops.metadata.ragged_from_dense import ragged_from_dense
from dsv4_compile.reference.attention import attend as reference
from dsv4_compile.testing import assert_bitwise, assert_close, check_op, hostile_indices, padded, poison_, strided
from tests.ops.attention import sparse_mla_oracle as oracle

INF, NAN = math.inf, math.nan
ROWS, LIVE = 50, 30


def sample(
    tokens: int = 3,
    heads: int = 2,
    width: int = 8,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    sink: bool = True,
    lens: bool = True,
) -> tuple[Any, ...]:
    """Return arguments with hostile indices anywhere, lengths of every kind, and NaN in rows that are not selected."""
    kv = poison_(torch.empty(ROWS, dim, dtype=dtype))
    kv[:LIVE] = torch.randn(LIVE, dim)
    hostile = hostile_indices((tokens, width), ROWS, fraction=1.0)
    indices = torch.where(torch.rand(tokens, width) < 0.3, hostile, torch.randint(LIVE, (tokens, width))).int()
    choices = torch.tensor([-(2**31), 0, 1, width // 2, width, width + 1], dtype=torch.int32)
    return (
        torch.randn(tokens, heads, dim).to(dtype),
        kv,
        indices,
        choices[torch.randint(len(choices), (tokens,))] if lens else None,
        dim**-0.5,
        torch.randn(heads) if sink else None,
    )


def as_list(args: tuple[Any, ...], max_row: int = 0) -> tuple[Any, ...]:
    """Return the same call with its index rows in one list, invalid entries dropped."""
    q, kv, indices, lens, scale, sink = args
    full = torch.full(q.shape[:1], indices.shape[1], dtype=torch.int32)
    flat, indptr = ragged_from_dense(indices, full if lens is None else lens)
    return q, kv, flat, indptr, scale, sink, max_row


def exact(args: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
    q, kv, indices, lens, scale, sink = args
    width = indices.shape[1]
    keys = [
        oracle.selected(kv[:, None], "plain", 1, indices[t], width if lens is None else int(lens[t]), 1.0)
        for t in range(q.shape[0])
    ]
    return oracle.attend(q, keys, scale, sink)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lens", [False, True])
@pytest.mark.parametrize("sink", [False, True])
def test_agrees_with_loops_over_keys(dtype: torch.dtype, lens: bool, sink: bool) -> None:
    args = sample(7, 3, dtype=dtype, sink=sink, lens=lens)
    got, want = sparse_mla_prefill(*args), exact(args)
    assert [x.dtype for x in got] == [dtype, torch.float32, torch.float32]
    names = (
        "attention_float32" if dtype is torch.float32 else "attention_prefill_bfloat16",
        *["attention_float32"] * 2,
    )
    for a, b, name in zip(got, want, names, strict=True):
        assert_close(a, b, name)


@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (2, 64), (1, 128)])
def test_model_dimensions(tokens: int, heads: int) -> None:
    args = sample(tokens, heads, width=20, dim=512, dtype=torch.bfloat16)
    assert_close(sparse_mla_prefill(*args)[0], exact(args)[0], "attention_prefill_bfloat16")


@pytest.mark.parametrize("sink", [None, -INF, 0.0, INF])
@pytest.mark.parametrize("empty", ["indices", "length", "columns", "workspace"])
def test_nothing_to_attend_gives_zero_and_infinities(sink: float | None, empty: str) -> None:
    indices = torch.tensor([[-1, 4]] if empty == "indices" else [[0, 1]], dtype=torch.int32)
    lens = torch.tensor([0 if empty == "length" else 2], dtype=torch.int32)
    kv = torch.full((0 if empty == "workspace" else 4, 8), NAN)
    out, top, lse = sparse_mla_prefill(
        torch.full((1, 1, 8), NAN),
        kv,
        indices[:, :0] if empty == "columns" else indices,
        lens,
        1.0,
        None if sink is None else torch.tensor([sink]),
    )
    assert_bitwise(out, torch.zeros(1, 1, 8))
    assert_bitwise(top, torch.full((1, 1), -INF))
    assert_bitwise(lse, torch.full((1, 1), INF))


@pytest.mark.parametrize(("sink", "kept"), [(-INF, 1.0), (0.0, 0.5), (INF, 0.0)])
def test_the_sink_is_in_neither_the_maximum_nor_lse(sink: float, kept: float) -> None:
    indices = torch.zeros(1, 1, dtype=torch.int32)
    out, top, lse = sparse_mla_prefill(torch.zeros(1, 1, 4), torch.ones(1, 4), indices, None, 1.0, torch.tensor([sink]))
    assert_close(out, torch.full((1, 1, 4), kept), "attention_float32")
    assert (top.item(), lse.item()) == (0.0, 0.0)


def test_equals_paged_attention_over_the_same_keys() -> None:
    q, kv, indices, lens, scale, sink = sample(6, dtype=torch.bfloat16)
    out, _, lse = sparse_mla_prefill(q, kv, indices, lens, scale, sink)
    paged_out, paged_lse = sparse_mla_decode(q, kv.view(5, 10, 64), indices, lens, 10, "plain", scale, sink)
    assert_bitwise(out, paged_out)
    assert_bitwise(lse, paged_lse)


@pytest.mark.parametrize("lens", [False, True])
@pytest.mark.parametrize("max_row", [0, 8, 100])
def test_rows_of_a_list_equal_rows_of_a_matrix(lens: bool, max_row: int) -> None:
    args = sample(9, lens=lens)
    for got, want in zip(sparse_mla_prefill_ragged(*as_list(args, max_row)), sparse_mla_prefill(*args), strict=True):
        assert_close(got, want, "attention_float32")


def test_a_row_of_a_list_is_clipped_to_the_list_and_to_max_row() -> None:
    q, kv, indices, _, *rest = sample(6)
    flat = indices.flatten()[:20]
    indptr = torch.tensor([-5, 3, 9, 9, 7, 18, 2**31 - 1], dtype=torch.int32)
    rows = [flat[max(a, 0) : max(b, 0)] for a, b in itertools.pairwise(indptr.tolist())]
    starts = indptr[:-1].tolist()
    for max_row in (0, 2):
        clipped = [row[: max(max_row + min(a, 0), 0)] if max_row else row for row, a in zip(rows, starts, strict=True)]
        dense = torch.stack([torch.nn.functional.pad(row, (0, 20 - len(row)), value=-1) for row in clipped])
        got = sparse_mla_prefill_ragged(q, kv, flat, indptr, *rest, max_row)
        for a, b in zip(got, sparse_mla_prefill(q, kv, dense, None, *rest), strict=True):
            assert_close(a, b, "attention_float32")


def test_an_empty_list_attends_nothing() -> None:
    q, kv, *_ = sample(2)
    out, top, lse = sparse_mla_prefill_ragged(q, kv, torch.empty(0).int(), torch.tensor([0, 0, 3]), 1.0)
    assert not out.any()
    assert (top == -INF).all() and (lse == INF).all()


def test_the_chunk_size_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    args = sample(11)
    want = sparse_mla_prefill(*args)
    monkeypatch.setattr(reference, "GATHER_BYTES_CPU", 3 * 4 * 8 * 64)
    for got, expected in zip(sparse_mla_prefill(*args), want, strict=True):
        assert_close(got, expected, "attention_float32")


@pytest.mark.parametrize("spread", [padded, strided])
def test_strides_and_longer_index_buffers_do_not_matter(spread: Any) -> None:
    args = list(sample(5))
    want = sparse_mla_prefill(*args)
    for i in (2, 3):
        args[i] = torch.cat((args[i], poison_(torch.empty_like(args[i]))))
    args = [spread(x) if isinstance(x, Tensor) else x for x in args]
    for got, expected in zip(sparse_mla_prefill(*args), want, strict=True):
        assert_bitwise(got, expected, strides=True)
    listed = as_list(sample(5))
    want = sparse_mla_prefill_ragged(*listed)
    for got, expected in zip(
        sparse_mla_prefill_ragged(*(spread(x) if isinstance(x, Tensor) else x for x in listed)), want, strict=True
    ):
        assert_bitwise(got, expected, strides=True)


def test_op_contract() -> None:
    check_op(
        sparse_mla_prefill,
        [
            sample(),
            sample(1),
            sample(0),
            sample(3, width=0),
            sample(3, dtype=torch.bfloat16, sink=False, lens=False),
            tuple(strided(x) if isinstance(x, Tensor) else x for x in sample()),
        ],
    )


def test_op_contract_of_the_list_form() -> None:
    spread = tuple(strided(x) if isinstance(x, Tensor) else x for x in as_list(sample()))
    check_op(
        sparse_mla_prefill_ragged,
        [as_list(sample()), as_list(sample(1), 4), as_list(sample(0)), as_list(sample(width=0)), spread],
    )


def test_compiles_once_for_every_token_count() -> None:
    def step(q: Tensor, indices: Tensor, lens: Tensor, *rest: Any) -> Tensor:
        out, top, lse = sparse_mla_prefill(q * 2, rest[0], indices, lens, *rest[1:])
        return out + (lse.clamp(max=0) + top.clamp(min=0))[..., None]

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (4, 9, 33):
            q, kv, indices, lens, *rest = sample(tokens)
            for x in (q, indices, lens):
                torch._dynamo.mark_dynamic(x, 0)
            assert_bitwise(compiled(q, indices, lens, kv, *rest), step(q, indices, lens, kv, *rest))


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(3, 64), r"q \[T, H, D\]"),
        (0, torch.zeros(3, 2, 64).to(torch.float8_e4m3fn), r"q \[T, H, D\]"),
        (1, torch.zeros(5, 32), "head dim of q"),
        (1, torch.zeros(5, 1, 64), r"kv \[S, D\]"),
        (2, torch.zeros(3, 8), "indices"),
        (2, torch.zeros(2, 8, dtype=torch.int32), "2 rows for 3 tokens"),
        (3, torch.zeros(1, dtype=torch.int32), "topk_length"),
        (5, torch.zeros(3), "one logit for every head"),
    ],
)
def test_wrong_arguments_raise(position: int, value: Any, message: str) -> None:
    args = list(sample())
    args[position] = value
    with pytest.raises(InputError, match=message):
        sparse_mla_prefill(*args)


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (1, torch.zeros(5, 32), "head dim of q"),
        (2, torch.zeros(3, 8, dtype=torch.int32), r"indices \[N\]"),
        (3, torch.zeros(3, dtype=torch.int32), "2 rows for 3 tokens"),
        (6, -1, "max_row -1"),
    ],
)
def test_wrong_lists_raise(position: int, value: Any, message: str) -> None:
    args = list(as_list(sample()))
    args[position] = value
    with pytest.raises(InputError, match=message):
        sparse_mla_prefill_ragged(*args)


def test_the_fake_has_the_strides_of_the_result() -> None:
    q, *rest = sample()
    q = q.transpose(0, 1).contiguous().transpose(0, 1)
    real = sparse_mla_prefill(q, *rest)
    with FakeTensorMode() as mode:
        fake = sparse_mla_prefill(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in (q, *rest)))
    assert [x.stride() for x in fake] == [x.stride() for x in real] != [q.stride(), *(x.stride() for x in real[1:])]
