"""`mhc_head` against transformers, with and without the output of the last sub-layer."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from dsv4_compile.errors import InputError
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.ops.hyper_connections.mhc_head import mhc_head
from dsv4_compile.testing import assert_bitwise, check_op
from tests.kernels.hyper_connections.calls import arguments, wrong


@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_results_are_those_in_float64(tokens: int, dtype: torch.dtype, returned: bool) -> None:
    args = arguments("mhc_head", tokens, 64, dtype)[: 10 if returned else 7]
    assert wrong("mhc_head", args, mhc_head(*args)) == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_head_and_norm_of_transformers(dtype: torch.dtype) -> None:
    config = DeepseekV4Config(hidden_size=48, hc_mult=4, hc_eps=1e-4, rms_norm_eps=1e-5)
    head, norm = hf.DeepseekV4HyperHead(config), hf.DeepseekV4RMSNorm(48, eps=1e-5)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in (*head.parameters(), *norm.parameters()):
            parameter.normal_()
        streams = torch.randn(2, 3, 4, 48).to(dtype)
        want = norm(head(streams)).flatten(0, 1)
        got = mhc_head(streams.flatten(0, 1), head.hc_fn, head.hc_base, head.hc_scale, norm.weight, 1e-5, 1e-4)
    torch.testing.assert_close(got, want.to(dtype), rtol=2.0**-7 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)


def test_an_output_is_returned_to_the_streams_before() -> None:
    streams, *mix, output, post, comb = arguments("mhc_head", 5, 48)
    want = mhc_head(torch.ops.dsv4.mhc_post(streams, output, post, comb), *mix)
    assert_bitwise(mhc_head(streams, *mix, output, post, comb), want, strides=True)


def test_op_keeps_its_promises() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        calls = [arguments("mhc_head", tokens, 32, dtype) for tokens in (0, 1, 5)]
        check_op(OPS["mhc_head"], [*calls, *(call[:7] for call in calls)], utilities=dtype is torch.bfloat16)


def test_an_output_without_its_coefficients_raises() -> None:
    args = arguments("mhc_head", 2, 32, torch.float32)
    with pytest.raises(InputError, match="mhc_head: output and post alone"):
        mhc_head(*args[:9])
    with pytest.raises(InputError, match="fn has a row"):
        mhc_head(args[0], torch.ones(5, 128), *args[2:7])
