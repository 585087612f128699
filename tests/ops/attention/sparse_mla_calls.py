"""Calls of `sparse_mla_decode` with its norm, RoPE and quantisation, by position and by name."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from dsv4_compile.reference.attention.sparse_mla_decode import sparse_mla_decode_quant
from dsv4_compile.reference.common.rope import apply_rope
from tests.ops.attention.test_sparse_mla_decode import sample

NAMES = list(inspect.signature(sparse_mla_decode_quant).parameters)
"""Arguments of the ops in order, those of the quantised form last."""
MAX_POSITION, EPS = 50, 1e-6


def rope(tokens: int, rope_dim: int) -> dict[str, Any]:
    """Positions, some of them outside the table, and a table."""
    angle = torch.randn(MAX_POSITION, rope_dim // 2) * 3
    positions = torch.randint(-3, MAX_POSITION + 3, (tokens,))
    return {"positions": positions, "cos_sin_cache": torch.cat((angle.cos(), angle.sin()), dim=1)}


def options(tokens: int, rope_dim: int, prologue: bool = True, epilogue: bool = True) -> dict[str, Any]:
    """Options that fuse a norm and RoPE in front and the inverse RoPE behind."""
    made = rope(tokens, rope_dim) | {"inverse_rope": epilogue}
    return made | ({"q_norm_eps": EPS} if prologue else {})


def call(tokens: int = 3, heads: int = 2, rope_dim: int = 16, **sizes: Any) -> dict[str, Any]:
    """Every argument of `sparse_mla_decode` but its options, by name, and positions with a table."""
    args = sample(tokens, heads, **sizes)
    return dict(zip(NAMES, args, strict=False)) | rope(tokens, rope_dim)


def positional(arguments: dict[str, Any], *, quant: bool = False) -> tuple[Any, ...]:
    """The arguments in the order of the schema, defaults filled in."""
    defaults = inspect.signature(sparse_mla_decode_quant).parameters
    names = NAMES if quant else NAMES[:-3]
    merged = {name: arguments.get(name, defaults[name].default) for name in names}
    if not quant:
        merged["inverse_rope"] = arguments.get("inverse_rope", False)
    return tuple(merged.values())


def normed_by_a_factor(q: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """float32 `q_norm_rope` as the Hopper kernel for many heads has it: rounded between RoPE and norm, not behind."""
    turned = apply_rope(q, positions[: len(q)], cos_sin_cache).to(q.dtype)
    return turned.float() * torch.rsqrt(q.float().square().mean(-1, keepdim=True) + EPS)
