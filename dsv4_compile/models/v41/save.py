"""Writing of a model as an official DeepSeek-V4.1 folder: 32x32 e4m3 blocks, MXFP4 experts, rows of the engram."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import check, needs
from ...layout import FP8_MAX, MX_TILE, cdiv
from ...reference.common.quant import quantize_mxfp4, quantize_tiles, to_e4m3, ue8m0_byte, ue8m0_scale
from .config import _NAMES, MODEL_TYPE, TEXT_TYPE, V41Config
from .draft_config import V41DraftConfig
from .model import V41Model
from .tensors import E2M1, E4M3, F32, ROWS, model_tensors

_FLOOR = 2.0**-100
"""Magnitude of the smallest block's largest element, so that blocks of zeros have a scale."""


def quantized_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 `[N, K]` and UE8M0 bytes `[ceil(N/32), ceil(K/32)]` of a float32 weight."""
    rows, columns = weight.shape
    shape = cdiv(rows, MX_TILE), cdiv(columns, MX_TILE)
    padded = torch.zeros(shape[0] * MX_TILE, shape[1] * MX_TILE)
    padded[:rows, :columns] = weight
    blocks = padded.unflatten(1, (-1, MX_TILE)).unflatten(0, (-1, MX_TILE))
    byte = ue8m0_byte(blocks.abs().amax((1, 3)).clamp_min(_FLOOR), FP8_MAX)
    scale = ue8m0_scale(byte).repeat_interleave(MX_TILE, 0).repeat_interleave(MX_TILE, 1)[:rows, :columns]
    return to_e4m3(weight / scale), byte.to(torch.uint8)


def official_config(config: V41Config, drafts: V41DraftConfig | None = None) -> dict[str, Any]:
    """Return the content of a `config.json` for a configuration, and for draft layers if there are some."""
    text = {_NAMES.get(name, name): getattr(config, name) for name in config.__slots__}
    for name in ("yarn", "image_token_id"):
        del text[name]
    if config.yarn is not None:
        yarn = config.yarn
        text["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_position,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
        }
    if drafts is not None:
        text |= drafts.to_json()
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": MODEL_TYPE,
        "image_token_id": config.image_token_id,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [MX_TILE, MX_TILE],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": {"model_type": TEXT_TYPE, "num_key_value_heads": 1, **text},
    }


@torch.no_grad()
def save_folder(model: V41Model, folder: str | Path, *, tokenizer: str | None = None) -> None:
    """Write a model with floating weights, draft layers included, as an official folder with one safetensors file.

    Args:
        folder: made if it does not exist.
        tokenizer: text of `tokenizer.json` (None = no such file).

    Raises E201 for a model with quantised weights, E701 for a part of a split one.
    """
    with needs("hf", "saving a folder"):
        from safetensors.torch import save_file
    check(model.ranks is None, "E701", got="save_folder of a model that is split", fix="save it before")
    path = Path(folder)
    parameters = dict(model.named_parameters())
    quantised = any(parameter.dtype is torch.float8_e4m3fn for parameter in parameters.values())
    check(not quantised, "E201", got="a model with quantised weights", rule="floating weights are saved")
    tensors: dict[str, Tensor] = {}
    drafts = None if model.mtp is None else model.mtp.config
    for expected in model_tensors(model.config, drafts):
        value = parameters[expected.parameter].detach().float().cpu()
        value = value if expected.expert is None else value[expected.expert]
        if expected.rows is not None:
            value = value[slice(*expected.rows)]
        if expected.storage not in (E4M3, E2M1, ROWS):
            dtype = torch.float32 if expected.storage == F32 else torch.bfloat16
            tensors[expected.weight] = value.to(dtype).contiguous()
            continue
        if expected.storage == E4M3:
            data, byte = quantized_blocks(value)
        elif expected.storage == E2M1:
            packed, byte = quantize_mxfp4(value)
            data = packed.view(torch.int8)
        else:
            data, wide = quantize_tiles(value, MX_TILE, _FLOOR)
            byte = wide.to(torch.uint8)
        tensors[expected.weight] = data.contiguous()
        tensors[expected.scale] = byte.contiguous().view(torch.float8_e8m0fnu)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(path / "model.safetensors"))
    (path / "config.json").write_text(json.dumps(official_config(model.config, drafts), indent=1), encoding="utf-8")
    if tokenizer is not None:
        (path / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
