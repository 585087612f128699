"""Weights of DeepSeek-V4.1 as modules: norms, and linears that are floating or e4m3 with scales of 32x32 blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...layout import MX_TILE, cdiv
from ...modules.linear import linear
from ...reference.preprocess.fused_q_kv_rmsnorm import rms_norm


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Return an uninitialised parameter, on the default device, that needs no gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Norm(nn.Module):
    """RMSNorm in float32, rounded once."""

    def __init__(self, dim: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.eps = parameter(dim, dtype=dtype), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.eps, self.weight).to(x.dtype)


class Linear(nn.Module):
    """`y = x @ weight^T`, the weight `[N, K]` in a floating dtype."""

    def __init__(self, n: int, k: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(n, k, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class MxLinear(nn.Module):
    """`y = x @ (weight * scale)^T`: weight e4m3 `[N, K]`, scale UE8M0 `[ceil(N/32), ceil(K/32)]`.

    With `quantize_input`, x is first rounded to e4m3 with a scale for 32 columns, as DeepSeek's own kernels do.
    """

    def __init__(self, n: int, k: int, quantize_input: bool) -> None:
        super().__init__()
        self.weight = parameter(n, k, dtype=torch.float8_e4m3fn)
        self.scale = parameter(cdiv(n, MX_TILE), cdiv(k, MX_TILE), dtype=torch.float8_e8m0fnu)
        self.quantize_input = quantize_input

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.dsv4.mx_linear(x, self.weight, self.scale, self.quantize_input)
        return out


def linear_of(n: int, k: int, options: WeightOptions) -> Linear | MxLinear:
    """Return a linear that a checkpoint stores in e4m3, quantised or floating by `options`."""
    return MxLinear(n, k, options.quantize_input) if options.quantised else Linear(n, k, options.dtype)


class WeightOptions:
    """Storage of weights: `dtype` of floating ones, whether others stay quantised, and whether their inputs are."""

    def __init__(self, dtype: torch.dtype, *, quantised: bool = False, quantize_input: bool = False) -> None:
        self.dtype, self.quantised, self.quantize_input = dtype, quantised, quantize_input
