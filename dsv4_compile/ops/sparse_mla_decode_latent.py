"""`torch.ops.dsv4.sparse_mla_decode_latent`; what it computes is in reference/sparse_mla_decode_latent.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference import sparse_mla_decode_latent as reference
from ._define import define
from ._validate import FLOATS, INTS, expect, expect_kv_cache, expect_rows
from ._validate_batch import expect_positive, expect_range

_OP = "sparse_mla_decode_latent"


def _check(
    q: Tensor, k_cache: Tensor, indices: Tensor, lens: Tensor, block_size: int, scale: float, value_dim: int
) -> None:
    expect(q, f"{_OP}: q [T, H, D]", FLOATS)
    expect_kv_cache(k_cache, _OP, "plain", block_size, q.shape[2])
    expect(indices, f"{_OP}: indices [T, K]", INTS)
    expect(lens, f"{_OP}: lens [T]", INTS)
    expect_rows(indices.shape[0], q.shape[0], f"{_OP}: indices")
    expect_rows(lens.shape[0], q.shape[0], f"{_OP}: lens")
    expect_positive(_OP, value_dim=value_dim)
    expect_range(_OP, "value_dim", value_dim, q.shape[2])


def _fake(
    q: Tensor, k_cache: Tensor, indices: Tensor, lens: Tensor, block_size: int, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q.shape
    return q.new_empty((tokens, heads, value_dim)), q.new_empty((tokens, heads), dtype=torch.float32)


sparse_mla_decode_latent = define(
    "sparse_mla_decode_latent(Tensor q, Tensor k_cache, Tensor indices, Tensor lens, int block_size, float scale, "
    "int value_dim) -> (Tensor, Tensor)",
    reference=reference.sparse_mla_decode_latent,
    fake=_fake,
    check=_check,
)
