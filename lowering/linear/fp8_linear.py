"""Inductor IR for the quantisation in `fp8_linear`: one kernel over [T, K / 128 | 128], in front of the product.

So what computes the input is part of the kernel that quantises it, and an input that nobody else reads is never stored.
The product is `fp8_grouped_einsum`, opaque to Inductor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..._compat import fallback_handler, ir, lowerings, ops
from ...layout import ACT_AMAX_FLOOR, ACT_TILE
from ...ops.common.define import OPS
from ...selection.decisions import Call, Decision
from ..conditions import backend_lacks, decision
from ..ir.common import E4M3, F32, Expr, Value, const, load_f32, row_amax, static
from ..ir.paging import Store, scatter, strided_view, uninitialized
from ..ir.quant import to_e4m3, ue8m0_byte, ue8m0_inverse, ue8m0_scale
from ..registry import lowers


def can_lower(call: Call) -> Decision:
    """IR on Triton for rows of whole strips that are quantised, in bfloat16 and without a second layer."""
    x, why_not = call.arguments["x"], backend_lacks(call, fp8=True)
    if not why_not and call.codegen == "cpp":
        why_not = "the C++ backend converts to e4m3 one element at a time"
    if not why_not and not call.arguments["quantize_input"]:
        why_not = "the input is not quantised, so that only a product is left"
    if not why_not and (x.dim() != 2 or x.dtype is not torch.bfloat16 or call.arguments["beside"] is not None):
        why_not = "lowered for bfloat16 [T, K] and a single weight"
    if not why_not and not (static(x.shape[1]) and x.shape[1] and x.shape[1] % ACT_TILE == 0):
        why_not = f"the rows of x do not divide into strips of {ACT_TILE}"
    return decision(call, why_not)


def yields(_: Call) -> str:
    """Say why times of the op alone do not decide: they leave out fusion."""
    return "IR quantises in a kernel in front of the product, the kernel within it where that is faster"


@lowers("fp8_linear", can_lower, yields)
def lower(x: Any, weight: Any, weight_scale: Any, quantize_input: bool = True, beside: Any | None = None) -> Any:
    """Build the IR."""
    tokens, size = x.get_size()
    size, device = int(size), x.get_device()
    strips = size // ACT_TILE
    # Read for the maximum and again to be quantised: a long producer is better computed before.
    x.mark_reuse(2)
    load = load_f32(x)

    def element(index: Sequence[Expr], d: Expr) -> Value:
        t, strip = index
        return load([t, strip * ACT_TILE + d])

    load_amax = row_amax(element, device, [tokens, strips], ACT_TILE)

    def byte(index: Sequence[Expr]) -> Value:
        return ue8m0_byte(ops.maximum(load_amax(index), const(ACT_AMAX_FLOOR)))

    values = ir.Pointwise.create(
        device=device,
        dtype=E4M3,
        inner_fn=lambda index: to_e4m3(ops.mul(element(index[:2], index[2]), ue8m0_inverse(byte(index[:2])))),
        ranges=[tokens, strips, ACT_TILE],
    )
    values = strided_view(values, [tokens, 1, size], [size, size, 1])
    # Scales of neighbouring tokens lie side by side, as a product of many tokens reads them.
    scale = uninitialized([strips, tokens], F32, device)
    scatter(scale, [tokens, strips], [Store(None, lambda index: index[::-1], lambda index: ue8m0_scale(byte(index)))])
    scale = strided_view(scale, [tokens, 1, strips], [1, 1, tokens])
    product = fallback_handler(OPS["fp8_grouped_einsum"], add_to_fallback_set=False)
    return lowerings[torch.ops.aten.squeeze.dim](product(values, scale, weight, weight_scale), 1)
