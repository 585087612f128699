"""The tiny model with worked numbers: weights from a counter, exact in every format that stores them."""

from __future__ import annotations

import math
import zlib

import numpy as np
import torch
from torch import Tensor

from dsv4_compile.models.v41.model import V41Model
from dsv4_compile.models.v41.tensors import E2M1, Expected, model_tensors
from dsv4_compile.models.v41.tiny import TINY_DRAFTS, tiny_config, tiny_token_map

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TOKENS = 40


def numbers(name: str, count: int) -> Tensor:
    """The upper halves of `count` outputs of splitmix64, in the sequence of a name."""
    start = np.uint64(zlib.crc32(f"78:{name}".encode()) << 32)
    z = np.arange(count, dtype=np.uint64) + start + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((z ^ (z >> np.uint64(31))) >> np.uint64(32)).astype(np.int64))


def token_ids(count: int = TOKENS) -> Tensor:
    return numbers("tokens", count) % 64


def values(expected: Expected) -> Tensor:
    """float32 values of a tensor."""
    name = expected.name + (".weight" if expected.name.endswith("ffn.gate") else "")
    drawn = numbers(name, math.prod(expected.shape)).view(expected.shape)
    shift = math.ceil(math.log2(expected.shape[-1]) / 2)
    if expected.storage == E2M1:
        code = drawn % 16
        magnitude = torch.tensor(E2M1_VALUES)[code % 8]
        return torch.where(code >= 8, -magnitude, magnitude) * 2.0 ** -(1 + shift)
    n = (drawn % 31 - 15).float()
    leaf = expected.name.rpartition(".")[2]
    if leaf in ("bias", "bias_vl"):
        return n / 64
    if leaf == "embed" or leaf == "attn_sink" or leaf.endswith("_base"):
        return n / 8
    if expected.parameter.endswith(("norm.weight", "q_weight", "k_weight", ".scale")) or leaf.endswith("_scale"):
        return 1 + n / 32
    return n * 2.0 ** -(3 + shift)


@torch.no_grad()
def fill(model: V41Model) -> V41Model:
    """Fill a model with floating weights."""
    parameters = dict(model.named_parameters())
    for expected in model_tensors(model.config, None if model.mtp is None else model.mtp.config):
        tensor = parameters[expected.parameter]
        target = tensor if expected.expert is None else tensor[expected.expert]
        if expected.rows is not None:
            target = target[slice(*expected.rows)]
        target.copy_(values(expected))
    model.token_map.copy_(tiny_token_map(model.config))
    return model


def worked_model(dtype: torch.dtype = torch.float32, *, drafts: bool = False) -> V41Model:
    return fill(V41Model(tiny_config(), dtype, drafts=TINY_DRAFTS if drafts else None))
