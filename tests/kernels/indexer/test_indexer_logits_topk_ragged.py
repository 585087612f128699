"""The kernels that score and select gathered indexer keys against the reference, every access checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.indexer import indexer_logits as kernel
from dsv4_compile.kernels.indexer.score_triton import RaggedScoreCall
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher, refusal
from dsv4_compile.reference.common.kv_format import quantize_indexer
from dsv4_compile.reference.indexer import indexer_logits as reference
from dsv4_compile.reference.indexer.indexer_logits import RaggedTopkArguments
from dsv4_compile.reference.indexer.indexer_q_rope_quant import indexer_q_rope_quant
from dsv4_compile.testing import Tolerance, assert_bitwise, assert_close, padded, poison_, strided
from dsv4_compile.testing.samples import op_samples
from tests.kernels.gpus import GPUS
from tests.ops.preprocess.compressor_engine import rope_table
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
FORMATS = pytest.mark.parametrize("fmt", layout.INDEXER_FORMATS)
SUM = Tolerance(abs=2e-5, rel=2e-5, cosine=1e-10)
"""float32 sums of 128 products of order one, then of up to 64 heads, in a different order."""
INF, NAN = math.inf, math.nan
SMALL = (16, 16, 4, 1)
OUTPUTS = ("p_out", "p_lens", "outputs[0]", "best[0]", "best[1]", "p_arrived")
OP = "indexer_logits_topk_ragged"


def why_unsupported(*args: Any) -> str:
    check = refusal(OP)
    assert check is not None
    return check(*args)


def select(*args: Any, **tiles: Any) -> Tensor:
    with checked(OUTPUTS):
        return launcher(OP)(*args, **({"score_tile": SMALL} | tiles))


def logits(*args: Any, tile: tuple[int, int, int, int] = SMALL) -> Tensor:
    """float32 `[T, N]` of the kernel, -inf where nothing is visible."""
    out = torch.full((args[0].shape[0], args[3].shape[0]), -INF)
    with checked(OUTPUTS):
        lens = torch.empty(len(out), dtype=torch.int32)
        kernel.score_ragged(RaggedScoreCall(RaggedTopkArguments(*args, topk=1), out, lens), tile=tile)
    return out


def want_logits(*args: Any) -> Tensor:
    """Return the logits of the reference, with the row of a request as if it were the only one."""
    op = RaggedTopkArguments(*args, topk=1)
    out = torch.full((len(op.q), len(op.k)), -INF)
    values, seen = reference.score_rows(op, slice(len(op.q)))
    for t in range(len(op.q)):
        mine = values[t][seen[t]]
        out[t, : len(mine)] = mine
    return out


def batch(fmt: str, tokens: int, rows: int = 70, heads: int = 4, dim: int = 128) -> tuple[Any, ...]:
    """Runs of rows of every kind, some of them in order as of one prompt; NaN after the last row."""
    kind = torch.float32 if fmt == "plain" else torch.bfloat16
    q, weights = torch.randn(tokens, heads, dim).to(kind), torch.randn(tokens, heads)
    origin = torch.zeros(tokens, dtype=torch.int64)
    prepared = indexer_q_rope_quant(q, origin, rope_table(40, min(64, dim // 2)), weights, fmt)
    keys = torch.randn(rows, dim)
    gathered: tuple[Tensor, ...] = (keys, torch.empty(rows, 0, dtype=torch.uint8))
    if fmt != "plain":
        gathered = tuple(tensor.view(torch.uint8) for tensor in quantize_indexer(keys.bfloat16().float(), fmt))
    gathered = tuple(torch.cat((x, poison_(torch.empty_like(x))))[:rows] for x in gathered)
    starts = torch.sort(torch.randint(3, (tokens,))).values * (rows // 4)
    ends = starts + torch.randint(-2, rows // 2, (tokens,))
    ends[:2] = rows + 9
    return (*prepared, *gathered, starts.int(), ends.int(), fmt)


def by_own_logits(args: tuple[Any, ...], topk: int, tile: tuple[int, int, int, int] = SMALL) -> Tensor:
    """Select by the rule of the reference from the logits that the kernel calculates."""
    values = logits(*args, tile=tile)
    return reference.select_topk(values, values != -INF, topk)


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
def test_samples() -> None:
    for args in op_samples("indexer_logits_topk_ragged"):
        assert why_unsupported(*args) == ""
        assert_bitwise(select(*args), REFERENCES[OP](*args), strides=True)


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@FORMATS
@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (18, 3)])
def test_logits_and_selection(fmt: str, tokens: int, heads: int) -> None:
    args = batch(fmt, tokens, heads=heads)
    assert_close(logits(*args), want_logits(*args), SUM)
    for topk in (5, 80):
        assert_bitwise(select(*args, topk), by_own_logits(args, topk))


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
def test_neither_tiles_nor_the_bound_on_logits_change_the_selection() -> None:
    args = batch("indexer_fp8", 9)
    want = by_own_logits(args, 9)
    assert_bitwise(select(*args, 9, programs=1, score_tile=(32, 64, 4, 2), select_tile=(16, 1)), want)
    for limit in (0, 4 * 80 * 4):
        assert_bitwise(select(*args, 9, limit), want)


@interpreted
def test_rows_of_narrow_dtypes_and_few_dims() -> None:
    for dtype, dim in ((torch.bfloat16, 16), (torch.float16, 64)):
        q, q_scale, weights, k, *rest = batch("plain", 5, dim=dim)
        args = (q.to(dtype), q_scale, weights, k.to(dtype), *rest)
        assert_close(logits(*args), want_logits(*args), SUM)


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
@FORMATS
def test_any_strides_and_spare_tokens(fmt: str, spread: Callable[[Tensor], Tensor]) -> None:
    args = batch(fmt, 6)
    q, q_scale, weights, k, k_scale, starts, ends, _ = args
    want = select(q[:5], q_scale[:5], weights[:5], k, k_scale, starts, ends, fmt, 7)
    few = spread(q[:5]), spread(q_scale[:5]), spread(weights[:5])
    assert_bitwise(select(*few, spread(k), spread(k_scale), spread(starts.long()), spread(ends), fmt, 7), want)


def values_of(values: list[float], starts: list[int], ends: list[int]) -> tuple[Any, ...]:
    """Rows that have these logits. Two heads see k and -k, with weights 1 and -1: relu(k) - relu(-k) is k."""
    q, k = torch.zeros(len(starts), 2, 16), torch.zeros(len(values), 16)
    q[:, 0, 0], q[:, 1, 0], k[:, 0] = 1.0, -1.0, torch.tensor(values)
    weights, bounds = torch.tensor([1.0, -1.0]).repeat(len(starts), 1), (torch.tensor(starts), torch.tensor(ends))
    return q, q[..., :0], weights, k, k[:, :0].to(torch.uint8), *bounds, "plain"


@interpreted
@pytest.mark.parametrize(
    "values",
    [
        pytest.param([0.0] * 9, id="all equal"),
        pytest.param([1.0, 3.0, 2.0, 3.0, 3.0, 3.0], id="tie at the last place"),
        pytest.param([-INF, 1.0, INF, -2.0, INF], id="infinities"),
        pytest.param([NAN, 1.0, NAN, -2.0, -INF], id="NaN loses to minus infinity"),
        pytest.param([NAN] * 6, id="NaN alone"),
        pytest.param([1e-40, -1e-40, 0.0, 2e-40, -2e-40, 1.5e-40], id="subnormal"),
        pytest.param((torch.arange(60) % 5).float().tolist(), id="many ties"),
    ],
)
def test_special_values_ties_and_starts(values: list[float]) -> None:
    n = len(values)
    args = values_of(values, [0, 0, 1, n - 2, 0, n, -1, 5, 2**40], [n, n - 1, n, n, 0, n + 3, n, 2, 2**41])
    for topk in (3, 8):
        assert_bitwise(select(*args, topk), REFERENCES[OP](*args, topk))


@interpreted
def test_nothing_to_see_gives_padding() -> None:
    args = batch("indexer_fp8", 3)
    none = [x[:0] if i in (3, 4) else x for i, x in enumerate(args)]
    assert select(*none, 4).tolist() == [[-1] * 4] * 3
    no_tokens = [x[:0] if i in (0, 1, 2) else x for i, x in enumerate(args)]
    assert select(*no_tokens, 4).shape == (0, 4)


def test_a_chunk_of_a_long_prompt_takes_no_more_memory_for_scores_than_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens, rows, seen = 8192, 131072, list[tuple[int, int]]()

    def score(call: RaggedScoreCall, *_: Any) -> None:
        seen.append((call.op.q.shape[0], call.out.untyped_storage().nbytes()))

    monkeypatch.setattr(kernel, "score_ragged", score)
    monkeypatch.setattr(kernel, "select", lambda out, keys, tile: None)
    with torch.device("meta"):
        q = torch.empty(tokens, 64, 128, dtype=torch.float8_e4m3fn)
        k, k_scale = torch.empty(rows, 128, dtype=torch.uint8), torch.empty(rows, 4, dtype=torch.uint8)
        bounds = torch.empty(tokens, dtype=torch.int32)
        args = q, torch.empty(tokens, 64, 0), torch.empty(tokens, 64), k, k_scale, bounds, bounds, "indexer_fp8", 512
    kernel.indexer_logits_topk_ragged(RaggedTopkArguments(*args))
    assert seen == [(1024, reference.MAX_LOGITS_BYTES)] * 8 and reference.MAX_LOGITS_BYTES == 512 << 20
    kernel.indexer_logits_topk_ragged(RaggedTopkArguments(*args, 100 << 20))
    assert sum(count for count, _ in seen[8:]) == tokens and max(size for _, size in seen[8:]) <= 100 << 20


def test_unsupported_calls_name_the_limit_and_the_value() -> None:
    args = batch("plain", 2)
    assert "torch.bfloat16, torch.float32" in why_unsupported(args[0].bfloat16(), *args[1:], 8)
    assert "from 16 to 128, these have 8" in why_unsupported(args[0][..., :8], *args[1:], 8)


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "gpu_of", lambda device: GPUS[target][0])
    with compiled_for(target) as compiled:
        launcher(OP)(*batch("indexer_fp8", 2, heads=64), 512)
    assert (compiled[0].metadata.name == "indexer_score_ragged_sm90_kernel") is (target == "sm_90")
    assert all(binary.assembled for binary in compiled)
    assert max(binary.metadata.shared for binary in compiled) <= 64 * 1024 or not target.startswith("gfx942")
