"""`torch.ops.dsv4.sparse_mla_decode`; what it computes is in reference/sparse_mla_decode.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import check
from ..reference import sparse_mla_decode as reference
from ._define import define
from ._validate import E4M3, FLOATS, INTS, expect, expect_dim, expect_kv_cache, expect_rows

_OP = "sparse_mla_decode"


def _check_cache(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    block_size: int,
    cache_format: str,
    kv_scale: Tensor | None,
    prefix: str,
) -> None:
    expect_kv_cache(cache, _OP, cache_format, block_size, q.shape[2], kv_scale)
    expect(indices, f"{_OP}: {prefix}indices [T, N]", INTS)
    expect(lens, f"{_OP}: {prefix}lens [T]", INTS)
    expect_rows(indices.shape[0], q.shape[0], f"{_OP}: {prefix}indices")
    expect_rows(lens.shape[0], q.shape[0], f"{_OP}: {prefix}lens")


def _check(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    block_size: int,
    cache_format: str,
    scale: float,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lens: Tensor | None = None,
    extra_block_size: int = 0,
    kv_scale: Tensor | None = None,
) -> None:
    expect(q, f"{_OP}: q [T, H, D]", (*FLOATS, E4M3))
    _check_cache(q, k_cache, indices, lens, block_size, cache_format, kv_scale, "")
    if attn_sink is not None:
        expect(attn_sink, f"{_OP}: attn_sink [H]", torch.float32)
        expect_dim(attn_sink.shape[0], q.shape[1], f"{_OP}: attn_sink has one logit for every head of q")
    extra = (extra_k_cache, extra_indices, extra_lens)
    if extra_k_cache is not None and extra_indices is not None and extra_lens is not None:
        _check_cache(q, extra_k_cache, extra_indices, extra_lens, extra_block_size, cache_format, kv_scale, "extra_")
        return
    names = ("extra_k_cache", "extra_indices", "extra_lens")
    missing = [name for name, value in zip(names, extra, strict=True) if value is None]
    check(
        len(missing) == len(extra),
        "E201",
        got=f"{_OP} without {', '.join(missing)}",
        rule="a second cache comes with its indices and its lengths",
    )


def _fake(q: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    return (
        q.new_empty(q.shape, dtype=reference.output_dtype(q)),
        q.new_empty(q.shape[:2], dtype=torch.float32),
    )


sparse_mla_decode = define(
    "sparse_mla_decode(Tensor q, Tensor k_cache, Tensor indices, Tensor lens, int block_size, str cache_format, "
    "float scale, Tensor? attn_sink=None, Tensor? extra_k_cache=None, Tensor? extra_indices=None, "
    "Tensor? extra_lens=None, int extra_block_size=0, Tensor? kv_scale=None) -> (Tensor, Tensor)",
    reference=reference.sparse_mla_decode,
    fake=_fake,
    check=_check,
)
