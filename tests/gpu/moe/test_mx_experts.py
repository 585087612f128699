"""`mx_experts` on a GPU against the reference there, at the sizes of DeepSeek-V4.1: repeats, capture, hostile ids."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.moe import mx_experts as kernels
from dsv4_compile.reference.linear.mx_linear import rounded_input
from dsv4_compile.reference.moe.mx_experts import MxExperts
from dsv4_compile.reference.moe.mx_experts import mx_experts as reference
from dsv4_compile.testing import hostile_indices, padded, strided
from tests.kernels.moe.mx_problems import mx_experts
from tests.kernels.moe.problems import error

ACCURACY = 6e-3
"""Relative error of all results: a sum in a different order may round a hidden state to its neighbour in e4m3."""
FLASH = {"hidden": 5120, "inner": 2304, "shared_inner": 2304, "top_k": 6, "device": "cuda"}


def check(call: MxExperts) -> Tensor:
    assert kernels.why_unsupported_mx_experts(call) == ""
    got, want = kernels.mx_experts(call), reference(call)
    assert (got.dtype, got.shape, got.is_contiguous()) == (want.dtype, want.shape, True)
    assert torch.equal(got.isnan(), want.isnan())
    got_, want_ = got.double().nan_to_num(), want.double().nan_to_num()
    assert error(got_, want_) <= ACCURACY
    worst = (got_ - want_).norm(dim=1) - 5 * ACCURACY * want_.norm(dim=1)
    assert not len(worst) or worst.max() <= 1e-6 * want_.norm(), "a token is wrong"
    return got


@pytest.mark.parametrize(
    ("tokens", "quantize"), [*((n, True) for n in (1, 8, 33, 100, 128, 400)), *((n, False) for n in (1, 40, 300))]
)
def test_experts_of_the_model(tokens: int, quantize: bool) -> None:
    check(mx_experts(tokens, count=12, quantize=quantize, **FLASH))


@pytest.mark.parametrize("tokens", [1000, 4000])
def test_many_tokens_of_few_experts(tokens: int) -> None:
    check(mx_experts(tokens, count=8, **FLASH | {"top_k": 2}))


@pytest.mark.parametrize("shared_inner", [1152, 576, 288])
@pytest.mark.parametrize("tokens", [1, 33, 128])
def test_rows_of_the_shared_expert_of_a_rank(tokens: int, shared_inner: int) -> None:
    call = mx_experts(tokens, count=8, **FLASH | {"shared_inner": shared_inner})
    check(call._replace(first_expert=4))  # half of the places are of other ranks


@pytest.mark.parametrize("tokens", [1, 7, 40, 300])
def test_small_sizes_formats_and_strides(tokens: int) -> None:
    small = {"hidden": 256, "count": 9, "device": "cuda", "top_k": 3}
    for kind, shared, quantize in (("mxfp4", "bfloat16", True), ("bfloat16", "bfloat16", True)):
        check(mx_experts(tokens, kind=kind, shared=shared, quantize=quantize, shared_inner=64, **small))
    call = mx_experts(tokens, **small)
    for spread in (padded, strided):
        check(call._replace(x=spread(call.x), ids=spread(call.ids).long(), weights=spread(call.weights)))
    check(call._replace(x=call.x * 16, limit=0.7))


@pytest.mark.parametrize("tokens", [1, 50, 500])
def test_hostile_ids_and_nan(tokens: int) -> None:
    call = mx_experts(tokens, hidden=256, count=9, top_k=3, device="cuda")
    check(call._replace(ids=hostile_indices((tokens, 3), 9, fraction=0.3, device=torch.device("cuda"))))
    check(call._replace(ids=torch.full_like(call.ids, -1)))
    call.x[0, 3] = torch.nan
    assert check(call)[0].isnan().all()


def test_inputs_are_rounded_as_by_the_reference_in_both_orders() -> None:
    x = (torch.randn(70, 5120, device="cuda") * 10.0 ** torch.randint(-9, 3, (70, 1), device="cuda")).bfloat16()
    unpacked, natural = kernels.round_input(x, True, True)
    assert unpacked is not None and natural is not None
    want = rounded_input(x.float(), True)
    assert torch.equal(natural.float(), want)
    assert torch.equal(unpacked.view(70, -1, 2, 2, 8).permute(0, 1, 4, 3, 2).reshape(70, -1).float(), want)


@pytest.mark.parametrize("tokens", [1, 8, 64, 200, 1500])
def test_repeats_capture_and_streams(tokens: int) -> None:
    call = mx_experts(tokens, count=12, **FLASH)
    want = kernels.mx_experts(call)
    for _ in range(300):  # a fault of one call in 40 has been seen
        assert torch.equal(kernels.mx_experts(call), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [kernels.mx_experts(call) for _ in range(3)]
    for _ in range(3):
        call.x.copy_(call.x.flip(0))
        call.ids.copy_(call.ids.flip(0))
        graph.replay()
        want = kernels.mx_experts(call)
        assert all(torch.equal(one, want) for one in captured)
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(4)], []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(kernels.mx_experts(call))
    torch.cuda.synchronize()
    assert all(torch.equal(one, want) for one in results)
