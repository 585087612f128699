"""`mhc_boundary` is the post of one sub-layer and the pre of the next."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.ops.hyper_connections.mhc_boundary import mhc_boundary
from dsv4_compile.testing import assert_bitwise, check_op
from tests.kernels.hyper_connections.calls import arguments, wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_results_are_those_in_float64(tokens: int, dtype: torch.dtype) -> None:
    args = arguments("mhc_boundary", tokens, 64, dtype)
    assert wrong("mhc_boundary", args, mhc_boundary(*args)) == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_ops_one_after_the_other_give_the_same_bits(dtype: torch.dtype) -> None:
    args = arguments("mhc_boundary", 5, 48, dtype)
    streams = torch.ops.dsv4.mhc_post(*args[:4])
    for got, want in zip(mhc_boundary(*args), (streams, *torch.ops.dsv4.mhc_pre(streams, *args[4:])), strict=True):
        assert_bitwise(got, want, strides=True)


def test_op_keeps_its_promises() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        calls = [arguments("mhc_boundary", tokens, 32, dtype) for tokens in (0, 1, 5)]
        check_op(OPS["mhc_boundary"], calls, utilities=dtype is torch.bfloat16)


def test_it_compiles_once_for_every_number_of_tokens() -> None:
    args = arguments("mhc_boundary", 1, 32)

    def step(*tensors: Tensor) -> tuple[Tensor, ...]:
        return mhc_boundary(*tensors, *args[4:])

    compiled = torch.compile(step, backend="inductor", fullgraph=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (4, 9, 33):
            tensors = arguments("mhc_boundary", tokens, 32)[:4]
            for tensor in tensors:
                torch._dynamo.mark_dynamic(tensor, 0)
            for got, want in zip(compiled(*tensors), step(*tensors), strict=True):
                assert_bitwise(got, want)


@pytest.mark.parametrize(("place", "message"), [(1, "mhc_boundary: output"), (4, "mhc_boundary: fn")])
def test_wrong_arguments_raise(place: int, message: str) -> None:
    args = list(arguments("mhc_boundary", 2, 32, torch.float32))
    args[place] = torch.ones(3, 33)
    with pytest.raises(InputError, match=message):
        mhc_boundary(*args)
