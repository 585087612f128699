"""The Triton prefill kernel in the bounds-checking interpreter, against the reference."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.attention import sparse_mla_prefill as kernel
from dsv4_compile.kernels.attention.common import operand_dtype
from dsv4_compile.kernels.attention.sparse_mla_prefill import IndexRows, PrefillCall, Tiles
from dsv4_compile.kernels.host.gpu import gpu_of
from dsv4_compile.ops.attention.sparse_mla_prefill import sparse_mla_prefill, sparse_mla_prefill_ragged
from dsv4_compile.ops.common.kernels import launcher, refusal
from dsv4_compile.testing import Tolerance, assert_bitwise, assert_close, padded, poisoned_empty, strided
from tests.ops.attention.test_sparse_mla_prefill import as_list, sample
from tests.support.bounds import checked

interpreted = pytest.mark.interpreted
INF, NAN = math.inf, math.nan
OUTPUTS = ("p_out", "p_max", "p_lse")
# Weights are rounded to the dtype of the keys, by 2^-9 at most, and keys are below 5; few keys do not average it out.
FEW_KEYS = Tolerance(abs=5 * 2.0**-9, rel=2.01 / 128, cosine=1e-5)

Result = tuple[Tensor, Tensor, Tensor]


def launch(args: tuple[Any, ...], tiles: Tiles | None = None) -> Result:
    """Run the kernel on the arguments of either op, every access checked, over poisoned memory."""
    q, kv, indices, bounds, scale, sink, *bound = args
    if indices.dim() == 1:
        rows = IndexRows(indices, bounds, min(bound[0] or indices.shape[0], indices.shape[0]), ragged=True)
    else:
        rows = IndexRows(indices, bounds, indices.shape[1])
    with checked(OUTPUTS) as launched, poisoned_empty():
        result = kernel.launch(PrefillCall(q, kv, rows, scale, sink), gpu_of(q.device), tiles)
    assert launched == ["sparse_mla_prefill_kernel"]
    return result


def assert_same(args: tuple[Any, ...], tiles: Tiles | None = None) -> None:
    """Check that the kernel agrees with the reference as well as its operands' dtype allows."""
    got = launch(args, tiles)
    want = (sparse_mla_prefill_ragged if args[2].dim() == 1 else sparse_mla_prefill)(*args)
    exact = operand_dtype(*args[:2], "plain") is torch.float32
    out = "attention_float32" if exact and args[0].dtype is torch.float32 else FEW_KEYS
    for a, b, name, tolerance in zip(got, want, OUTPUTS, (out, "lse", "lse"), strict=True):
        assert a.dtype is b.dtype and a.is_contiguous()
        assert_close(a, b, tolerance, label=name)


