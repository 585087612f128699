"""Output projection of a layer: inverse RoPE, wo_a by groups of heads, wo_b, along one of four paths.

| path | wo_a | input of wo_a |
|---|---|---|
| `bfloat16` | floating, or e4m3 that is dequantised at each call | the rotated output, rounded to its dtype |
| `fp8` | e4m3 | e4m3 in blocks of 128 with float32 scales, for grouped GEMMs of SM90 |
| `fp8_packed` | e4m3 | e4m3 in blocks of 128 with four UE8M0 scales in an int32, for grouped GEMMs of SM100 |
| `fp8_rounded` | e4m3 | the rotated output, rounded to its dtype and then quantised, as without the fused op |

`auto` is `bfloat16` for floating weights and on AMD GPUs, as in vLLM, `fp8_packed` from SM100 on, and `fp8` elsewhere.
`bfloat16` and `fp8_rounded` are the references for the other paths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops  # noqa: F401  (registers torch.ops.dsv4)
from ..attention_backends.types import capability
from ..errors import check
from ..reference.attention.inv_rope import quantize_groups
from ..reference.common.block_scale import dequantize_weight
from ..selection.decisions import Decision, record
from .linear import Fp8Linear, Linear

PATHS = ("auto", "bfloat16", "fp8", "fp8_packed", "fp8_rounded")
PACKED_FROM = 10
"""Lowest major compute capability with grouped GEMMs that read packed scales."""


def choose_path(wanted: str, wo_a: Linear | Fp8Linear, architecture: str) -> Decision:
    """Choose and record the path for these weights on this device. E302 for a path that the weights do not have."""
    check(wanted in PATHS, "E302", got=f"output_projection={wanted!r}", fix=f"pass one of {', '.join(PATHS)}")
    quantised = isinstance(wo_a, Fp8Linear)
    check(
        quantised or not wanted.startswith("fp8"),
        "E302",
        got=f"output_projection={wanted!r} with wo_a in {str(wo_a.weight.dtype).removeprefix('torch.')}",
        why="this path is a GEMM of e4m3 by e4m3",
        fix='pass "auto" or "bfloat16", or build the layer with fp8=True',
    )
    impl, reason = (wanted, "asked for") if wanted != "auto" else _automatic(quantised, architecture)
    decision = Decision("output_projection", impl, reason)
    record(decision)
    return decision


def quantised_path(wanted: str, architecture: str) -> str:
    """Return the path of e4m3 weights, also for a layer that gets a quantised wo_a later."""
    return _automatic(True, architecture)[0] if wanted == "auto" else wanted


def _automatic(quantised: bool, architecture: str) -> tuple[str, str]:
    if not quantised:
        return "bfloat16", "wo_a is not quantised"
    if "gfx" in architecture:
        return "bfloat16", f"{architecture}: wo_a is dequantised, as vLLM does on AMD GPUs"
    major, _ = capability(architecture) or (0, 0)
    if major >= PACKED_FROM:
        return "fp8_packed", f"{architecture}: its grouped GEMMs read four scales as one word"
    return "fp8", f"{architecture}: its grouped GEMMs read float32 scales"


def project_output(
    path: str,
    out: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    wo_a: Linear | Fp8Linear,
    wo_b: torch.nn.Module,
    groups: int,
) -> Tensor:
    """Project `out` `[T, H, D]`, the attention's result, to `[T, hidden_size]`.

    `path` is one of `PATHS` without `auto`; floating weights always take `bfloat16`.
    """
    if not isinstance(wo_a, Fp8Linear):
        path = "bfloat16"
    if path in ("fp8", "fp8_packed"):
        values, scale = torch.ops.dsv4.inv_rope_fp8_quant(
            out, positions, cos_sin, groups, out.shape[1] // groups, path == "fp8_packed"
        )
        return _quantised(values, scale, out, wo_a, wo_b)
    rotated = torch.ops.dsv4.inv_rope(out, positions, cos_sin)
    if path == "fp8_rounded":
        return _quantised(*quantize_groups(rotated, groups), out, wo_a, wo_b)
    if isinstance(wo_a, Fp8Linear):
        # Not grouped_linear: it may read its weight before the previous kernel ends, here the one that dequantises it.
        weight = torch.unflatten(dequantize_weight(wo_a.weight, wo_a.scale).to(out.dtype), 0, (groups, -1))
        by_group = torch.unflatten(rotated.flatten(1), 1, (groups, -1))
        latent = torch.einsum("tgk,gnk->tgn", by_group, weight).flatten(1)
    else:
        latent = torch.ops.dsv4.grouped_linear(rotated.flatten(1), wo_a.weight, groups)
    hidden: Tensor = wo_b(latent)
    return hidden


def _quantised(values: Tensor, scale: Tensor, out: Tensor, wo_a: Linear | Fp8Linear, wo_b: torch.nn.Module) -> Tensor:
    assert isinstance(wo_a, Fp8Linear)
    latent = torch.ops.dsv4.fp8_grouped_einsum(values, scale, wo_a.weight, wo_a.scale)
    hidden: Tensor = wo_b(latent.flatten(1).to(out.dtype))
    return hidden
