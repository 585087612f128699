"""Calls of `sparse_mla_decode` with its norm, RoPE and quantisation, by position and by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_compile.reference.attention.sparse_mla_decode import DecodeArguments, DecodeQuantArguments
from dsv4_compile.reference.common.rope import apply_rope
from tests.ops.attention.test_sparse_mla_decode import sample

MAX_POSITION, EPS = 50, 1e-6


def rope(tokens: int, rope_dim: int) -> dict[str, Any]:
    """Return positions, some of them outside the table, and a table."""
    angle = torch.randn(MAX_POSITION, rope_dim // 2) * 3
    positions = torch.randint(-3, MAX_POSITION + 3, (tokens,))
    return {"positions": positions, "cos_sin_cache": torch.cat((angle.cos(), angle.sin()), dim=1)}


def options(tokens: int, rope_dim: int, prologue: bool = True, epilogue: bool = True) -> dict[str, Any]:
    """Return options that fuse norm and RoPE before attention and inverse RoPE after it."""
    fused = rope(tokens, rope_dim) | {"inverse_rope": epilogue}
    return fused | ({"q_norm_eps": EPS} if prologue else {})


def call(tokens: int = 3, heads: int = 2, rope_dim: int = 16, **sizes: Any) -> dict[str, Any]:
    """Return every argument of `sparse_mla_decode` except its options, by name, and positions with a table."""
    args = sample(tokens, heads, **sizes)
    return dict(zip(DecodeArguments._fields, args, strict=False)) | rope(tokens, rope_dim)


def positional(arguments: dict[str, Any], *, quant: bool = False) -> tuple[Any, ...]:
    """Return the arguments in the order of the schema, with defaults; those of `sparse_mla_decode` ignore groups."""
    if quant:
        return DecodeQuantArguments(**arguments)
    return DecodeArguments(**{name: x for name, x in arguments.items() if name in DecodeArguments._fields})


def normed_by_a_factor(q: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """Return float32 `q_norm_rope` as the sm_90 kernel for many heads computes it: rounded between RoPE and norm."""
    rotated = apply_rope(q, positions[: len(q)], cos_sin_cache).to(q.dtype)
    return rotated.float() * torch.rsqrt(q.float().square().mean(-1, keepdim=True) + EPS)