@interpreted
@pytest.mark.parametrize("tiles", [Tiles(16, 16, 4, 1), Tiles(32, 64, 4, 2), Tiles(16, 32, 4, 3, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_dtype_and_tiling_gives_the_references_result(dtype: torch.dtype, tiles: Tiles) -> None:
    for lens, sink in ((True, True), (False, False)):
        args = sample(5, 20, width=40, dtype=dtype, lens=lens, sink=sink)
        assert_same(args, tiles)
        assert_same(as_list(args), tiles)


@interpreted
@pytest.mark.parametrize("heads", [1, 8, 17, 64, 100, 128])
def test_any_number_of_heads(heads: int) -> None:
    assert_same(sample(2, heads, width=20, dtype=torch.bfloat16))


@interpreted
@pytest.mark.parametrize("dim", [4, 48, 128, 512])
def test_any_number_of_dims(dim: int) -> None:
    assert_same(sample(3, 2, dim=dim))


@interpreted
def test_queries_and_keys_of_different_dtypes() -> None:
    q, kv, *rest = sample(3)
    assert_same((q.bfloat16(), kv, *rest))
    assert_same((q, kv.bfloat16(), *rest))


@interpreted
def test_more_tokens_than_programs() -> None:
    assert_same(sample(21, 33, width=12), Tiles(16, 16, 4, 1))


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
def test_strides_and_longer_and_wider_buffers_do_not_matter(spread: Any) -> None:
    for make in (lambda args: args, as_list):
        args = list(make(sample(4, width=20)))
        want = launch(tuple(args))
        if args[2].dim() == 2:
            args[2:4] = (torch.cat((x.long(), torch.full_like(x, 2**62, dtype=torch.int64))) for x in args[2:4])
            args[2][:4] += torch.where((args[2][:4] < 0) | (args[2][:4] >= 50), 2**32, 0)
        else:
            args[3] = torch.cat((args[3].long(), torch.tensor([2**62, -(2**62)])))
        args = [spread(x) if isinstance(x, Tensor) else x for x in args]
        for got, expected in zip(launch(tuple(args)), want, strict=True):
            assert_bitwise(got, expected)


@interpreted
@pytest.mark.parametrize("max_row", [0, 3, 5, 10**6])
def test_offsets_outside_the_list_and_a_bound_on_rows(max_row: int) -> None:
    q, kv, indices, _, *rest = sample(7)
    indptr = torch.tensor([-(2**31), -4, 6, 6, 2, 19, 2**31 - 1, -9], dtype=torch.int32)
    args = q, kv, indices.flatten()[:25], indptr, *rest, max_row
    assert_same(args)
    assert_same((*args[:3], indptr.long(), *args[4:]))


@interpreted
@pytest.mark.parametrize("sink", [None, -INF, 0.0, INF])
@pytest.mark.parametrize("empty", ["indices", "length", "columns", "workspace", "list"])
def test_nothing_to_attend_gives_zero_and_infinities(sink: float | None, empty: str) -> None:
    indices = torch.tensor([[-1, 4]] if empty == "indices" else [[0, 1]], dtype=torch.int32)
    bounds = torch.tensor([0 if empty == "length" else 2], dtype=torch.int32)
    kv = torch.full((0 if empty == "workspace" else 4, 8), NAN)
    if empty == "columns":
        indices = indices[:, :0]
    if empty == "list":
        indices, bounds = indices[0, :0], torch.tensor([0, 2])
    logit = None if sink is None else torch.tensor([sink])
    out, top, lse = launch((torch.full((1, 1, 8), NAN), kv, indices, bounds, 1.0, logit, 0))
    assert_bitwise(out, torch.zeros(1, 1, 8))
    assert_bitwise(top, torch.full((1, 1), -INF))
    assert_bitwise(lse, torch.full((1, 1), INF))


@interpreted
@pytest.mark.parametrize(("sink", "kept"), [(-INF, 1.0), (0.0, 0.5), (math.log(3), 0.25), (INF, 0.0)])
def test_the_sink_scales_the_output_and_leaves_the_logits_unchanged(sink: float, kept: float) -> None:
    indices, kv = torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 4), 2.0)
    out, top, lse = launch((torch.zeros(1, 1, 4), kv, indices, None, 1.0, torch.tensor([sink])))
    assert_close(out, torch.full((1, 1, 4), 2.0 * kept), "attention_float32")
    assert top.item() == lse.item() == 0.0


@interpreted
def test_tokens_do_not_influence_each_other() -> None:
    args = sample(5, 2, width=20)
    together = launch(args)
    for t in range(5):
        alone = launch(tuple(x[t : t + 1] if i in (0, 2, 3) else x for i, x in enumerate(args)))
        for a, b in zip(alone, together, strict=True):
            assert_bitwise(a[0], b[t])


@interpreted
def test_no_tokens_and_no_heads_launch_nothing() -> None:
    q, *rest = sample(2)
    for some in (q[:0], q[:, :0]):
        with checked() as launched:
            out, top, lse = launcher("sparse_mla_prefill")(some, *rest[:-1])
        assert launched == [] and out.shape == some.shape and top.shape == lse.shape == some.shape[:2]


@interpreted
def test_both_launchers_take_the_ops_arguments() -> None:
    q, kv, indices, lens, *rest = args = sample(3)
    # Every entry keeps its place in a block of keys, invalid ones too: the sums are added in the same order.
    rows = [row[:length] for row, length in zip(indices, lens.clamp(0, indices.shape[1]).tolist(), strict=True)]
    indptr = torch.tensor([0, *itertools.accumulate(len(row) for row in rows)], dtype=torch.int32)
    listed = launcher("sparse_mla_prefill_ragged")(q, kv, torch.cat(rows), indptr, *rest, 8)
    for a, b in zip(launcher("sparse_mla_prefill")(*args), listed, strict=True):
        assert_bitwise(a, b)


def test_unsupported_calls_say_why() -> None:
    args = sample(2)
    why_unsupported, of_list = refusal("sparse_mla_prefill"), refusal("sparse_mla_prefill_ragged")
    assert why_unsupported is not None and of_list is not None
    assert why_unsupported(*args) == of_list(*as_list(args)) == ""
    wide = torch.zeros(2, 2, 1024), torch.zeros(5, 1024), *args[2:]
    assert "at most 512 dims" in why_unsupported(*wide)
    many = args[1][:1].expand(2**31, -1)
    assert "fewer than" in why_unsupported(args[0], many, *args[2:])
