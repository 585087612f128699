"""Types of the weights that a converted model reads: plain parameters, in dtypes that ops compute with."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...errors import fail
from .expected_modules import AROUND_FIX

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of a model."""
_OF_INPUT = ("q_a_proj", "q_b_proj", "kv_proj", "o_b_proj")
"""Linears of attention whose inputs have the dtype of the model."""


def embedding_weight(model: Any) -> Tensor:
    """Return the weight of a decoder stack's embedding, which says its device and dtype. Raises E208 without one."""
    weight = getattr(getattr(model, "embed_tokens", None), "weight", None)
    if not isinstance(weight, Tensor):
        kind = type(getattr(model, "embed_tokens", None)).__name__
        why = "its weight says the device and the dtype of a converted model"
        _refuse(f"embed_tokens, a {kind} without a weight", why, "give the module a property `weight`")
    return weight


def is_plain(value: Any) -> bool:
    """Return whether `value` is a parameter whose memory holds its numbers."""
    return type(value) is nn.Parameter and value.layout is torch.strided and not value.is_neg()


def check_weights(model: Any, *, attention_only: bool) -> None:
    """Raise E208 for weights of a decoder stack that a converted model would misread.

    They are tensor subclasses (torchao's, a DTensor), quantised integers, float64, or linears whose dtype is not the
    embedding's.
    """
    dtype = embedding_weight(model).dtype
    if dtype not in FLOATS:
        _refuse(f"a model in {dtype}", "ops compute in bfloat16, float16 and float32", "cast it: model.float()")
    for i, layer in enumerate(model.layers):
        if not attention_only and layer.mlp.is_hash:
            _check_table(f"layer {i}", layer.mlp.gate.tid2eid, layer.mlp.gate.weight.shape[0])
        root = layer.self_attn if attention_only else layer
        for name, parameter in root.named_parameters():
            if not is_plain(parameter):
                kind = f"{name} of layer {i}, a {type(parameter).__name__}, {parameter.layout}"
                _refuse(kind, "ops read the memory of plain parameters", "convert before other libraries quantise")
            if parameter.dtype is torch.float64:
                _refuse(f"{name} of layer {i} in {parameter.dtype}", "no op computes in it", AROUND_FIX)
        for name, module in layer.self_attn.named_modules():
            if hasattr(module, "weight") and not isinstance(module.weight, nn.Parameter):
                kind = f"weight of {name} of layer {i}, a {type(module.weight).__name__}"
                _refuse(kind, "a converted model shares parameters", "make it an nn.Parameter")
        for name in _OF_INPUT:
            weight = getattr(layer.self_attn, name).weight
            if weight.dtype in FLOATS and weight.dtype is not dtype:
                _refuse(
                    f"{name} of layer {i} in {weight.dtype}",
                    f"the embedding and so hidden states are in {dtype}",
                    "cast the whole model, as model.to(torch.bfloat16)",
                )


def _check_table(where: str, table: Tensor, experts: int) -> None:
    """Raise E208 unless a hash router's table names experts. Synchronises with the device."""
    if not table.is_meta and table.numel() and not bool(((table >= 0) & (table < experts)).all()):
        got = f"mlp.gate.tid2eid of {where} with {int(table.min())} to {int(table.max())}"
        _refuse(got, f"the layer has {experts} experts", "correct the table")


def _refuse(got: str, why: str, fix: str) -> NoReturn:
    fail("E208", got=got, why=why, fix=fix)
