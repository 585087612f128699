"""IR of `moe_route_images` on a GPU against the reference there: text and image tokens, a temperature."""

from __future__ import annotations

from typing import Any

import torch

from dsv4_compile.ops.common.define import REFERENCES
from tests.gpu.lowered import as_ir

OP, EXPERTS, HIDDEN = "moe_route_images", 384, 1280
SIZES = (7, 64, 513)


def route(op: Any, x: Any, gate: Any, bias: Any, image_bias: Any, is_image: Any) -> Any:
    return op(x, gate, bias, image_bias, is_image, 6, 1.5, 0.5)


@torch.inference_mode()
def test_choice_and_weights_are_those_of_the_op() -> None:
    compiled = as_ir(OP, route)
    gate = torch.randn(EXPERTS, HIDDEN, device="cuda") * 0.03
    bias, image_bias = torch.randn(2, EXPERTS, device="cuda") * 0.05
    for tokens in (*SIZES, 1):
        x, is_image = torch.randn(tokens, HIDDEN, device="cuda"), torch.arange(tokens, device="cuda") % 3 == 1
        if tokens > 1:
            for tensor in (x, is_image):
                torch._dynamo.mark_dynamic(tensor, 0)
        got = compiled(x, gate, bias, image_bias, is_image)
        want = route(REFERENCES[OP], x, gate, bias, image_bias, is_image)
        # Scores that differ by less than a rounding may be chosen in either order.
        assert (got[0] == want[0]).float().mean() > 0.999, f"{tokens} tokens"
        torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-6)
