"""The output projection of a layer: inverse RoPE, wo_a by groups of heads, wo_b; and the ways it can be computed.

| path | wo_a | what it reads |
|---|---|---|
| `bfloat16` | floating, or e4m3 that is dequantised at each call | the rotated output, rounded to its dtype |
| `fp8` | e4m3 | e4m3 in strips of 128, a float32 scale each: what SM90's grouped products want |
| `fp8_packed` | e4m3 | the same, four UE8M0 scales in an int32: what SM100's want |
| `fp8_rounded` | e4m3 | the rotated output rounded first and quantised afterwards, as without the fused op |

`auto` is `bfloat16` for floating weights and on AMD's GPUs, where the system this follows keeps it too, `fp8_packed`
from SM100 on, and `fp8` elsewhere. `bfloat16` and `fp8_rounded` are the references to hold the others against.
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
"""Major compute capability from which grouped products read packed scales."""


def choose_path(wanted: str, wo_a: Linear | Fp8Linear, architecture: str) -> Decision:
    """The path for these weights on this device, and why; recorded. E302 for one that the weights have not."""
    check(wanted in PATHS, "E302", got=f"output_projection={wanted!r}", fix=f"pass one of {', '.join(PATHS)}")
    quantised = isinstance(wo_a, Fp8Linear)
    check(
        quantised or not wanted.startswith("fp8"),
        "E302",
        got=f"output_projection={wanted!r} with wo_a in {str(wo_a.weight.dtype).removeprefix('torch.')}",
        why="it multiplies e4m3 by e4m3",
        fix='pass "auto" or "bfloat16", or build the layer with fp8=True',
    )
    impl, reason = (wanted, "asked for") if wanted != "auto" else _automatic(quantised, architecture)
    found = Decision("output_projection", impl, reason)
    record(found)
    return found


def quantised_path(wanted: str, architecture: str) -> str:
    """The path of e4m3 weights: a layer's, should its wo_a be replaced by one that is quantised."""
    return _automatic(True, architecture)[0] if wanted == "auto" else wanted


def _automatic(quantised: bool, architecture: str) -> tuple[str, str]:
    if not quantised:
        return "bfloat16", "wo_a is not quantised"
    if "gfx" in architecture:
        return "bfloat16", f"{architecture}: wo_a is dequantised, as the reference system does on AMD's GPUs"
    major, _ = capability(architecture) or (0, 0)
    if major >= PACKED_FROM:
        return "fp8_packed", f"{architecture}: its grouped products read four scales as one word"
    return "fp8", f"{architecture}: its grouped products read float32 scales"


def project_output(
    path: str,
    out: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    wo_a: Linear | Fp8Linear,
    wo_b: torch.nn.Module,
    groups: int,
) -> Tensor:
    """`[T, hidden_size]` of `out` `[T, H, D]`, the attention's result. e4m3 weights go along `path`, one of `PATHS` but
    `auto`, and floating ones along `bfloat16`."""
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
        # grouped_linear may read its weight before the kernel in front has ended, which makes it.
        weight = dequantize_weight(wo_a.weight, wo_a.scale).to(out.dtype).unflatten(0, (groups, -1))
        latent = torch.einsum("tgk,gnk->tgn", rotated.flatten(1).unflatten(1, (groups, -1)), weight).flatten(1)
    else:
        latent = torch.ops.dsv4.grouped_linear(rotated.flatten(1), wo_a.weight, groups)
    hidden: Tensor = wo_b(latent)
    return hidden


def _quantised(values: Tensor, scale: Tensor, out: Tensor, wo_a: Linear | Fp8Linear, wo_b: torch.nn.Module) -> Tensor:
    assert isinstance(wo_a, Fp8Linear)
    latent = torch.ops.dsv4.fp8_grouped_einsum(values, scale, wo_a.weight, wo_a.scale)
    hidden: Tensor = wo_b(latent.flatten(1).to(out.dtype))
    return hidden
