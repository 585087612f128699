"""`engram_gate` against the formula in float64; image tokens and zero streams."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile.errors import InputError
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.testing import assert_bitwise, check_op
from dsv4_compile.testing.samples import op_samples

gate_of = torch.ops.dsv4.engram_gate


@pytest.mark.parametrize("number", [0, 1])
def test_streams_take_the_value_by_their_gates(number: int) -> None:
    streams, keys_value, q_weight, k_weight, image, eps = op_samples("engram_gate")[number]
    result, dim = gate_of(streams, keys_value, q_weight, k_weight, image, eps), streams.shape[2]
    for token in range(len(streams)):
        value = keys_value[token, 4 * dim :].double()
        for n in range(4):
            x, key = streams[token, n].double(), keys_value[token, n * dim : (n + 1) * dim].double()
            q = x / (x.square().mean() + eps).sqrt() * q_weight[n].double()
            k = key / (key.square().mean() + eps).sqrt() * k_weight[n].double()
            dot = (q @ k) / dim**0.5
            gate = (
                torch.sigmoid(dot.sign() * dot.abs().clamp_min(1e-6).sqrt())
                if dot != 0
                else torch.sigmoid(torch.tensor(1e-3))
            )
            want = x if image[token] else x + gate * value
            tolerance = 2.0**-7 if streams.dtype is torch.bfloat16 else 1e-4
            torch.testing.assert_close(result[token, n].double(), want.double(), rtol=tolerance, atol=tolerance)


def test_image_tokens_stay_as_they_are() -> None:
    streams, keys_value, *weights, image, eps = op_samples("engram_gate")[0]
    result = gate_of(streams, keys_value, *weights, image, eps)
    assert_bitwise(result[image], streams[image])


def test_op_keeps_its_promises() -> None:
    check_op(OPS["engram_gate"], op_samples("engram_gate")[1:])


def test_wrong_arguments_raise() -> None:
    streams, keys_value, *rest = op_samples("engram_gate")[0]
    with pytest.raises(InputError, match="a key for each stream and a value"):
        gate_of(streams, keys_value[:, :-1], *rest)
