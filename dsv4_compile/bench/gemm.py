"""Scenario `gemm`: the block-scaled and the grouped linear layers of V4-Flash and V4-Pro.

Random data: normal weights in e4m3, differing block scales, normal activations. `scaled_mm` is torch's block-scaled
GEMM after a compiled quantisation; `bmm` is plain PyTorch for `grouped_linear`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import layout
from ..config import DeepseekV4Config
from ..ops.common.define import REFERENCES
from ..reference.attention.inv_rope import scale_strides, value_strides
from ..reference.common.block_scale import dequantize_activation, quantize_activation, scale_value
from ..selection import costs
from .problem import Args, Only, Prepare, Problem, Unavailable, compiled, implementations, keep

TOKENS = {"cuda": (1, 8, 32, 64, 128, 512, 4096, 16384), "cpu": (1, 8)}
TYPICAL_TOKENS = 128
COLUMNS = ("op", "layer", "model", "tokens", "impl")
MODELS: Mapping[str, DeepseekV4Config] = {"Flash": DeepseekV4Config.flash(), "Pro": DeepseekV4Config.pro()}

TOLERANCE = {
    "fp8_linear": 2.0**-7,
    "fp8_grouped_einsum": 2.0**-7,
    "fp8_grouped_einsum_quant": 2.0**-7,
    "grouped_linear": 2.0**-9,
}
"""Largest error in addition to the rounding of a result, as a share of the results' RMS, by op. Hopper's tensor cores
accumulate e4m3 with 14 bits, 128 terms at a time: about 2^-10 of the RMS if all truncations of 4096 terms add up."""
ROUNDING, QUANTISING = 1.01 / 128, 1.01 / 8
"""Relative distance to the neighbouring value in bfloat16 and in e4m3."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer of a model as the arguments of `op`: `groups` matrices `[rows, size]`.

    The last field is the number of rows of a bfloat16 weight that the same call multiplies with the same input.
    """

    op: str
    name: str
    rows: int
    size: int
    groups: int = 1
    beside: int = 0

    def arguments(self, tokens: int, device: torch.device, seed: int) -> Args:
        """Return the op's arguments for `tokens` tokens."""
        generator = torch.Generator(device).manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, generator=generator, dtype=torch.bfloat16)

        rows = self.groups * self.rows
        if self.op == "grouped_linear":
            return randn(tokens, self.groups * self.size), randn(rows, self.size), self.groups
        weight = randn(rows, self.size).to(torch.float8_e4m3fn)
        blocks = (layout.cdiv(rows, layout.WEIGHT_TILE), layout.cdiv(self.size, layout.WEIGHT_TILE))
        scale = torch.randint(117, 121, blocks, device=device, generator=generator, dtype=torch.uint8)
        if self.op == "fp8_linear":
            x = randn(tokens, self.size)
            return (x, weight, scale, True, randn(self.beside, self.size)) if self.beside else (x, weight, scale)
        # The strides of inv_rope_fp8_quant's results.
        shape = tokens, self.groups, self.size
        a = torch.empty_strided(shape, value_strides(tokens, self.size), dtype=weight.dtype, device=device)
        a.copy_(randn(*shape).to(weight.dtype))
        blocks_k = layout.cdiv(self.size, layout.ACT_TILE)
        a_scale = torch.empty_strided((*shape[:2], blocks_k), scale_strides(tokens, blocks_k), device=device)
        exponent = torch.randint(-4, 5, a_scale.shape, device=device, generator=generator)
        return a, a_scale.copy_(torch.exp2(exponent.float())), weight, scale

    def cost(self, tokens: int) -> costs.Cost:
        """Return the cost of any implementation."""
        of = {"T": tokens, "N": self.rows, "K": self.size}
        if self.op != "fp8_linear":
            return costs.of(self.op, **of, G=self.groups)
        cost = costs.of(self.op, **of)
        if not self.beside:
            return cost
        more = costs.beside(tokens, self.size, self.rows, self.beside)
        # The floor takes the flops of both GEMMs at the rate of the slower one's dtype.
        return costs.Cost(cost.bytes + more.bytes, cost.flops + more.flops)


