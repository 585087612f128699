"""`mhc_collapse` against the same sum in float64, and together with `mhc_mixes` against `mhc_pre`."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile.errors import InputError
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.testing import check_op
from dsv4_compile.testing.samples import op_samples

collapse = torch.ops.dsv4.mhc_collapse


def test_streams_are_summed_by_their_weights_and_normed() -> None:
    streams, pre, weight, eps = op_samples("mhc_collapse")[1]
    mixed = (pre.double()[..., None] * streams.double()).sum(1)
    want = mixed / (mixed.square().mean(1, keepdim=True) + eps).sqrt() * weight.double()
    torch.testing.assert_close(collapse(streams, pre, weight, eps).double(), want, rtol=1e-4, atol=1e-5)
    assert collapse(streams, pre, weight, eps)[2].abs().max() == 0, "a row of zeros stays zero with an eps of 1e-20"


def test_with_its_own_weights_it_is_the_input_of_mhc_pre() -> None:
    streams, fn, base, scale, eps, hc_eps = op_samples("mhc_mixes")[0]
    weight = op_samples("mhc_collapse")[0][2]
    pre = torch.ops.dsv4.mhc_mixes(streams, fn, base, scale, eps, hc_eps)[0]
    want = torch.ops.dsv4.mhc_pre(streams, fn, base, scale, weight, eps, hc_eps)[0]
    torch.testing.assert_close(collapse(streams, pre, weight, eps), want)


def test_one_hot_weights_take_one_stream() -> None:
    streams, _, weight, eps = op_samples("mhc_collapse")[1]
    one_hot = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(len(streams), 4)
    want = collapse(streams[:, :1], torch.ones(len(streams), 1), weight, eps)
    torch.testing.assert_close(collapse(streams, one_hot, weight, eps), want)


def test_op_keeps_its_promises() -> None:
    streams, pre, *rest = op_samples("mhc_collapse")[0]
    check_op(OPS["mhc_collapse"], [(streams[:tokens], pre[:tokens], *rest) for tokens in (0, 1, 5)])


def test_wrong_arguments_raise() -> None:
    streams, pre, weight, eps = op_samples("mhc_collapse")[0]
    with pytest.raises(InputError, match="weight for each stream"):
        collapse(streams, pre[:, :3], weight, eps)
