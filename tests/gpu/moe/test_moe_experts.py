"""`moe_experts` on a GPU: every format and size against float32, repeats, capture, streams, and hostile inputs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.moe import moe_experts as kernels
from dsv4_compile.kernels.moe import moe_experts_sm90 as sm90
from dsv4_compile.kernels.moe import moe_experts_sm90_few_tokens as few_tokens
from dsv4_compile.reference.moe.expert_weights import interleave_
from dsv4_compile.reference.moe.moe_experts import ExpertsArguments
from dsv4_compile.testing import hostile_indices, strided
from tests.kernels.moe.problems import (
    ACCURACY,
    E8M0_BYTES,
    FORMATS,
    assert_accurate,
    error,
    exact,
    experts,
    weight,
    with_scale,
)

CUDA = torch.device("cuda")
EXPERTS, HIDDEN, INNER, TOP_K = 64, 4096, 2048, 6
"""V4-Flash with a quarter of its experts, so that a tile of tokens fills at fewer of them."""
TOKENS = (1, 2, 4, 9, 33, 128, 171, 300, 512, 1500)
moe_experts = kernels.moe_experts


@functools.cache
def weights(kind: str, shared: str) -> ExpertsArguments:
    """Return arguments without tokens; results of few tokens would cost as much as the weights."""
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden": HIDDEN, "inner": INNER, "shared_inner": INNER, "count": EXPERTS, "top_k": TOP_K}
    return experts(0, kind=kind, shared=shared, device=CUDA, **sizes)


def problem(tokens: int, kind: str, shared: str = "e4m3", among: int = EXPERTS) -> ExpertsArguments:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, device=CUDA).bfloat16()
    ids = torch.rand(tokens, among, device=CUDA).argsort(1)[:, :TOP_K].int()
    return weights(kind, shared)._replace(x=x, ids=ids, weights=torch.rand(tokens, TOP_K, device=CUDA) + 0.1)


def check(call: ExpertsArguments) -> Tensor:
    """Compare with float32; of many tokens only the first 300, since their reference runs in a second."""
    assert kernels.why_unsupported_moe_experts(call) == ""
    got = moe_experts(call)
    some = slice(0, 300)
    assert_accurate(got[some], call._replace(x=call.x[some], ids=call.ids[some], weights=call.weights[some]))
    return got


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("kind", FORMATS)
def test_layers_of_the_model(kind: str, tokens: int) -> None:
    check(problem(tokens, kind, "bfloat16" if kind == "bfloat16" else "e4m3"))


@pytest.mark.parametrize("kind", ["bfloat16", "interleaved", "mxfp4"])
@pytest.mark.parametrize("tokens", [40, 700])
def test_crowded_experts(kind: str, tokens: int) -> None:
    check(problem(tokens, kind, "bfloat16" if kind == "bfloat16" else "e4m3", among=7))


def test_a_prompt_of_70_000_tokens() -> None:
    call = problem(70_000, "interleaved")
    got, last = check(call), slice(-200, None)
    last_tokens = call._replace(x=call.x[last], ids=call.ids[last], weights=call.weights[last])
    assert error(got[last], exact(last_tokens)) <= ACCURACY


@pytest.mark.parametrize("tokens", [1, 20, 600])
def test_ranks_of_experts_and_of_the_intermediate_dim(tokens: int) -> None:
    call = problem(tokens, "mxfp4")
    for first in (0, 32):
        rows = slice(first, first + 32)
        shard = {name: getattr(call, name)[rows] for name in ("w13", "w2", "w13_scale", "w2_scale")}
        check(call._replace(**shard, first_expert=first))
    for inner in (128, 256, 384):
        check(experts(tokens, kind="interleaved", shared="e4m3", hidden=1024, inner=inner, count=12, device=CUDA))


@pytest.mark.parametrize(
    ("kind", "tokens"), [("interleaved", 1), ("interleaved", 50), ("interleaved", 600), ("mxfp4", 50), ("mxfp4", 4)]
)
def test_hostile_ids_strides_and_nan(kind: str, tokens: int) -> None:
    call = problem(tokens, kind)
    ids = hostile_indices((tokens, TOP_K), EXPERTS, fraction=0.3, device=CUDA)
    check(call._replace(ids=ids, x=strided(call.x), weights=strided(call.weights)))
    check(call._replace(ids=torch.full_like(call.ids, -1).long()))
    x = call.x.clone()
    x[0, 17], x[-1, 3] = torch.nan, torch.inf
    if kind == "interleaved":
        check(call._replace(x=x))
    else:  # e4m3 has no infinity: the token is NaN, and others are not
        got, rest = moe_experts(call._replace(x=x)), slice(1, -1)
        assert got[0].isnan().all() and got[-1].isnan().all()
        assert_accurate(got[rest], call._replace(x=x[rest], ids=call.ids[rest], weights=call.weights[rest]))
    check(call._replace(x=60 * call.x))


def test_nan_in_the_weight_of_gate_or_up_is_not_clamped() -> None:
    for row in (7, 128 + 7):
        call = experts(9, hidden=256, inner=128, count=4, device=CUDA)
        call.w13[2, row, 5] = torch.nan
        check(call)


@pytest.mark.parametrize(("kind", "tokens"), [("interleaved", 20), ("mxfp4", 20), ("mxfp4", 3)])
def test_every_e8m0_scale_means_its_power_of_two(kind: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90, "FEW_CTAS", 0)
    kernels.plan.cache_clear()
    for name in ("w13", "w2"):
        call = experts(tokens, kind=kind, hidden=512, inner=256, device=CUDA)
        for byte in E8M0_BYTES:
            check(with_scale(call, name, byte, down=16))


@pytest.mark.parametrize("shared", ["", "e4m3"])
def test_few_tokens_an_expert_are_split_and_as_accurate(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper; elsewhere all tests run the other kernels."""
    if kernels.gpu_of(CUDA).capability != 90:
        pytest.skip("kernels of sm_90")
    seen, launch = [], sm90.launch
    monkeypatch.setattr(sm90, "FEW_CTAS", 0)
    monkeypatch.setattr(few_tokens, "MOST_TOKENS", 0)
    kernels.plan.cache_clear()
    monkeypatch.setattr(sm90, "launch", lambda *args: (seen.append(1), launch(*args))[1])
    sizes: dict[str, Any] = {"kind": "mxfp4", "shared": shared, "count": 40, "top_k": 6, "device": CUDA}
    for tokens, hidden, inner in ((1, 256, 384), (17, 384, 128), (53, 4096, 640)):
        call = experts(tokens, hidden=hidden, inner=inner, shared_inner=256, **sizes)
        assert error(check(call).float(), exact(call)) < 2.5e-3
        one = call._replace(x=call.x[:1], ids=call.ids[:1], weights=call.weights[:1])
        assert torch.equal(moe_experts(one), moe_experts(call)[:1])
    assert len(seen) == 9


