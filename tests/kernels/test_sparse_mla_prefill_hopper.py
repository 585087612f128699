"""The Hopper prefill kernel, simulated: see simulated_gluon.py and simulated_copies.py for what that means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.gpu import Gpu
from dsv4_compile.kernels.sparse_mla_prefill_portable import Rows
from dsv4_compile.ops.sparse_mla_prefill import sparse_mla_prefill, sparse_mla_prefill_ragged
from dsv4_compile.testing import Tolerance, assert_close, poisoned_empty
from tests.kernels.simulated_copies import simulated
from tests.ops.test_sparse_mla_prefill import as_list, sample

pytestmark = pytest.mark.interpreted
BF16: dict[str, Any] = {"dim": 512, "dtype": torch.bfloat16}
FEW_KEYS = Tolerance(abs=5 * 2.0**-9, rel=2.01 / 128, cosine=1e-5)

Result = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(scope="module")
def hopper() -> Any:
    return simulated("sparse_mla_prefill_hopper", "kv_load_hopper", "gather_rows_hopper")


def run(hopper: Any, args: tuple[Any, ...], processors: int = 2) -> Result:
    q, kv, indices, bounds, scale, sink, *bound = args
    rows = Rows(indices, bounds, indices.shape[-1])
    if indices.dim() == 1:
        rows = Rows(indices, bounds, min(bound[0] or len(indices), len(indices)), ragged=True)
    assert hopper.hopper_refuses(q, kv, rows, scale, sink) == ""
    with poisoned_empty(), torch.no_grad():
        return hopper.launch_hopper(q, kv, rows, scale, sink, Gpu("cuda", 90, processors))


def assert_same(got: Result, want: Result) -> None:
    for a, b, label, tolerance in zip(got, want, ("out", "max_logits", "lse"), (FEW_KEYS, "lse", "lse"), strict=True):
        assert_close(a, b, tolerance, label=label)


@pytest.mark.parametrize(("heads", "width"), [(64, 200), (128, 70), (100, 130), (8, 64), (1, 1)])
def test_hostile_rows_give_the_references_result(hopper: Any, heads: int, width: int) -> None:
    """Lengths from none to all, more tokens than programs, and nothing left of one item in the next."""
    args = sample(7, heads, width=width, **BF16)
    args[3][:4] = torch.tensor([width, 0, 1, width])
    want = sparse_mla_prefill(*args)
    assert_same(run(hopper, args), want)
    assert_same(run(hopper, as_list(args, width), processors=9), want)


@pytest.mark.parametrize("tokens", [0, 1, 2, 5])
@pytest.mark.parametrize("sink", [False, True])
def test_every_token_count_without_lengths(hopper: Any, tokens: int, sink: bool) -> None:
    args = sample(tokens, 64, width=150, lens=False, sink=sink, **BF16)
    assert_same(run(hopper, args, processors=1), sparse_mla_prefill(*args))


def test_rows_without_keys_whatever_the_queries_hold(hopper: Any) -> None:
    args = sample(6, 64, width=70, **BF16)
    args[0][::2] = torch.nan
    args[2][:4:2] = -1
    args[3].fill_(70)
    args[3][4] = 0
    out, top, lse = run(hopper, args)
    assert not out[::2].any() and top[::2].isneginf().all() and lse[::2].isposinf().all()
    assert_same(tuple(x[1::2] for x in (out, top, lse)), tuple(x[1::2] for x in sparse_mla_prefill(*args)))


@pytest.mark.parametrize("max_row", [0, 3])
def test_offsets_outside_the_list(hopper: Any, max_row: int) -> None:
    q, kv, indices, _, *rest = sample(7, 64, **BF16)
    indptr = torch.tensor([-(2**31), -4, 6, 6, 2, 19, 2**31 - 1, -9], dtype=torch.int32)
    args = q, kv, indices.flatten()[:25], indptr, *rest, max_row
    assert_same(run(hopper, args), sparse_mla_prefill_ragged(*args))


@pytest.mark.parametrize(("sink", "share"), [(-torch.inf, 1.0), (0.0, 0.5), (torch.inf, 0.0)])
def test_the_sink_takes_its_share(hopper: Any, sink: float, share: float) -> None:
    indices, kv = torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 512), 2.0).bfloat16()
    q = torch.zeros(1, 64, 512).bfloat16()
    out, top, lse = run(hopper, (q, kv, indices, None, 1.0, torch.full((64,), sink)))
    assert (out == 2.0 * share).all() and not top.any() and not lse.any()


def test_rows_apart(hopper: Any) -> None:
    q, kv, indices, lens, *rest = sample(5, 64, width=70, **BF16)
    wide_q, wide_kv = torch.full((5, 64, 520), torch.nan).bfloat16(), torch.full((50, 528), torch.nan).bfloat16()
    wide_q[..., :512], wide_kv[:, :512] = q, kv
    wide = torch.nn.functional.pad(indices, (0, 3), value=7)[:, :70], torch.stack((lens, lens), 1)[:, 0]
    got = run(hopper, (wide_q[..., :512], wide_kv[:, :512], *wide, *rest))
    assert_same(got, sparse_mla_prefill(q, kv, indices, lens, *rest))
