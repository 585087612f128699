"""`torch.ops.dsv4.sparse_mla_decode_ragged`; what it computes is in reference/sparse_mla_decode_ragged.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import check
from ..reference import sparse_mla_decode_ragged as reference
from ..reference.sparse_mla_decode import output_dtype
from ._define import define
from ._validate import E4M3, FLOATS, INTS, expect, expect_dim, expect_kv_cache, expect_rows

_OP = "sparse_mla_decode_ragged"


def _check_list(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    indptr: Tensor,
    block_size: int,
    cache_format: str,
    kv_scale: Tensor | None,
    max_entries: int,
    prefix: str,
) -> None:
    expect_kv_cache(cache, _OP, cache_format, block_size, q.shape[2], kv_scale)
    expect(indices, f"{_OP}: {prefix}indices [N]", INTS)
    expect(indptr, f"{_OP}: {prefix}indptr [T + 1]", INTS)
    expect_rows(indptr.shape[0] - 1, q.shape[0], f"{_OP}: {prefix}indptr")
    check(max_entries >= 0, "E201", got=f"{prefix}max_entries={max_entries}", rule=f"{_OP}: a bound is 0 or positive")


def _check(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    indptr: Tensor,
    block_size: int,
    cache_format: str,
    scale: float,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_indptr: Tensor | None = None,
    extra_block_size: int = 0,
    kv_scale: Tensor | None = None,
    max_entries: int = 0,
    extra_max_entries: int = 0,
) -> None:
    expect(q, f"{_OP}: q [T, H, D]", (*FLOATS, E4M3))
    _check_list(q, k_cache, indices, indptr, block_size, cache_format, kv_scale, max_entries, "")
    if attn_sink is not None:
        expect(attn_sink, f"{_OP}: attn_sink [H]", torch.float32)
        expect_dim(attn_sink.shape[0], q.shape[1], f"{_OP}: attn_sink has one logit for every head of q")
    if extra_k_cache is not None and extra_indices is not None and extra_indptr is not None:
        extra = (extra_k_cache, extra_indices, extra_indptr, extra_block_size, cache_format, kv_scale)
        _check_list(q, *extra, extra_max_entries, "extra_")
        return
    second = {"extra_k_cache": extra_k_cache, "extra_indices": extra_indices, "extra_indptr": extra_indptr}
    missing = [name for name, value in second.items() if value is None]
    check(
        len(missing) == len(second),
        "E201",
        got=f"{_OP} without {', '.join(missing)}",
        rule="a second cache comes with its list of slots and the ends of its rows",
    )


def _fake(q: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape, dtype=output_dtype(q)), q.new_empty(q.shape[:2], dtype=torch.float32)


sparse_mla_decode_ragged = define(
    "sparse_mla_decode_ragged(Tensor q, Tensor k_cache, Tensor indices, Tensor indptr, int block_size, "
    "str cache_format, float scale, Tensor? attn_sink=None, Tensor? extra_k_cache=None, Tensor? extra_indices=None, "
    "Tensor? extra_indptr=None, int extra_block_size=0, Tensor? kv_scale=None, int max_entries=0, "
    "int extra_max_entries=0) -> (Tensor, Tensor)",
    reference=reference.sparse_mla_decode_ragged,
    fake=_fake,
    check=_check,
)
