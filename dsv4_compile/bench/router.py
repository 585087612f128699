"""Scenario `router`: `moe_route` of V4-Flash and V4-Pro, by bias and by hash.

Random data. The gate is colder than its input: with cold times, every call reads a new one. `transformers` is the code
of that library, with logits rounded to the dtype of the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.common.define import REFERENCES
from ..selection import costs
from ..testing.opcheck import describe
from .problem import Args, Only, Problem, deepseek_v4, implementations, keep

OP = "moe_route"
TOKENS = {"cuda": (1, 8, 32, 128, 512, 4096), "cpu": (1, 8)}
TYPICAL_TOKENS = 128
COLUMNS = ("model", "routing", "gate", "tokens", "impl")
VOCAB = 129280
DISTINCT = 1e-4
"""Least difference, relative to a score, of the keys of the choice for every implementation to choose alike."""

TRANSFORMERS = "transformers"
OTHERS, ROUNDED = 0.15, 2.0**-6
"""Share of tokens that may get other experts where logits are rounded to bfloat16, and relative error of a weight."""


class Router(NamedTuple):
    """Sizes of a model's router."""

    experts: int
    hidden: int
    top_k: int
    scale: float


MODELS: Mapping[str, Router] = {"Flash": Router(256, 4096, 6, 1.5), "Pro": Router(384, 7168, 6, 2.5)}
GATES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def arguments(model: Router, routing: str, gate: str, tokens: int, device: torch.device, seed: int) -> Args:
    """Return the arguments of `moe_route`."""
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    x = randn(tokens, model.hidden).bfloat16()
    weight = (randn(model.experts, model.hidden) * model.hidden**-0.5).to(GATES[gate])
    if routing == "bias":
        return x, weight, randn(model.experts) * 0.05, None, None, model.top_k, model.scale
    ids = torch.randint(VOCAB, (tokens,), device=device, generator=generator)
    table = torch.randint(model.experts, (VOCAB, model.top_k), device=device, generator=generator)
    return x, weight, None, ids, table, model.top_k, model.scale


def cost(model: Router, routing: str, gate: str, tokens: int) -> costs.Cost:
    """Return the cost of any implementation."""
    of = costs.of(OP, T=tokens, D=model.hidden, N=model.experts, K=model.top_k)
    more = model.experts * model.hidden * (GATES[gate].itemsize - 2)
    if routing == "hash":
        more += tokens * 8 * (1 + model.top_k) - 4 * model.experts
    return costs.Cost(of.bytes + more, of.flops)


def differs(got: Sequence[Tensor], want: Sequence[Tensor]) -> str:
    """Return why a routing disagrees with the reference, or "". Scores that nearly tie may be chosen in any order."""
    kinds = [list(map(describe, results)) for results in (got, want)]
    if kinds[0] != kinds[1]:
        return f"the results are {kinds[0]}, the reference gives {kinds[1]}"
    others = int((got[0].sort(1).values != want[0].sort(1).values).any(1).sum())
    if others > 1 + DISTINCT * 100 * len(got[0]):
        return f"{others} of {len(got[0])} tokens have other experts"
    same = (got[0] == want[0]).all(1)
    wrong = int((~((got[1] - want[1]).abs() <= 1e-4 * want[1].abs()))[same].sum())
    return f"{wrong} weights are wrong" if wrong else ""


def differs_rounded(got: Sequence[Tensor], want: Sequence[Tensor]) -> str:
    """Return why a routing in the dtype of the gate disagrees with the reference, or ""; the order is free."""
    (ids, order), (expected, by_id) = (results[0].long().sort(1) for results in (got, want))
    same = (ids == expected).all(1)
    others = int((~same).sum())
    if others > 1 + OTHERS * len(ids):
        return f"{others} of {len(ids)} tokens have other experts"
    weights, right = got[1].float().gather(1, order), want[1].gather(1, by_id)
    wrong = int((~((weights - right).abs() <= ROUNDED * right.abs()))[same].sum())
    return f"{wrong} weights are wrong" if wrong else ""


def _transformers() -> Callable[..., Any]:
    """Return the routing as transformers' modules compute it: ids and weights, as they are there."""
    hf = deepseek_v4()
    score = hf.ACT2FN["sqrtsoftplus"]

    def call(
        x: Tensor, weight: Tensor, bias: Any, tokens: Any, table: Any, top_k: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        module = SimpleNamespace(
            top_k=top_k, hidden_dim=x.shape[1], weight=weight, score_fn=score, routed_scaling_factor=scale,
            e_score_correction_bias=bias, tid2eid=table,
        )  # fmt: skip
        if table is None:
            _, weights, ids = hf.DeepseekV4TopKRouter.forward(module, x)
        else:
            _, weights, ids = hf.DeepseekV4HashRouter.forward(module, x, tokens)
        return ids, weights

    return call


def _one_dtype(args: Args) -> Args:
    """Return `args` with x in the dtype of the gate, as in a model that has one dtype."""
    return args[0].to(args[1].dtype), *args[1:]


def problems(
    device: torch.device,
    only: Only,
    models: Mapping[str, Router] | None = None,
    tokens: Sequence[int] | None = None,
) -> Iterator[Problem]:
    """Yield the routers of both models, or of other ones, at every size."""
    for name, model in (models or MODELS).items():
        for routing, gate in (("bias", "bfloat16"), ("bias", "float32"), ("hash", "bfloat16")):
            params = {"model": name, "routing": routing, "gate": gate}
            sizes = [t for t in tokens or TOKENS[device.type] if keep(only, tokens=t)]
            if not sizes or not keep(only, **params):
                continue
            dynamic = (0,) if routing == "bias" else (0, 3)
            typical = partial(arguments, model, routing, gate, TYPICAL_TOKENS, device, 0)
            ways = {**implementations(OP, typical, dynamic), TRANSFORMERS: _transformers}
            for size in sizes:
                yield Problem(
                    op=OP,
                    params={**params, "tokens": size},
                    make=partial(arguments, model, routing, gate, size, device),
                    written=(),
                    cost=cost(model, routing, gate, size),
                    reference=REFERENCES[OP],
                    implementations=ways,
                    published={},
                    differs=differs,
                    arrange={TRANSFORMERS: _one_dtype},
                    differs_of={TRANSFORMERS: differs_rounded},
                )
