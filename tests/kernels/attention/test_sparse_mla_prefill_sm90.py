"""The prefill kernel for sm_90, simulated by tests/simulator/gluon.py and copies.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.attention.common import FusedParts
from dsv4_compile.kernels.attention.sparse_mla_prefill import IndexRows, PrefillCall
from dsv4_compile.kernels.host.gpu import Gpu
from dsv4_compile.ops.attention.inv_rope import inv_rope, inv_rope_fp8_quant
from dsv4_compile.ops.attention.sparse_mla_prefill import sparse_mla_prefill, sparse_mla_prefill_ragged
from dsv4_compile.testing import Tolerance, assert_bitwise, assert_close, poisoned_empty
from tests.ops.attention.sparse_mla_calls import EPS, normed_by_a_factor, rope
from tests.ops.attention.test_sparse_mla_prefill import as_list, sample
from tests.simulator import gluon as simulated_gluon
from tests.simulator.copies import simulated

pytestmark = pytest.mark.interpreted
BF16: dict[str, Any] = {"dim": 512, "dtype": torch.bfloat16}
FEW_KEYS = Tolerance(abs=5 * 2.0**-9, rel=2.01 / 128, cosine=1e-5)


Result = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(scope="module")
def hopper() -> Any:
    return simulated("attention.sparse_mla_prefill_sm90")


def call_of(args: tuple[Any, ...]) -> PrefillCall:
    q, kv, indices, bounds, scale, sink, *bound = args
    if indices.dim() == 2:
        return PrefillCall(q, kv, IndexRows(indices, bounds, indices.shape[-1]), scale, sink)
    width = min(bound[0] or len(indices), len(indices))
    return PrefillCall(q, kv, IndexRows(indices, bounds, width, ragged=True), scale, sink)


def run(hopper: Any, args: tuple[Any, ...], sms: int = 2) -> Result:
    call = call_of(args)
    assert hopper.why_unsupported(call) == ""
    with poisoned_empty(), torch.no_grad():
        return hopper.launch(call, Gpu("cuda", 90, sms))


def fused(
    hopper: Any, args: tuple[Any, ...], rope: dict[str, Tensor], sms: int = 2, **options: Any
) -> tuple[Tensor, Tensor]:
    """Run a call with `options` of `FusedParts`, and with positions and table of `rope`."""
    call, parts = call_of(args), FusedParts(**rope, **options)
    assert hopper.why_unsupported(call, parts) == ""
    with poisoned_empty(), torch.no_grad():
        return hopper.launch_fused(call, Gpu("cuda", 90, sms), parts)


def assert_same(got: Result, want: Result) -> None:
    for a, b, label, tolerance in zip(got, want, ("out", "max_logits", "lse"), (FEW_KEYS, "lse", "lse"), strict=True):
        assert_close(a, b, tolerance, label=label)


@pytest.mark.parametrize(("heads", "width"), [(64, 200), (128, 70), (100, 130), (8, 64), (1, 1)])
def test_hostile_rows_give_the_references_result(hopper: Any, heads: int, width: int) -> None:
    """Use lengths from none to all, and more tokens than programs, so that an item could see the one before it."""
    args = sample(7, heads, width=width, **BF16)
    args[3][:4] = torch.tensor([width, 0, 1, width])
    want = sparse_mla_prefill(*args)
    assert_same(run(hopper, args), want)
    assert_same(run(hopper, as_list(args, width), sms=9), want)


@pytest.mark.parametrize("tokens", [0, 1, 2, 5])
@pytest.mark.parametrize("sink", [False, True])
def test_every_token_count_without_lengths(hopper: Any, tokens: int, sink: bool) -> None:
    args = sample(tokens, 64, width=150, lens=False, sink=sink, **BF16)
    assert_same(run(hopper, args, sms=1), sparse_mla_prefill(*args))


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


@pytest.mark.parametrize(("sink", "kept"), [(-torch.inf, 1.0), (0.0, 0.5), (torch.inf, 0.0)])
def test_the_sink_scales_the_output(hopper: Any, sink: float, kept: float) -> None:
    indices, kv = torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 512), 2.0).bfloat16()
    q = torch.zeros(1, 64, 512).bfloat16()
    out, top, lse = run(hopper, (q, kv, indices, None, 1.0, torch.full((64,), sink)))
    assert (out == 2.0 * kept).all() and not top.any() and not lse.any()


@pytest.mark.parametrize("first", [1, 23, 49])
def test_rows_may_lie_in_two_tensors(hopper: Any, first: int) -> None:
    args = sample(5, 64, width=150, **BF16)
    one_tensor = call_of(args)
    apart = one_tensor._replace(kv=one_tensor.kv[:first].clone(), more=one_tensor.kv[first:].clone())
    assert hopper.why_unsupported(apart) == ""
    with poisoned_empty(), torch.no_grad():
        got = hopper.launch(apart, Gpu("cuda", 90, 2))
    for x, y in zip(got, run(hopper, args), strict=True):
        assert_bitwise(x, y)
    strided = apart._replace(more=torch.zeros(3, 528).bfloat16()[:, :512])
    assert "of strides (512, 1), the later ones torch.bfloat16 of (528, 1)" in hopper.why_unsupported(strided)


def test_strided_queries_and_keys(hopper: Any) -> None:
    q, kv, indices, lens, *rest = sample(5, 64, width=70, **BF16)
    wide_q, wide_kv = torch.full((5, 64, 520), torch.nan).bfloat16(), torch.full((50, 528), torch.nan).bfloat16()
    wide_q[..., :512], wide_kv[:, :512] = q, kv
    wide = torch.nn.functional.pad(indices, (0, 3), value=7)[:, :70], torch.stack((lens, lens), 1)[:, 0]
    got = run(hopper, (wide_q[..., :512], wide_kv[:, :512], *wide, *rest))
    assert_same(got, sparse_mla_prefill(q, kv, indices, lens, *rest))


def assert_normed(got: tuple[Tensor, Tensor], args: tuple[Any, ...], where: dict[str, Tensor]) -> None:
    """Check a call with norm and RoPE inside against what the kernel computes."""
    q, kv, *rest = args
    out, _, lse = sparse_mla_prefill(normed_by_a_factor(q, *where.values()), kv.float(), *rest)
    assert_close(got[0], out.bfloat16(), FEW_KEYS, label="out")
    assert_close(got[1], lse, "lse", label="lse")


@pytest.mark.parametrize(
    ("tokens", "heads", "width", "rope_dim"), [(7, 64, 200, 64), (5, 128, 70, 64), (5, 100, 130, 32), (3, 8, 64, 64)]
)
def test_queries_are_normed_and_rotated_inside(hopper: Any, tokens: int, heads: int, width: int, rope_dim: int) -> None:
    """Programs have several items, of no, one or several blocks."""
    args, where = sample(tokens, heads, width=width, **BF16), rope(tokens, rope_dim)
    args[3][:3] = torch.tensor([width, 0, 1])
    assert_normed(fused(hopper, args, where, q_norm_eps=EPS), args, where)
    assert_normed(fused(hopper, as_list(args, width), where, 9, q_norm_eps=EPS), args, where)


@pytest.mark.parametrize("magnitude", [0.0, 1e-30, 1e-3, 1e15, 1e25])
def test_queries_of_any_magnitude_are_normed(hopper: Any, magnitude: float) -> None:
    """The squares of the largest overflow and count as zero, with invalid slots too."""
    args, where = sample(3, 64, width=130, **BF16), rope(3, 64)
    args[3][:] = torch.tensor([130, 5, 64])
    args[0][:, ::3] *= magnitude
    got = fused(hopper, args, where, q_norm_eps=EPS)
    assert_normed(got, args, where)
    assert got[0].isfinite().all() and got[1].isfinite().all()


@pytest.mark.parametrize("dim", [5, 512 - 3])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_of_a_query_that_are_not_finite_stay_with_its_head(hopper: Any, value: float, dim: int) -> None:
    """Without keys they have no effect."""
    args, where = sample(3, 64, width=130, **BF16), rope(3, 64)
    args[3][:] = torch.tensor([130, 70, 70])
    args[2][2] = -1
    usual = fused(hopper, args, where, q_norm_eps=EPS)
    args[0][0, 17, dim] = args[0][2, 3, dim] = value
    got = fused(hopper, args, where, q_norm_eps=EPS)
    assert got[0][0, 17].isnan().all() and got[1][0, 17].isnan()
    assert not got[0][2].any() and got[1][2].isposinf().all()
    for a, b in zip(got, usual, strict=True):
        a[0, 17] = b[0, 17]
        assert_bitwise(a, b)


@pytest.mark.parametrize("normed", [False, True])
def test_outputs_are_rotated_back_as_by_inv_rope(hopper: Any, normed: bool) -> None:
    args, where = sample(5, 100, width=130, **BF16), rope(5, 64)
    args[3][:2] = torch.tensor([130, 0])
    norm = {"q_norm_eps": EPS} if normed else {}
    out, lse = fused(hopper, args, where, **norm)
    if not normed:
        plain = run(hopper, args)
        assert_bitwise(out, plain[0])
        assert_bitwise(lse, plain[2])
    got = fused(hopper, args, where, inverse_rope=True, **norm)
    assert_bitwise(got[0], inv_rope(out, **where))
    assert_bitwise(got[1], lse)


@pytest.mark.parametrize(
    ("tokens", "heads", "groups"),
    [
        (5, 64, (8, 8, False)),
        (1, 64, (8, 8, True)),
        (3, 64, (3, 21, False)),
        (3, 128, (2, 60, True)),
        (2, 70, (7, 10, False)),
    ],
)
def test_quantised_rows_are_those_of_inv_rope_fp8_quant(
    hopper: Any, tokens: int, heads: int, groups: tuple[int, int, bool]
) -> None:
    """The last token has no keys: tiles of zeros; scales have padding."""
    args, where = sample(tokens, heads, width=70, **BF16), rope(tokens, 64)
    args[3][-1] = 0
    options = dict(zip(("n_groups", "heads_per_group", "packed_scales"), groups, strict=True))
    out, _ = fused(hopper, args, where, q_norm_eps=EPS)
    got = fused(hopper, args, where, q_norm_eps=EPS, inverse_rope=True, **options)
    for a, b in zip(
        got,
        inv_rope_fp8_quant(out, **where, n_groups=groups[0], heads_per_group=groups[1], packed_scales=groups[2]),
        strict=True,
    ):
        assert_bitwise(a, b, strides=True)
    rows = got[1].as_strided((groups[0], got[1].shape[2], -(-tokens // 4) * 4), (*got[1].stride()[1:], 1))
    assert (rows[..., tokens:] == 0).all()


@pytest.mark.parametrize("name", ["wait", "arrive"])
def test_a_kernel_without_its_barriers_fails(hopper: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The simulation proves nothing unless it fails for a kernel that is wrong."""
    args, where = sample(5, 64, width=250, **BF16), rope(5, 64)
    args[3].fill_(250)
    barriers = hopper.sparse_mla_prefill_sm90_kernel.function.__globals__["mbarrier"]
    monkeypatch.setattr(barriers, name, lambda *_, **__: None)
    monkeypatch.setattr(simulated_gluon, "SECONDS", 0.5)
    with pytest.raises(AssertionError):
        assert_normed(fused(hopper, args, where, q_norm_eps=EPS), args, where)
