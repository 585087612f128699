"""Mixture of experts of a DeepSeek-V4.1 layer: router, routed experts, and a shared one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...layout import MX_TILE
from ...parallel import Ranks, all_reduce
from .config import V41Config
from .linear import WeightOptions, parameter


class Gate(nn.Module):
    """Router weights, and a bias of the choice for text and for image tokens."""

    def __init__(self, config: V41Config, options: WeightOptions) -> None:
        super().__init__()
        self.weight = parameter(config.num_experts, config.hidden_size, dtype=options.dtype)
        self.bias = parameter(config.num_experts, dtype=torch.float32)
        self.bias_vl = parameter(config.num_experts, dtype=torch.float32)


class Experts(nn.Module):
    """Weights of several experts: w13 `[..., 2 I, D]`, gate before up, and w2 `[..., D, I]`.

    Quantised routed experts (`mxfp4`) are bytes of two e2m1 with a scale for 32 columns; a quantised shared expert is
    e4m3 with a scale for 32x32.
    """

    def __init__(self, config: V41Config, options: WeightOptions, count: int | None) -> None:
        super().__init__()
        lead = () if count is None else (count,)
        for name, n, k in (
            ("w13", 2 * config.intermediate_size, config.hidden_size),
            ("w2", config.hidden_size, config.intermediate_size),
        ):
            if not options.quantised:
                weight, scale = parameter(*lead, n, k, dtype=options.dtype), None
            elif count is None:
                weight = parameter(n, k, dtype=torch.float8_e4m3fn)
                scale = parameter(-(-n // MX_TILE), -(-k // MX_TILE), dtype=torch.float8_e8m0fnu)
            else:
                weight = parameter(*lead, n, k // 2, dtype=torch.uint8)
                scale = parameter(*lead, n, k // MX_TILE, dtype=torch.float8_e8m0fnu)
            setattr(self, name, weight)
            self.register_parameter(f"{name}_scale", scale)


class MoE(nn.Module):
    """Router and experts: the top experts of each token by score and bias, weighted by score, and the shared one.

    A rank of a split model has the experts from `first_expert` on, or rows of each, and rows of the shared one.
    """

    ranks: Ranks | None = None
    first_expert = 0

    def __init__(self, config: V41Config, options: WeightOptions) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.quantize_input, self.limit = options.quantize_input, config.swiglu_limit
        self.routing = config.experts_per_token, config.routed_scaling_factor, config.gate_temperature
        self.gate = Gate(config, options)
        self.experts = Experts(config, options, config.num_experts)
        self.shared_experts = Experts(config, options, None)

    def forward(self, x: Tensor, is_image: Tensor) -> Tensor:
        routed, shared = self.experts, self.shared_experts
        ids, weights = torch.ops.dsv4.moe_route_images(
            *(x, self.gate.weight, self.gate.bias, self.gate.bias_vl, is_image),
            *self.routing,
        )
        out: Tensor = torch.ops.dsv4.mx_experts(
            *(x, ids, weights, routed.w13, routed.w2, shared.w13, shared.w2),
            *(routed.w13_scale, routed.w2_scale, shared.w13_scale, shared.w2_scale),
            *(self.limit, self.first_expert, self.quantize_input),
        )
        return all_reduce(out, self.ranks)
