"""A block-scaled linear layer on a CPU: its reference, row by row where rows must not depend on each other."""

from __future__ import annotations

from torch import Tensor

from ...reference.linear import fp8_linear as reference
from ..common.invariant import alone, is_required


def fp8_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, quantize_input: bool = True, beside: Tensor | None = None
) -> Tensor:
    """Compute the op of this name as its reference does."""
    if not is_required():
        return reference.fp8_linear(x, weight, weight_scale, quantize_input, beside)
    rows = x.reshape(-1, x.shape[-1])
    arguments = rows, weight, weight_scale, quantize_input, beside
    product: Tensor = alone(reference.fp8_linear, arguments, (0,), rows.shape[0])
    return product.view(*x.shape[:-1], product.shape[1])
