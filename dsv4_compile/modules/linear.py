"""Linear layers without bias: floating-point weights, or e4m3 weights with one UE8M0 scale per 128x128 block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..layout import WEIGHT_TILE, cdiv


class Linear(nn.Module):
    """`y = x @ weight^T`, weight `[N, K]` in a floating dtype."""

    def __init__(self, n: int, k: int, *, dtype: torch.dtype, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, k, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, {self.weight.dtype}"


class Fp8Linear(nn.Module):
    """`y = x @ (weight * scale)^T`: weight e4m3 `[N, K]`, scale e8m0 `[ceil(N/128), ceil(K/128)]`.

    With `quantize_input`, x is quantised in tiles of 128 with UE8M0 scales first, as DeepSeek's own code does.
    """

    def __init__(
        self, n: int, k: int, *, quantize_input: bool = True, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        blocks = (cdiv(n, WEIGHT_TILE), cdiv(k, WEIGHT_TILE))
        weight = torch.empty(n, k, dtype=torch.float8_e4m3fn, device=device)
        scale = torch.empty(blocks, dtype=torch.float8_e8m0fnu, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.quantize_input = quantize_input

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.dsv4.fp8_linear(x, self.weight, self.scale, self.quantize_input)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, e4m3 with {tuple(self.scale.shape)} scales"


class Norm(nn.Module):
    """RMSNorm weight `[D]`; the fused ops that read it do the arithmetic."""

    def __init__(self, dim: int, *, dtype: torch.dtype, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dtype=dtype, device=device), requires_grad=False)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.weight.dtype}"


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x @ weight^T` in x's dtype."""
    if x.is_cuda and x.dim() == 2 and x.dtype is weight.dtype:
        # One launch where cuBLAS may take two, and a weight prefetch before the previous kernel ends (PDL).
        out: Tensor = torch.ops.dsv4.grouped_linear(x, weight, 1)
        return out
    return nn.functional.linear(x, weight)


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x @ weight^T` in float32, accumulated in float32, for any input dtype."""
    if x.dtype is torch.float32:
        return nn.functional.linear(x, weight.float())
    if x.is_cuda and weight.dtype is x.dtype:
        out: Tensor = torch.ops.dsv4.grouped_linear(x, weight, 1, True)
        return out
    if x.is_cuda:
        # Not grouped_linear: it may read its weight before the previous kernel ends, here the one that casts it.
        return torch.mm(x, weight.to(x.dtype).t(), out_dtype=torch.float32)
    # Widening first is exact: a float32 holds every product of two bfloat16 values.
    return nn.functional.linear(x.float(), weight.float())
