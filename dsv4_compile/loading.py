"""Weights into `DeepseekV4Attention`: from tensors or safetensors, under DeepSeek's names or Hugging Face's.

The module's own names are DeepSeek's (`wq_a.weight`, `wq_a.scale`, ...). An e4m3 weight with scales goes into an fp8
module as it is, and is dequantised into a module with floating weights. A tensor that is missing, left over or
mis-shaped raises E207 and names itself; nothing is half loaded.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from .errors import check, fail
from .layout import WEIGHT_TILE
from .reference.block_scale import dequantize_weight

HF_NAMES: dict[str, str] = {
    "wq_a": "q_a_proj",
    "q_norm": "q_a_norm",
    "wq_b": "q_b_proj",
    "wkv": "kv_proj",
    "kv_norm": "kv_norm",
    "attn_sink": "sinks",
    "wo_a": "o_a_proj",
    "wo_b": "o_b_proj",
    "compressor.wkv": "compressor.kv_proj",
    "compressor.wgate": "compressor.gate_proj",
    "compressor.ape": "compressor.position_bias",
    "compressor.norm": "compressor.kv_norm",
    "indexer.wq_b": "compressor.indexer.q_b_proj",
    "indexer.weights_proj": "compressor.indexer.scorer.weights_proj",
    "indexer.compressor.wkv": "compressor.indexer.kv_proj",
    "indexer.compressor.wgate": "compressor.indexer.gate_proj",
    "indexer.compressor.ape": "compressor.indexer.position_bias",
    "indexer.compressor.norm": "compressor.indexer.kv_norm",
}
"""DeepSeek's name of every weight of an attention layer -> its name in transformers, without the suffix."""

_HF_SUFFIX = {"weight": "weight", "scale": "weight_scale_inv"}


def hf_name(official: str) -> str:
    """transformers' name of an official parameter name: `wq_a.scale` -> `q_a_proj.weight_scale_inv`."""
    if official in HF_NAMES:
        return HF_NAMES[official]
    stem, suffix = official.rsplit(".", 1)
    return f"{HF_NAMES[stem]}.{_HF_SUFFIX[suffix]}"


def load_attention(
    module: nn.Module, tensors: Mapping[str, Tensor], *, prefix: str = "", naming: str = "official"
) -> None:
    """Copy the tensors under `prefix` into `module`, which must be a `DeepseekV4Attention`.

    Args:
        tensors: checkpoint tensors by name; names outside `prefix` are ignored.
        prefix: e.g. `layers.3.attn.` (official) or `model.layers.3.self_attn.` (hf).
        naming: `official` or `hf`.
    """
    check(naming in ("official", "hf"), "E207", got=f"naming={naming!r}", rule="naming is official or hf")
    given = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    plan: list[tuple[nn.Parameter, Tensor]] = []
    used: set[str] = set()
    for name, parameter in module.named_parameters():
        source = name if naming == "official" else hf_name(name)
        if source not in given:
            fail("E207", got=f"no tensor {prefix}{source}", why=f"parameter {name} {tuple(parameter.shape)} needs it")
        value = given[source]
        used.add(source)
        scale_name = _scale_name(source, naming)
        if value.dtype is torch.float8_e4m3fn and parameter.dtype is not torch.float8_e4m3fn:
            if scale_name not in given:
                fail("E207", got=f"no tensor {prefix}{scale_name}", why=f"{source} is e4m3 and needs its block scales")
            used.add(scale_name)
            value = dequantize_weight(value, given[scale_name])
        check(
            value.shape == parameter.shape,
            "E207",
            got=f"{prefix}{source} of shape {tuple(value.shape)}",
            why=f"parameter {name} has shape {tuple(parameter.shape)}",
        )
        check(
            value.dtype is parameter.dtype or parameter.dtype is not torch.float8_e4m3fn,
            "E207",
            got=f"{prefix}{source} of dtype {value.dtype}",
            why=f"parameter {name} is e4m3",
            fix=f"build the module with fp8=False, or quantise to e4m3 with {WEIGHT_TILE}x{WEIGHT_TILE} scales",
        )
        plan.append((parameter, value))
    extra = sorted(given.keys() - used)
    check(not extra, "E207", got=f"tensors that no parameter takes: {', '.join(prefix + e for e in extra[:8])}")
    with torch.no_grad():
        for parameter, value in plan:
            parameter.copy_(value)


def _scale_name(source: str, naming: str) -> str:
    suffix = "scale" if naming == "official" else _HF_SUFFIX["scale"]
    return f"{source.removesuffix('.weight')}.{suffix}"


def load_attention_from_safetensors(
    module: nn.Module, path: str | pathlib.Path, *, prefix: str, naming: str = "official"
) -> None:
    """`load_attention` from a `.safetensors` file or a folder with `model.safetensors.index.json`.

    Only the tensors under `prefix` are read.
    """
    load_attention(module, dict(_read_safetensors(pathlib.Path(path), prefix)), prefix=prefix, naming=naming)


def _read_safetensors(path: pathlib.Path, prefix: str) -> Iterator[tuple[str, Tensor]]:
    try:
        from safetensors import safe_open
    except ImportError:
        fail("E101", got="safetensors is not installed", fix="pip install safetensors")
    files = [path]
    if path.is_dir():
        index = path / "model.safetensors.index.json"
        if index.is_file():
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            files = [path / f for f in sorted({f for name, f in weight_map.items() if name.startswith(prefix)})]
        else:
            files = sorted(path.glob("*.safetensors"))
    check(bool(files) and all(f.is_file() for f in files), "E207", got=f"no safetensors with {prefix}* at {path}")
    for file in files:
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118  (the handle is not a dict)
                if name.startswith(prefix):
                    yield name, handle.get_tensor(name)
