"""Not a test: experts of small sizes in every format, and the reference of their results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_compile.reference.common.quant import quantize_mxfp4
from dsv4_compile.reference.moe.expert_weights import interleave_, scale_shape
from dsv4_compile.reference.moe.moe_experts import ExpertsArguments, moe_experts

FORMATS = ("bfloat16", "e4m3", "mxfp4", "interleaved")
E8M0_BYTES = (0, 1, 2, 60, 127, 128, 129, 200, 251, 252, 253, 254, 255)
"""Scales at the ends of the ranges of float32 and of a kernel's fast path, and between them."""
ACCURACY = 3e-3
"""Relative error of all results against float32 on the dequantised weights."""


def weight(kind: str, *shape: int, device: Any = "cpu") -> tuple[Tensor, Tensor | None]:
    """Return a random weight that keeps the magnitude of its inputs, and its scales."""
    values = torch.randn(shape, device=device) * shape[-1] ** -0.5
    if kind == "float32":
        return values, None
    if kind == "bfloat16":
        return values.bfloat16(), None
    if kind == "e4m3":
        packed = (values * 64).to(torch.float8_e4m3fn)
        scale = torch.randint(119, 123, scale_shape(packed), device=device).to(torch.uint8)
        return packed, scale
    packed, byte = quantize_mxfp4(values)
    return packed, byte


def experts(
    tokens: int,
    *,
    kind: str = "bfloat16",
    shared: str = "",
    hidden: int = 128,
    inner: int = 128,
    shared_inner: int = 128,
    count: int = 5,
    top_k: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    device: Any = "cpu",
) -> ExpertsArguments:
    """Return random arguments."""
    form = "mxfp4" if kind == "interleaved" else kind
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    ids = torch.rand(tokens, count, device=device).argsort(1)[:, :top_k].int()
    weights = torch.rand(tokens, top_k, device=device) + 0.2
    w13, w13_scale = weight(form, count, 2 * inner, hidden, device=device)
    w2, w2_scale = weight(form, count, hidden, inner, device=device)
    call = ExpertsArguments(x, ids, weights, w13, w2, w13_scale, w2_scale)
    if kind == "interleaved":
        assert w13_scale is not None and w2_scale is not None
        interleave_(w13, w13_scale)
        interleave_(w2, w2_scale)
        call = call._replace(interleaved=True)
    if shared:
        w13, w13_scale = weight(shared, 2 * shared_inner, hidden, device=device)
        w2, w2_scale = weight(shared, hidden, shared_inner, device=device)
        names = ("shared_w13", "shared_w2", "shared_w13_scale", "shared_w2_scale")
        call = call._replace(**dict(zip(names, (w13, w2, w13_scale, w2_scale), strict=True)))
    return call


def with_scale(call: ExpertsArguments, name: str, byte: int, down: int = 14) -> ExpertsArguments:
    """Return a call with all scales of MXFP4 weight `name`, filled in place, equal to `byte`.

    With a small scale of w13, x is 2^10 times as large, and weights of places with one of w2; x is 2^-down times as
    large with a large scale, and the largest weights are left out at the largest scales, so that sums stay within
    float32. Where large scales of w13 let all hidden states be clamped, x and w13 are positive: a sum near zero would
    be clamped to either limit.
    """
    weight, x, weights = getattr(call, name), call.x, call.weights
    getattr(call, f"{name}_scale").fill_(byte)
    packed = weight & 0xBB if byte in (253, 254) else weight
    if byte >= 100:
        x = x * 2.0**-down
    elif name == "w13":
        x = x * 2.0**10
    else:
        weights = weights * 2.0**10
    if name == "w13" and byte >= 200:
        x, packed = x.abs(), packed & 0x77
    return call._replace(x=x, weights=weights, **{name: packed})


def with_shared_scales(call: ExpertsArguments, form: torch.dtype) -> ExpertsArguments:
    """Return a call with scales of the shared expert in float32, random ones, or as float8_e8m0fnu."""
    first, second = call.shared_w13_scale, call.shared_w2_scale
    assert first is not None and second is not None
    if form is torch.float32:
        first, second = torch.rand(first.shape) / 64, torch.rand(second.shape) / 64
    else:
        first, second = first.view(form), second.view(form)
    return call._replace(shared_w13_scale=first, shared_w2_scale=second)


def beside_a_large_element(call: ExpertsArguments) -> ExpertsArguments:
    """Return a call with 4000 as element 5 of each token, after its MXFP4 weights in w13 are set to zero."""
    x = call.x.clone()
    x[:, 5] = 4000.0
    call.w13.view(torch.uint8)[:, :, 2] &= 0x0F
    return call._replace(x=x)


def with_nan_scales(call: ExpertsArguments) -> ExpertsArguments:
    """Return a call of positive tokens, after its MXFP4 weights in w13 are set to one and their scales to NaN."""
    assert call.w13_scale is not None
    call.w13.fill_(0x22)
    call.w13_scale.fill_(255)
    return call._replace(x=call.x.abs())


def places_by_expert(ids: Tensor, first: int, count: int) -> dict[int, list[int]]:
    """Return the places of each of `count` experts from id `first` on that has any, in their order."""
    local = (ids.long() - first).tolist()
    return {e: [p for p, expert in enumerate(local) if expert == e] for e in range(count) if e in local}


def exact(call: ExpertsArguments) -> Tensor:
    """Return what the reference gives in float32."""
    return moe_experts(call._replace(x=call.x.float()))


def error(got: Tensor, want: Tensor) -> float:
    """Return the relative error of all elements together."""
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))


def assert_accurate(got: Tensor, call: ExpertsArguments) -> None:
    """Fail unless `got` is the result of `call` within `ACCURACY`, as a whole and for each token about."""
    want = exact(call)
    assert (got.dtype, got.shape, got.is_contiguous()) == (call.x.dtype, call.x.shape, True)
    assert torch.equal(got.isnan(), want.isnan())
    got, want = got.double().nan_to_num(), want.double().nan_to_num()
    assert error(got, want) <= ACCURACY
    # A token's own error, which a large batch would hide.
    worst = (got - want).norm(dim=1) - 3 * ACCURACY * want.norm(dim=1)
    assert not len(worst) or worst.max() <= 1e-6 * want.norm(), "a token is wrong"