@pytest.mark.parametrize("tokens", [1, 50])
def test_every_e4m3_code_is_its_value_and_nan_is_nan(tokens: int) -> None:
    call = experts(tokens, kind="e4m3", shared="e4m3", hidden=512, inner=512, shared_inner=512, device=CUDA)
    codes = torch.arange(256, dtype=torch.uint8, device=CUDA)
    finite = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    for name in ("w13", "w2", "shared_w13", "shared_w2"):
        values = getattr(call, name).flatten()
        values[: finite.numel()] = finite
    check(call)
    call.shared_w2[7, 3] = float("nan")
    got = moe_experts(call).isnan()
    assert got[:, 7].all() and got.sum() == tokens


def test_without_tma_and_ptx_results_are_as_accurate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of other GPUs."""
    gpu = kernels.gpu_of(CUDA)
    for kind in ("mxfp4", "interleaved", "e4m3"):
        for tokens in (1, 50):
            call = problem(tokens, kind)
            want = moe_experts(call)
            with monkeypatch.context() as patch:
                patch.setattr(kernels, "gpu_of", lambda device: gpu._replace(capability=80))
                assert error(check(call), want) <= 2 * ACCURACY  # from the exact result, one ACCURACY either way


@pytest.mark.parametrize(
    ("kind", "tokens"), [*(("interleaved", tokens) for tokens in (1, 8, 128, 400, 1100)), ("mxfp4", 32), ("mxfp4", 2)]
)
def test_repeats_capture_and_streams(kind: str, tokens: int) -> None:
    call = problem(tokens, kind)
    want = moe_experts(call)
    for _ in range(20):
        assert torch.equal(moe_experts(call), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [moe_experts(call) for _ in range(3)]
    for _ in range(3):
        call.x.copy_(call.x.flip(0))
        graph.replay()
        want = moe_experts(call)
        assert all(torch.equal(one, want) for one in captured)
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(3)], []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(moe_experts(call))
    torch.cuda.synchronize()
    assert all(torch.equal(one, want) for one in results)


def test_weights_are_interleaved_in_place_with_little_memory() -> None:
    packed, scale = weight("mxfp4", 8, 4096, 4096, device=CUDA)
    assert scale is not None
    big, scales = packed.repeat(16, 1, 1), scale.repeat(16, 1, 1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    interleave_(big, scales)
    # 1 % of the experts of a layer of V4-Flash.
    assert torch.cuda.max_memory_allocated() - before <= 32e6
