"""Types of the weights that a converted model reads: plain parameters, in dtypes that ops compute with."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from ..errors import fail
from .expected import AROUND_FIX

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of a model."""
_OF_INPUT = ("q_a_proj", "q_b_proj", "kv_proj", "o_b_proj")
"""Linears of attention whose inputs have the dtype of the model."""


def check_weights(model: Any, *, attention_only: bool) -> None:
    """Raise E208 for weights of a decoder stack that a converted model would misread.

    They are tensors that code of another library stands for (torchao's, a DTensor), quantised integers, float64, or
    linears in another dtype than the embedding.
    """
    dtype = model.embed_tokens.weight.dtype
    if dtype not in FLOATS:
        _refuse(f"a model in {dtype}", "ops compute in bfloat16, float16 and float32", "cast it: model.float()")
    for i, layer in enumerate(model.layers):
        root = layer.self_attn if attention_only else layer
        for name, parameter in root.named_parameters():
            if type(parameter) is not nn.Parameter:
                kind = f"{name} of layer {i}, a {type(parameter).__name__}"
                _refuse(kind, "ops read the memory of plain parameters", "convert before other libraries quantise")
            if parameter.dtype is torch.float64:
                _refuse(f"{name} of layer {i} in {parameter.dtype}", "no op computes in it", AROUND_FIX)
        for name in _OF_INPUT:
            weight = getattr(layer.self_attn, name).weight
            if weight.dtype in FLOATS and weight.dtype is not dtype:
                _refuse(
                    f"{name} of layer {i} in {weight.dtype}",
                    f"the embedding and so hidden states are in {dtype}",
                    "cast the whole model, as model.to(torch.bfloat16)",
                )


def _refuse(got: str, why: str, fix: str) -> NoReturn:
    fail("E208", got=got, why=why, fix=fix)
