"""Scenario `mhc`: boundaries of hyper-connections, their begin and their end, of V4-Flash and V4-Pro.

Random data. `transformers` is the code of that library, op by op; its mix of the streams rounds coefficients and sums.
Cold, every call reads other streams and weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..config import DeepseekV4Config
from ..ops.common.define import REFERENCES
from ..selection import costs
from .problem import Args, Only, Prepare, Problem, deepseek_v4, implementations, keep

TOKENS = {"cuda": (1, 8, 32, 128, 512, 2048, 16384), "cpu": (1, 8)}
TYPICAL_TOKENS = 128
COLUMNS = ("op", "model", "tokens", "impl")
MODELS: Mapping[str, int] = {"Flash": DeepseekV4Config.flash().hidden_size, "Pro": DeepseekV4Config.pro().hidden_size}
"""Channels of a stream, by model."""
STREAMS, EPS, ITERATIONS = 4, 1e-6, 20
TRANSFORMERS = "transformers"
OPS = ("mhc_boundary", "mhc_pre", "mhc_head")
TOLERANCE = 1e-2
"""Largest relative error of a result: coefficients that are rounded to bfloat16 are off by 2^-9, and sums of them."""


def arguments(op: str, dim: int, tokens: int, device: torch.device, seed: int) -> Args:
    """Return the arguments of `op` for streams of `dim` channels."""
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    head = op == "mhc_head"
    rows = STREAMS if head else (STREAMS + 2) * STREAMS
    streams, output = randn(tokens, STREAMS, dim).bfloat16(), randn(tokens, dim).bfloat16()
    fn = randn(rows, STREAMS * dim) * (STREAMS * dim) ** -0.5
    mix = fn, randn(rows), randn(1 if head else 3), 1 + randn(dim) / 8, EPS, EPS
    if head:
        return streams, *mix
    if op == "mhc_pre":
        return streams, *mix, ITERATIONS
    post, comb = 2 * torch.sigmoid(randn(tokens, STREAMS)), torch.softmax(randn(tokens, STREAMS, STREAMS), 1)
    return streams, output, post, comb, *mix, ITERATIONS


def differs(got: Sequence[Tensor], want: Sequence[Tensor]) -> str:
    """Return why results disagree with the reference's, or ""."""
    for index, (actual, expected) in enumerate(zip(got, want, strict=True)):
        if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
            kinds = [f"{x.dtype} {tuple(x.shape)}" for x in (actual, expected)]
            return f"result {index} is {kinds[0]}, the reference gives {kinds[1]}"
        error = float((actual.float() - expected.float()).norm() / expected.float().norm())
        # Negated, so that NaN is wrong.
        if not error <= TOLERANCE:
            return f"result {index} has a relative error of {error:.2g}"
    return ""


def problems(
    device: torch.device,
    only: Only,
    models: Mapping[str, int] | None = None,
    tokens: Sequence[int] | None = None,
) -> Iterator[Problem]:
    """Yield every op for both models, or for other ones, at every size."""
    for model, dim in (models or MODELS).items():
        for op in OPS:
            sizes = [t for t in tokens or TOKENS[device.type] if keep(only, tokens=t)]
            if not sizes or not keep(only, op=op, model=model):
                continue
            ways: dict[str, Prepare] = {
                **implementations(op, partial(arguments, op, dim, TYPICAL_TOKENS, device, 0), _dynamic(op)),
                TRANSFORMERS: partial(_transformers, op),
            }
            for size in sizes:
                yield Problem(
                    op=op,
                    params={"model": model, "tokens": size},
                    make=partial(arguments, op, dim, size, device),
                    written=(),
                    cost=costs.of(op, T=size, G=STREAMS, D=dim),
                    reference=REFERENCES[op],
                    implementations=ways,
                    published={},
                    differs=differs,
                )


def _dynamic(op: str) -> tuple[int, ...]:
    return (0, 1, 2, 3) if op == "mhc_boundary" else (0,)


def _transformers(op: str) -> Callable[..., Any]:
    """Return `op` as transformers' modules compute it."""
    hf = deepseek_v4()

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed: Tensor = hf.DeepseekV4RMSNorm.forward(SimpleNamespace(weight=weight, variance_epsilon=eps), x)
        return normed.to(x.dtype)[0]

    def pre(
        streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, weight: Tensor, eps: float, hc_eps: float, steps: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        module = SimpleNamespace(
            hc_mult=STREAMS, hc_sinkhorn_iters=steps, hc_eps=hc_eps, fn=fn, base=base, scale=scale,
            input_norm=hf.DeepseekV4UnweightedRMSNorm(eps),
        )  # fmt: skip
        post, comb, collapsed = hf.DeepseekV4HyperConnection.forward(module, streams[None])
        return norm(collapsed, weight, eps), post[0], comb[0]

    def boundary(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor, *mix: Any) -> tuple[Tensor, ...]:
        dtype = streams.dtype
        mixed = torch.matmul(comb.to(dtype).transpose(-1, -2), streams)
        streams = post.to(dtype).unsqueeze(-1) * output.unsqueeze(-2) + mixed
        return streams, *pre(streams, *mix)

    def head(
        streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, weight: Tensor, eps: float, hc_eps: float
    ) -> Tensor:
        module = SimpleNamespace(
            eps=hc_eps, hc_fn=fn, hc_base=base, hc_scale=scale, input_norm=hf.DeepseekV4UnweightedRMSNorm(eps)
        )
        return norm(hf.DeepseekV4HyperHead.forward(module, streams[None]), weight, eps)

    ways: dict[str, Callable[..., Any]] = {"mhc_pre": pre, "mhc_boundary": boundary, "mhc_head": head}
    return ways[op]
