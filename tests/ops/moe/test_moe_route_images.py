"""`moe_route_images` against `moe_route`, and its temperature and image bias against scalars."""

from __future__ import annotations

import math

import pytest
import torch

from dsv4_compile.errors import InputError
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.testing import check_op
from dsv4_compile.testing.samples import op_samples

route, images = torch.ops.dsv4.moe_route, torch.ops.dsv4.moe_route_images


def test_each_token_is_routed_with_its_bias() -> None:
    x, gate, bias, image_bias, image, top_k, scale, _ = op_samples("moe_route_images")[0]
    ids, weights = images(x, gate, bias, image_bias, image, top_k, scale)
    for chosen, own_bias in ((~image, bias), (image, image_bias)):
        want_ids, want_weights = route(x[chosen], gate, own_bias, None, None, top_k, scale)
        assert torch.equal(ids[chosen], want_ids)
        torch.testing.assert_close(weights[chosen], want_weights)
    assert not torch.equal(images(x, gate, bias, bias, image, top_k, scale)[0], ids)


def test_logits_are_divided_by_the_temperature() -> None:
    x, gate, bias, image_bias, image, top_k, scale, temperature = op_samples("moe_route_images")[0]
    ids, weights = images(x, gate, 0 * bias, 0 * image_bias, image, top_k, scale, temperature)
    for token, (row, shares) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        logits = (gate.double() @ x[token].double() / temperature).tolist()
        scores = {expert: math.sqrt(math.log1p(math.exp(logit))) for expert, logit in enumerate(logits)}
        assert row == sorted(scores, key=lambda expert: -scores[expert])[:top_k]
        total = sum(scores[expert] for expert in row)
        assert shares == pytest.approx([scale * scores[expert] / total for expert in row], rel=1e-3)


def test_op_keeps_its_promises() -> None:
    check_op(OPS["moe_route_images"], op_samples("moe_route_images")[1:])


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [(3, torch.ones(5), "image_bias has"), (4, torch.ones(2, dtype=torch.bool), "is_image has"), (7, 0.0, "above 0")],
)
def test_wrong_arguments_raise(place: int, value: object, message: str) -> None:
    args = list(op_samples("moe_route_images")[0])
    args[place] = value
    with pytest.raises(InputError, match=message):
        images(*args)
