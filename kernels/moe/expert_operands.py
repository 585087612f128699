"""Weights and tokens of experts as arguments of kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...reference.moe.expert_weights import columns, weight_format
from ...reference.moe.moe_experts import ExpertsArguments


def descriptor(weight: Tensor, halves: int, rows: int, block_k: int) -> Any:
    """Return the TMA descriptor of contiguous `[E, N, K]`, with tiles of rows of all `halves` of N."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    experts, n, k = weight.shape
    shape, strides = [experts, halves, n // halves, k], [n * k, n // halves * k, k, 1]
    return TensorDescriptor(weight, shape, strides, [1, halves, rows // halves, block_k])


class GemmTile(NamedTuple):
    """Compile-time sizes and options of the GEMMs of a launch.

    Attributes:
        rows, tokens: of a tile: rows of the weight and tokens that meet them.
        block_k, stages: elements of K of a step, and steps in flight.
        kind: format of the weight. interleaved: whether MXFP4 rows are in the order of x.
        tma: whether the weight is a TMA descriptor. ptx: whether PTX is compiled.
    """

    rows: int
    tokens: int
    block_k: int
    stages: int
    kind: str
    interleaved: bool
    tma: bool
    ptx: bool


class Rounding(NamedTuple):
    """Compile-time roundings of `mx_experts`, which also multiplies hidden states by routing weights.

    Attributes:
        routed, shared: whether inputs of the routed experts' GEMMs and of the shared one's are rounded to mxfp8.
    """

    routed: bool
    shared: bool


class WeightRows(NamedTuple):
    """Rows of an expert's weight `[E, N, K]` in a kernel.

    Attributes:
        weight: a TMA descriptor of `[E, HALVES, N / HALVES, K]`, or a pointer to `[E, N, K]`, contiguous.
        p_scale: MXFP4: words `[E, N, K / 128]` int32; e4m3: `[E, N / 128, K / 128]`; blocks: bytes
            `[E, N / 32, K / 32]`; contiguous.
        first: first row of the first half. o_row: `[ROWS]` rows.
    """

    weight: Any
    p_scale: Any
    expert: Any
    first: Any
    o_row: Any


class TokenRows(NamedTuple):
    """Rows of tokens in a kernel: `[TOKENS]` pointers to them and their mask, and the stride of their elements."""

    p_x: Any
    stride: Any
    mask: Any


class SplitRows(NamedTuple):
    """Rows of tokens, split into two e4m3, in a kernel.

    Attributes:
        p_x: `[2 * TOKENS]` pointers to rows of e4m3: the high parts of the tokens, then the low ones.
        p_scale: `[2 * TOKENS]` pointers to their scales. mask: `[2 * TOKENS]`.
    """

    p_x: Any
    p_scale: Any
    mask: Any


class WeightShape(NamedTuple):
    """Shape `[experts, rows, size]` in elements and format of a weight, and whether its scales are powers of two."""

    experts: int
    rows: int
    size: int
    kind: str
    power_scales: bool


class Weight(NamedTuple):
    """A weight `[E, N, K]` as kernels take it: elements or words, and its scales."""

    values: Tensor
    scale: Tensor | None
    kind: str
    """Its format: "mxfp4", "e4m3", "float", or "blocks" for e4m3 with scales of 32x32 blocks."""
    size: int
    """Elements of K."""

    @classmethod
    def of(cls, weight: Tensor, scale: Tensor | None, blocks: bool = False) -> Weight:
        """Return a weight `[E, N, K]`, or `[N, K]` of one expert, in its format: MXFP4 as words of eight elements.

        With `blocks`, e4m3 has scales of 32x32 blocks.
        """
        kind, size = weight_format(weight), columns(weight)
        if blocks and kind == "e4m3":
            kind = "blocks"
        if weight.dim() == 2:
            weight, scale = weight[None], None if scale is None else scale[None]
        if kind == "mxfp4" and scale is not None:
            return cls(weight.view(torch.int32), scale.view(torch.uint8).view(torch.int32), kind, size)
        if scale is not None and scale.dtype is torch.float8_e8m0fnu:
            scale = scale.view(torch.uint8)
        return cls(weight, scale, kind, size)

    def operand(self, halves: int, rows: int, block_k: int, tma: bool) -> Any:
        """Return the weight as a kernel's argument."""
        return descriptor(self.values, halves, rows, block_k // self.pack) if tma else self.values

    @property
    def has_power_scales(self) -> bool:
        """Whether each scale is a power of two, stored as its exponent."""
        return self.scale is not None and self.scale.dtype is not torch.float32

    @property
    def shape(self) -> WeightShape:
        """The shape and format."""
        experts, rows, _ = self.values.shape
        return WeightShape(experts, rows, self.size, self.kind, self.has_power_scales)

    @property
    def pack(self) -> int:
        """Elements of K in an element of `values`."""
        return 8 if self.kind == "mxfp4" else 1


class Problem(NamedTuple):
    """Sizes and formats of a call, tokens apart: its weights, the experts of a token, and the order of MXFP4 rows.

    `rounding` is None for `moe_experts`.
    """

    w13: WeightShape
    w2: WeightShape
    shared: tuple[WeightShape, WeightShape] | None
    top_k: int
    interleaved: bool
    rounding: Rounding | None = None


Weights = tuple[Weight, Weight, "tuple[Weight, Weight] | None"]
"""Both weights of the routed experts, and of the shared one if there is one."""


def weights_of(call: ExpertsArguments, blocks: bool = False) -> Weights:
    """Return both weights of the routed experts, and of the shared one if there is one. See `Weight.of`."""
    routed = Weight.of(call.w13, call.w13_scale), Weight.of(call.w2, call.w2_scale)
    if call.shared_w13 is None or call.shared_w2 is None:
        return *routed, None
    shared = (call.shared_w13, call.shared_w13_scale), (call.shared_w2, call.shared_w2_scale)
    return *routed, (Weight.of(*shared[0], blocks), Weight.of(*shared[1], blocks))
