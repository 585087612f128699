"""Not a test: draft tensors of a small checkpoint as DeepSeek publishes it, and the values that they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4_compile.hf.tiny import tiny_drafts, tiny_model
from tests.hf.drafting import official_drafts
from tests.hf.official import SIZES, dequantised, e4m3, mxfp4, official_tensors, write

E4M3 = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3", "main_proj", "e_proj", "h_proj")
"""Last names of linears that are stored in e4m3, except those of routed experts."""
FLOAT32 = ("hc_", "attn_sink", "gate.bias")


def stored(name: str, value: Tensor, *, floating: tuple[str, ...] = (), experts: Any = mxfp4) -> dict[str, Tensor]:
    """Return a draft tensor as a checkpoint stores it, with its scales; those with a name in `floating` in bfloat16."""
    stem, leaf = name.removesuffix(".weight"), name.removesuffix(".weight").rpartition(".")[2]
    if any(word in name for word in FLOAT32):
        return {name: value.float()}
    if leaf in E4M3 and not any(word in name for word in floating):
        quantise = experts if ".experts." in name and "shared" not in name else e4m3
        weight, scale = quantise(value.float())
        return {name: weight, f"{stem}.scale": scale}
    return {name: value.to(torch.bfloat16)}


def values(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the float32 values that draft tensors and their scales stand for."""
    weights = {name: tensor for name, tensor in tensors.items() if not name.endswith(".scale")}
    scales = {name: tensors.get(f"{name.removesuffix('.weight')}.scale") for name in weights}
    return {n: w.float() if scales[n] is None else dequantised(w, scales[n]) for n, w in weights.items()}


def draft_tensors(model: Any, kind: str, **formats: Any) -> dict[str, Tensor]:
    """Return tensors of random draft layers for `model`, three DSpark stages or one MTP layer."""
    named = official_drafts(tiny_drafts(model, kind))
    return {key: tensor for name, value in named.items() for key, tensor in stored(name, value, **formats).items()}


def make(folder: Path, kind: str, *, config: dict[str, Any] | None = None, **formats: Any) -> tuple[Path, Any, Any]:
    """Write a folder with drafts; return it, the target in float32 with the same values, and those of the drafts."""
    model = tiny_model(0, **SIZES)
    tensors = official_tensors(model)
    drafts = draft_tensors(model, kind, **formats)
    if kind == "mtp":
        config = {"dspark_block_size": 0, "compress_ratios": [0, 4, 128, 4, 0]} | (config or {})
    return write(folder, tensors | drafts, **(config or {})), model, values(drafts)
