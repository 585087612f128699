"""Not a test: the size of model that calls are compared on, and how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv4_compile.hf.tiny import tiny_config
from dsv4_compile.reference.moe.expert_weights import dequantize_expert

_kinds: Any = tiny_config().layer_types
LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": _kinds[1:3]}
"""A layer of each compressed kind; the first routes by hash."""


def random_ids(*shape: int) -> Tensor:
    return torch.randint(0, 512, shape)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=2e-4, rtol=0)


@torch.no_grad()
def logits(model: Any, ids: Tensor, **options: Any) -> Tensor:
    return model(ids, **options).logits


def eager_logits(model: Any, ids: Tensor, **options: Any) -> Tensor:
    """Return logits of a model of transformers, or of a converted one, without a cache in the result."""
    return logits(model, ids, use_cache=False, **options)


def assert_records_what_eager_records(converted: Any, original: Any) -> None:
    """Compare hidden states, router logits and losses of a batch."""
    ids = random_ids(2, 20)
    options = {"output_hidden_states": True, "output_router_logits": True, "labels": ids}
    with torch.no_grad():
        want, got = original(ids, use_cache=False, **options), converted(ids, **options)
    for name in ("hidden_states", "router_logits"):
        assert len(got[name]) == len(want[name]) > 0
        for a, b in zip(got[name], want[name], strict=True):
            close(a, b)
    close(got.aux_loss, want.aux_loss)
    close(got.loss, want.loss)


def assert_equal_bits(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert got[name].dtype is tensor.dtype and got[name].shape == tensor.shape, name
        assert torch.equal(got[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def stored(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all safetensors files in a folder."""
    parts = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for part in parts for name, tensor in part.items()}


def quantise_at_random(experts: Any, floating: Any, kind: str) -> None:
    """Fill experts of the format `kind`, "fp4" or "fp8", at random, and `floating` ones with the same weights."""
    for name in ("gate_up_proj", "down_proj"):
        weight, scale = getattr(experts, name), getattr(experts, f"{name}_scale_inv")
        byte = torch.randint(118, 124, scale.shape, dtype=torch.uint8)
        weight.data.view(torch.uint8).random_(0, 256 if kind == "fp4" else 120)
        scale.data.view(torch.uint8).copy_(byte)
        each = [dequantize_expert(w, s) for w, s in zip(weight.data, byte, strict=True)]
        getattr(floating, name).data = torch.stack(each)