def layers(c: DeepseekV4Config) -> Iterator[Layer]:
    """Yield the linear layers of a model that are ops of this package."""
    heads, latent = c.num_heads * c.head_dim, c.o_groups * c.o_lora_rank
    hidden, indexer = c.q_lora_rank + c.head_dim, c.index_n_heads * c.index_head_dim
    states = {"HCA": layout.state_width(layout.HCA_RATIO, c.head_dim)}
    states["CSA"] = sum(layout.state_width(layout.CSA_RATIO, width) for width in (c.head_dim, c.index_head_dim))
    yield Layer("fp8_linear", "wq_a + wkv", hidden, c.hidden_size)
    for kind, width in states.items():
        yield Layer("fp8_linear", f"wq_a + wkv beside {kind}", hidden, c.hidden_size, beside=width)
    yield Layer("fp8_linear", "wq_b", heads, c.q_lora_rank)
    yield Layer("fp8_linear", "indexer wq_b", indexer, c.q_lora_rank)
    yield Layer("fp8_linear", "wq_b + indexer wq_b", heads + indexer, c.q_lora_rank)
    yield Layer("fp8_linear", "wo_b", c.hidden_size, latent)
    for op in ("fp8_grouped_einsum", "fp8_grouped_einsum_quant", "grouped_linear"):
        yield Layer(op, "wo_a", c.o_lora_rank, heads // c.o_groups, c.o_groups)
    yield Layer("fp8_grouped_einsum", "wo_b", c.hidden_size, latent)
    yield Layer("grouped_linear", "wq_a + wkv", hidden, c.hidden_size)
    yield Layer("grouped_linear", "wq_b", heads, c.q_lora_rank)
    yield Layer("grouped_linear", "wo_b", c.hidden_size, latent)


def problems(
    device: torch.device,
    only: Only,
    models: Mapping[str, DeepseekV4Config] | None = None,
    tokens: Sequence[int] | None = None,
) -> Iterator[Problem]:
    """Yield every layer of both models, or of other ones, at every size."""
    for model, config in (models or MODELS).items():
        for layer in layers(config):
            params = {"layer": layer.name, "model": model}
            sizes = [t for t in tokens or TOKENS[device.type] if keep(only, tokens=t)]
            if not sizes or not keep(only, op=layer.op, **params):
                continue
            ways = _implementations(layer, device)
            for size in sizes:
                yield Problem(
                    op=layer.op,
                    params={**params, "tokens": size},
                    make=partial(layer.arguments, size, device),
                    written=(),
                    cost=layer.cost(size),
                    reference=REFERENCES[layer.op],
                    implementations=ways,
                    published={},
                    differs=partial(differs, tolerance=TOLERANCE[layer.op]),
                )


def differs(got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float) -> str:
    """Return why a GEMM disagrees with the reference, or ""; `tolerance` is the share of the RMS added to rounding."""
    kinds = [[(x.dtype, tuple(x.shape), x.stride()) for x in results] for results in (got, want)]
    if kinds[0] != kinds[1]:
        return f"the result is {kinds[0]}, the reference gives {kinds[1]}"
    rounding = ROUNDING if len(want) == 1 else QUANTISING
    # A quantised result is compared dequantised: a different rounding may choose a different scale.
    actual, wide = (
        tensors[0].float() if len(tensors) == 1 else dequantize_activation(*tensors) for tensors in (got, want)
    )
    allowed = rounding * wide.abs() + tolerance * wide.square().mean().sqrt()
    # Negated, so that NaN is wrong.
    wrong = int((~((actual - wide).abs() <= allowed)).sum())
    return f"{wrong} of {wide.numel()} elements are wrong" if wrong else ""


def _implementations(layer: Layer, device: torch.device) -> dict[str, Prepare]:
    def typical() -> Args:
        return layer.arguments(TYPICAL_TOKENS, device, 0)

    usual = implementations(layer.op, typical, (0,))
    ways = {name: usual[name] for name in ("eager", "inductor", "triton")}
    if layer.op == "fp8_linear" and not layer.beside:
        ways["scaled_mm"] = functools.cache(lambda: _scaled_mm(device))
    if layer.op == "grouped_linear":
        # torch.compile does not trace the reference, which writes into a view.
        ways["inductor"] = functools.cache(lambda: compiled(_bmm, "inductor", typical, (0,)))
        ways["bmm"] = lambda: _bmm
    return ways


def _scaled_mm(device: torch.device) -> Callable[..., Tensor]:
    """Return `fp8_linear` by torch's own GEMM, which torch.compile does not trace, after a compiled quantisation."""
    if device.type != "cuda":
        raise Unavailable("torch's block-scaled GEMMs run on GPUs")
    from torch.nn.functional import ScalingType, scaled_mm

    def operands(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, byte = quantize_activation(x)
        # Scales of one K-block are contiguous.
        return values, scale_value(byte).t().contiguous().t(), scale_value(scale).t()

    quantize = torch.compile(operands, fullgraph=True, dynamic=True)
    recipes = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128

    def call(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        values, x_scale, weight_scale = quantize(x, scale)
        # torch.compile does not normalise the strides of a single token.
        x_scale, weight = x_scale.as_strided(x_scale.shape, (1, len(x))), weight.t()
        try:
            return scaled_mm(values, weight, x_scale, recipes[0], weight_scale, recipes[1], output_dtype=torch.bfloat16)
        except RuntimeError as fault:
            if "CUBLAS_STATUS_NOT_SUPPORTED" not in str(fault):
                raise
            raise Unavailable(f"cuBLAS has no block-scaled GEMM for {len(x)} tokens") from fault

    return call


def _bmm(x: Tensor, weight: Tensor, groups: int) -> Any:
    by_group = x.unflatten(1, (groups, -1)).transpose(0, 1)
    return torch.bmm(by_group, weight.unflatten(0, (groups, -1)).transpose(1, 2)).transpose(0, 1).flatten(1)
