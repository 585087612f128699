"""How far the results of an op on a GPU, of its kernel or of its reference there, may be from the CPU's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..layout import ACT_TILE
from ..ops.common.arguments import tensors_in
from ..ops.common.define import OPS
from ..reference.common.block_scale import dequantize_activation, unpack_scales
from .compare import TOLERANCES, Tolerance, assert_bitwise, assert_close

Args = tuple[Any, ...]

FLOATS = {
    # The order of sums differs, and so do implementations of rsqrt and exp.
    torch.float32: Tolerance(abs=1e-5, rel=1e-4, cosine=1e-9),
    # The same, rounded: neighbours where the exact value lies near a boundary.
    torch.bfloat16: Tolerance(abs=1e-3, rel=2.01 / 128, cosine=5e-6),
    torch.float8_e4m3fn: Tolerance(abs=2.0**-9, rel=1.01 / 8, cosine=1e-3),
}
ROUNDED = {
    "compress_norm_rope_insert",
    "indexer_q_rope_quant",
    "preprocess_insert",
    "preprocess_insert_quant",
    "q_norm_rope",
}
"""Ops that quantise a result of a sum: a few quantised values may land on the neighbour. All other bytes are exact."""
ROUNDED_SHARE = 0.02
CANCELLED = 2.0**-16
"""Share of the largest value that may remain where terms cancel in a different order, most in fp8 tensor cores."""
CANCELLED_E4M3 = 2.0**-14
"""`CANCELLED` for float32 results of e4m3 operands, which tensor cores add with 14 bits."""
ATTENTION = TOLERANCES["attention_few_keys"]
"""For kernels of attention: rows of few keys, with weights that are rounded to bfloat16."""
QUANTISED = Tolerance(abs=ATTENTION.abs, rel=1.13 / 8, cosine=1e-3)
"""For kernels of attention and GEMMs with quantised results, scales included."""
EXPERTS = 3e-3
"""Relative error of kernels of experts, which round hidden states to bfloat16."""
LARGEST_OF_ROW = 8.0
"""Times such an error that its largest element may be."""
QUANT = {"fp8_grouped_einsum_quant", "sparse_mla_decode_quant"}
"""Ops that quantise what they have rounded."""


def results_of(name: str, returned: Any, args: Args) -> list[Tensor]:
    """Return the tensors that a call returned, then the arguments that the op may have written."""
    results = [] if returned is None else [returned] if isinstance(returned, Tensor) else list(returned)
    return results + written_arguments(name, args)


def written_arguments(name: str, args: Args) -> list[Tensor]:
    """Return those of `args` that the schema marks as mutated."""
    schema = OPS[name]._schema.arguments
    written = [a for a, s in zip(args, schema, strict=False) if s.alias_info is not None and s.alias_info.is_write]
    return list(tensors_in(written))


def assert_agrees(name: str, got: list[Tensor], want: list[Tensor], before: list[Tensor], *, kernel: bool) -> None:
    """Fail unless `got` agrees with the CPU's `want`, both as `results_of` lists them.

    Args:
        name: the op.
        got: what ran on the GPU.
        want: what the reference gave on the CPU.
        before: what the written arguments held.
        kernel: whether a kernel ran, which may round where the reference does not.
    """
    if name in QUANT:
        # A sum that is rounded otherwise may take a different scale.
        got, want = [_dequantized(*got)], [_dequantized(*want)]
    results = len(want) - len(before)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        _assert_agrees(name, a, b, before[i - results] if i >= results else None, kernel)


def _assert_agrees(name: str, got: Tensor, want: Tensor, before: Tensor | None, kernel: bool) -> None:
    """Assert equal integers and bytes, and floats within their tolerance; `before`: a written argument's old value."""
    attends = kernel and name.startswith("sparse_mla_") and want.dtype is torch.bfloat16
    got = got.cpu()
    if want.dtype in FLOATS and (want.dtype.itemsize > 1 or name in ROUNDED):
        tolerance = QUANTISED if kernel and name in QUANT else ATTENTION if attends else FLOATS[want.dtype]
        largest = want.float().abs().nan_to_num(0.0, 0.0).max().item() if want.numel() else 0.0
        least = (CANCELLED_E4M3 if name == "fp8_linear" and want.dtype is torch.float32 else CANCELLED) * largest
        if kernel and name == "moe_experts" and want.numel():
            least = LARGEST_OF_ROW * EXPERTS * want.float().square().mean().sqrt().item()
        assert_close(got, want, replace(tolerance, abs=max(tolerance.abs, least)))
    elif want.dtype is torch.uint8 and name in ROUNDED:
        written = torch.ones_like(want, dtype=torch.bool) if before is None else before != want
        assert_bitwise(torch.where(written, want, got), want)
        share = (got != want).sum().item() / max(1, written.sum().item())
        assert share <= ROUNDED_SHARE, f"{share:.1%} of the written bytes differ"
    else:
        assert_bitwise(got, want)


def _dequantized(values: Tensor, scales: Tensor) -> Tensor:
    """Return what e4m3 values stand for, whichever form their scales have."""
    if scales.dtype is torch.int32:
        scales = unpack_scales(scales, -(-values.shape[-1] // ACT_TILE))
    return dequantize_activation(values, scales)
