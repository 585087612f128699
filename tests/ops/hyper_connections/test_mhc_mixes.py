"""`mhc_mixes` against `mhc_pre`, whose coefficients it computes, and at the eps of DeepSeek-V4.1."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile.errors import InputError
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.testing import check_op
from dsv4_compile.testing.samples import op_samples

mixes = torch.ops.dsv4.mhc_mixes


@pytest.mark.parametrize("number", [0, 1])
def test_coefficients_are_those_of_mhc_pre(number: int) -> None:
    streams, fn, base, scale, norm_eps, hc_eps, *iterations = op_samples("mhc_mixes")[number]
    ones = torch.ones(streams.shape[2])
    pre, post, comb = mixes(streams, fn, base, scale, norm_eps, hc_eps, *iterations)
    _, want_post, want_comb = torch.ops.dsv4.mhc_pre(streams, fn, base, scale, ones, norm_eps, hc_eps, *iterations)
    torch.testing.assert_close(post, want_post)
    torch.testing.assert_close(comb, want_comb)
    flat = streams.double().flatten(1)
    mix = flat @ fn.double().t() / (flat.square().mean(1, keepdim=True) + norm_eps).sqrt()
    want = torch.sigmoid(mix * scale[0].double() + base.double())[:, : streams.shape[1]] + hc_eps
    torch.testing.assert_close(pre.double(), want, rtol=1e-4, atol=1e-5)


def test_columns_of_comb_sum_to_one_less_the_eps() -> None:
    comb = mixes(*op_samples("mhc_mixes")[0])[2]
    torch.testing.assert_close(comb.sum(1), torch.full((len(comb), 4), 1 - 1e-6), rtol=0, atol=5e-7)


def test_the_statistic_has_the_eps_it_is_given() -> None:
    """Streams of 1e-8 lose their norm with 1e-6, and keep it with 1e-20; streams of zeros give the base."""
    streams, fn, base, scale, _, hc_eps = op_samples("mhc_mixes")[0]
    streams = streams.float()
    small, large = mixes(1e-8 * streams, fn, base, scale, 1e-20, hc_eps), mixes(streams, fn, base, scale, 0.0, hc_eps)
    for got, want in zip(small, large, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    pre = mixes(0 * streams, fn, base, scale, 1e-20, hc_eps)[0]
    torch.testing.assert_close(pre, (torch.sigmoid(base[:4]) + hc_eps).expand_as(pre))


def test_op_keeps_its_promises() -> None:
    first = op_samples("mhc_mixes")[0]
    check_op(OPS["mhc_mixes"], [(first[0][:tokens], *first[1:]) for tokens in (0, 1, 5)])


@pytest.mark.parametrize(
    ("place", "value", "message"), [(1, torch.ones(23, 320), "fn has a row"), (2, torch.ones(20), "base")]
)
def test_wrong_arguments_raise(place: int, value: torch.Tensor, message: str) -> None:
    args = list(op_samples("mhc_mixes")[0])
    args[place] = value
    with pytest.raises(InputError, match=message):
        mixes(*args)
