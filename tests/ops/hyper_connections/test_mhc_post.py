"""`mhc_post` against a sum by hand and against transformers' decoder layer."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile.errors import InputError
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.ops.hyper_connections.mhc_post import mhc_post
from dsv4_compile.testing import check_op
from tests.kernels.hyper_connections.calls import arguments


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_comb_is_summed_over_its_first_stream(tokens: int, dtype: torch.dtype) -> None:
    streams, output, post, comb = arguments("mhc_boundary", tokens, 32, dtype)[:4]
    got = mhc_post(streams, output, post, comb)
    x, z = streams.double(), output.double()
    for k in range(4):
        want = post[:, k, None].double() * z
        for j in range(4):
            want += comb[:, j, k, None].double() * x[:, j]
        torch.testing.assert_close(
            got[:, k].double(), want, rtol=2.0**-8 if dtype is torch.bfloat16 else 1e-5, atol=1e-6
        )


def test_it_is_the_sum_that_transformers_writes_out() -> None:
    streams, output, post, comb = arguments("mhc_boundary", 5, 32, torch.float32)[:4]
    want = post.unsqueeze(-1) * output.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), streams)
    torch.testing.assert_close(mhc_post(streams, output, post, comb), want, rtol=1e-5, atol=1e-5)


def test_op_keeps_its_promises() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        calls = [arguments("mhc_boundary", tokens, 32, dtype)[:4] for tokens in (0, 1, 5)]
        check_op(OPS["mhc_post"], calls, utilities=dtype is torch.bfloat16)


@pytest.mark.parametrize(
    ("place", "shape", "message"),
    [(1, (3, 32), "same tokens"), (1, (2, 31), "last dim"), (2, (2, 3), "post has"), (3, (2, 4, 3), "comb has")],
)
def test_wrong_arguments_raise(place: int, shape: tuple[int, ...], message: str) -> None:
    args = list(arguments("mhc_boundary", 2, 32, torch.float32)[:4])
    args[place] = torch.ones(shape)
    with pytest.raises(InputError, match=message):
        mhc_post(*args)
