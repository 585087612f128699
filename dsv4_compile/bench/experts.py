"""Scenario `experts`: `moe_experts` of V4-Flash and V4-Pro in every format, with the shared expert and without.

Random weights and uniform routing. A cold call reads other weights than the last: a layer's experts exceed any cache,
so argument sets in turn are two. Peers of the routed experts are in `expert_peers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.common.define import REFERENCES
from ..reference.moe.expert_weights import scale_shape
from ..selection import call_costs, costs
from . import expert_peers
from .problem import Args, Only, Problem, implementations, keep

OP = "moe_experts"
TOKENS = {"cuda": (1, 8, 32, 128, 512, 2048, 4096, 16384), "cpu": (1,)}
TYPICAL_TOKENS = 8
COLUMNS = ("model", "weights", "shared", "tokens", "impl")
TOLERANCE = 3e-3
"""Relative error of all results together."""


class Experts(NamedTuple):
    """Sizes of a model's experts."""

    experts: int
    hidden: int
    inner: int
    top_k: int


MODELS: Mapping[str, Experts] = {"Flash": Experts(256, 4096, 2048, 6), "Pro": Experts(384, 7168, 3072, 6)}
FORMATS = ("interleaved", "mxfp4", "e4m3", "bfloat16")
SHARED = {"none": "", "e4m3": "e4m3", "bfloat16": "bfloat16"}


def weight(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """Return a random weight in a format, and its scales."""
    device = generator.device
    if kind == "bfloat16":
        values = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return values.normal_(0, shape[-1] ** -0.5, generator=generator), None
    columns = shape[-1] // (1 if kind == "e4m3" else 2)
    size = (*shape[:-1], columns)
    packed = torch.randint(256, size, dtype=torch.uint8, device=device, generator=generator)
    if kind == "e4m3":
        # Without the two codes of NaN.
        packed = (packed & 0xB7).view(torch.float8_e4m3fn)
    scales = torch.randint(117, 121, scale_shape(packed), dtype=torch.uint8, device=device, generator=generator)
    return packed, scales


def routes(model: Experts, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the ids int32 and weights float32 `[T, K]` of uniform routing."""
    device = generator.device
    ids = torch.rand(tokens, model.experts, device=device, generator=generator).argsort(1)[:, : model.top_k].int()
    return ids.contiguous(), torch.rand(tokens, model.top_k, device=device, generator=generator)


def arguments(model: Experts, kind: str, shared: str, tokens: int, device: torch.device, seed: int) -> Args:
    """Return the arguments of `moe_experts`; random bytes are weights in either order."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(tokens, model.hidden, device=device, generator=generator).bfloat16()
    ids, weights = routes(model, tokens, generator)
    form = "mxfp4" if kind == "interleaved" else kind
    w13, w13_scale = weight(form, (model.experts, 2 * model.inner, model.hidden), generator)
    w2, w2_scale = weight(form, (model.experts, model.hidden, model.inner), generator)
    both: list[Tensor | None] = [None] * 4
    if shared != "none":
        one, one_scale = weight(shared, (2 * model.inner, model.hidden), generator)
        two, two_scale = weight(shared, (model.hidden, model.inner), generator)
        both = [one, two, one_scale, two_scale]
    return x, ids, weights, w13, w2, w13_scale, w2_scale, *both, 10.0, 0, kind == "interleaved"


def cost(model: Experts, kind: str, shared: str, tokens: int) -> costs.Cost:
    """Return the cost of any implementation: the weights of as many experts as uniform routing touches."""
    form = "mxfp4" if kind == "interleaved" else kind
    touched = model.experts * (1 - (1 - model.top_k / model.experts) ** tokens)
    with torch.device("meta"):
        shapes = {
            "w13": (model.experts, 2 * model.inner, model.hidden),
            "w2": (model.experts, model.hidden, model.inner),
        }
        call = {"x": torch.empty(tokens, model.hidden, dtype=torch.bfloat16)}
        call |= {"ids": torch.empty(tokens, model.top_k, dtype=torch.int32)}
        call |= {name: value for name, shape in shapes.items() for name, value in _meta(name, form, shape)}
        if shared != "none":
            parts = {f"shared_{name}": shape[1:] for name, shape in shapes.items()}
            call |= {name: value for name, shape in parts.items() for name, value in _meta(name, shared, shape)}
    full = call_costs.of(OP, call)
    assert full is not None
    weights = sum(call[name].numel() * call[name].element_size() for name in call if name.startswith("w"))
    unread = min(model.experts, tokens * model.top_k) - touched
    return costs.Cost(int(full.bytes - weights / model.experts * unread), full.flops)


def _meta(name: str, kind: str, shape: tuple[int, ...]) -> list[tuple[str, Tensor]]:
    """Return a weight and its scales by name, without memory."""
    if kind == "bfloat16":
        return [(name, torch.empty(shape, dtype=torch.bfloat16))]
    dtype = torch.float8_e4m3fn if kind == "e4m3" else torch.uint8
    packed = torch.empty((*shape[:-1], shape[-1] // (1 if kind == "e4m3" else 2)), dtype=dtype)
    return [(name, packed), (f"{name}_scale", torch.empty(scale_shape(packed), dtype=torch.uint8))]


def differs(got: Sequence[Tensor], want: Sequence[Tensor]) -> str:
    """Return why experts disagree with the reference, or ""."""
    kinds = [(x[0].dtype, tuple(x[0].shape), x[0].stride()) for x in (got, want)]
    if kinds[0] != kinds[1]:
        return f"the result is {kinds[0]}, the reference gives {kinds[1]}"
    error = float((got[0].double() - want[0].double()).norm() / want[0].double().norm())
    # Both are rounded to bfloat16; negated, so that NaN is wrong.
    return "" if error <= 2 * TOLERANCE else f"the relative error is {error:.1e}"


def problems(
    device: torch.device,
    only: Only,
    models: Mapping[str, Experts] | None = None,
    tokens: Sequence[int] | None = None,
) -> Iterator[Problem]:
    """Yield the experts of both models, or of other ones, in every format at every size."""
    for name, model in (models or MODELS).items():
        for kind in FORMATS:
            for shared in SHARED:
                params = {"model": name, "weights": kind, "shared": shared}
                sizes = [t for t in tokens or TOKENS[device.type] if keep(only, tokens=t)]
                if not sizes or not keep(only, **params):
                    continue
                typical = partial(arguments, model, kind, shared, TYPICAL_TOKENS, device, 0)
                usual = implementations(OP, typical, (0, 1, 2))
                ways = {way: usual[way] for way in ("eager", "triton") + (("ir",) if kind == "bfloat16" else ())}
                ways |= expert_peers.peers(kind, shared)
                for size in sizes:
                    yield Problem(
                        op=OP,
                        params={**params, "tokens": size},
                        make=partial(arguments, model, kind, shared, size, device),
                        written=(),
                        cost=cost(model, kind, shared, size),
                        reference=REFERENCES[OP],
                        implementations=ways,
                        published={},
                        differs=differs,
                        arrange=expert_peers.arrange(),
                        uncaptured=expert_peers.UNCAPTURED,
                    )
