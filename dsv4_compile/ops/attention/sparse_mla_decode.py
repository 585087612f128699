"""`sparse_mla_decode` and its forms with given or quantised outputs; reference/sparse_mla_decode.py defines them.

`torch.ops.dsv4.sparse_mla_decode_latent`; what it computes is in reference/sparse_mla_decode_latent.py.

`torch.ops.dsv4.sparse_mla_decode_ragged`; what it computes is in reference/sparse_mla_decode_ragged.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import check
from ...reference.attention import sparse_mla_decode as reference
from ...reference.attention.sparse_mla_decode import output_dtype
from ..common.define import define
from ..common.validate import (
    E4M3,
    FLOATS,
    INTS,
    describe,
    expect,
    expect_dim,
    expect_kv_cache,
    expect_rope_table,
    expect_rows,
)
from ..common.validate_batch import expect_positive, expect_range
from .inv_rope import check_groups, new_groups

_OP = "sparse_mla_decode"
_CALL = (
    "Tensor q, Tensor k_cache, Tensor indices, Tensor lens, int block_size, str cache_format, float scale, "
    "Tensor? attn_sink=None, Tensor? extra_k_cache=None, Tensor? extra_indices=None, Tensor? extra_lens=None, "
    "int extra_block_size=0, Tensor? kv_scale=None, Tensor? positions=None, Tensor? cos_sin_cache=None, "
    "float? q_norm_eps=None, bool inverse_rope={inverse_rope}, bool batch_invariant=False"
)


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


def _check_rope(
    q: Tensor,
    positions: Tensor | None,
    cos_sin_cache: Tensor | None,
    q_norm_eps: float | None,
    inverse_rope: bool,
) -> None:
    if positions is not None and cos_sin_cache is not None:
        expect(positions, f"{_OP}: positions [T]", INTS)
        expect_rows(positions.shape[0], q.shape[0], f"{_OP}: positions")
        expect_rope_table(cos_sin_cache, _OP, q.shape[2])
    else:
        names = {"positions": positions, "cos_sin_cache": cos_sin_cache}
        given = [name for name, value in names.items() if value is not None]
        given += ["q_norm_eps"] * (q_norm_eps is not None) + ["inverse_rope"] * inverse_rope
        check(
            not given,
            "E201",
            got=f"{_OP} with {', '.join(given)}, without {' or '.join(n for n, v in names.items() if v is None)}",
            rule="positions and cos_sin_cache come together; q_norm_eps and inverse_rope need them",
        )
    check(
        q_norm_eps is None or q.dtype is not E4M3,
        "E201",
        got=f"{_OP}: q_norm_eps with q {describe(q)}",
        rule="what q_norm_eps normalises is bfloat16, float16 or float32",
    )


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
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    q_norm_eps: float | None = None,
    inverse_rope: bool = False,
    batch_invariant: bool = False,
) -> None:
    expect(q, f"{_OP}: q [T, H, D]", (*FLOATS, E4M3))
    _check_cache(q, k_cache, indices, lens, block_size, cache_format, kv_scale, "")
    _check_rope(q, positions, cos_sin_cache, q_norm_eps, inverse_rope)
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


def _check_out(out: Tensor, lse: Tensor, q: Tensor, *rest: Any, **options: Any) -> None:
    _check(q, *rest, **options)
    expect(out, f"{_OP}_out: out [T, H, D]", reference.output_dtype(q))
    expect(lse, f"{_OP}_out: lse [T, H]", torch.float32)
    check(
        out.shape == q.shape and lse.shape == q.shape[:2],
        "E201",
        got=f"out {describe(out)}, lse {describe(lse)}, q {describe(q)}",
        rule=f"{_OP}_out: out has the shape of q, and lse its tokens and heads",
    )


def _fake_out(*_: object, **__: object) -> None:
    return None


def _check_quant(
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
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    q_norm_eps: float | None = None,
    inverse_rope: bool = True,
    batch_invariant: bool = False,
    n_groups: int = 1,
    heads_per_group: int = 0,
    packed_scales: bool = False,
) -> None:
    _check(
        q,
        k_cache,
        indices,
        lens,
        block_size,
        cache_format,
        scale,
        attn_sink,
        extra_k_cache,
        extra_indices,
        extra_lens,
        extra_block_size,
        kv_scale,
        positions,
        cos_sin_cache,
        q_norm_eps,
        inverse_rope,
        batch_invariant,
    )
    check_groups(q, n_groups, reference.group_heads(q.shape[1], n_groups, heads_per_group), f"{_OP}_quant")


def _fake_quant(
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
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    q_norm_eps: float | None = None,
    inverse_rope: bool = True,
    batch_invariant: bool = False,
    n_groups: int = 1,
    heads_per_group: int = 0,
    packed_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    return new_groups(q, n_groups, reference.group_heads(q.shape[1], n_groups, heads_per_group), packed_scales)


sparse_mla_decode = define(
    f"sparse_mla_decode({_CALL.format(inverse_rope=False)}) -> (Tensor, Tensor)",
    reference=reference.sparse_mla_decode,
    fake=_fake,
    check=_check,
)
sparse_mla_decode_out = define(
    f"sparse_mla_decode_out(Tensor(a!) out, Tensor(b!) lse, {_CALL.format(inverse_rope=False)}) -> ()",
    reference=reference.sparse_mla_decode_out,
    fake=_fake_out,
    check=_check_out,
)
sparse_mla_decode_quant = define(
    f"sparse_mla_decode_quant({_CALL.format(inverse_rope=True)}, int n_groups=1, int heads_per_group=0, "
    "bool packed_scales=False) -> (Tensor, Tensor)",
    reference=reference.sparse_mla_decode_quant,
    fake=_fake_quant,
    check=_check_quant,
)


_LATENT = "sparse_mla_decode_latent"


def _check_latent(
    q: Tensor, k_cache: Tensor, indices: Tensor, lens: Tensor, block_size: int, scale: float, value_dim: int
) -> None:
    expect(q, f"{_LATENT}: q [T, H, D]", FLOATS)
    expect_kv_cache(k_cache, _LATENT, "plain", block_size, q.shape[2])
    expect(indices, f"{_LATENT}: indices [T, K]", INTS)
    expect(lens, f"{_LATENT}: lens [T]", INTS)
    expect_rows(indices.shape[0], q.shape[0], f"{_LATENT}: indices")
    expect_rows(lens.shape[0], q.shape[0], f"{_LATENT}: lens")
    expect_positive(_LATENT, value_dim=value_dim)
    expect_range(_LATENT, "value_dim", value_dim, q.shape[2])


def _fake_latent(
    q: Tensor, k_cache: Tensor, indices: Tensor, lens: Tensor, block_size: int, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q.shape
    return q.new_empty((tokens, heads, value_dim)), q.new_empty((tokens, heads), dtype=torch.float32)


sparse_mla_decode_latent = define(
    "sparse_mla_decode_latent(Tensor q, Tensor k_cache, Tensor indices, Tensor lens, int block_size, float scale, "
    "int value_dim) -> (Tensor, Tensor)",
    reference=reference.sparse_mla_decode_latent,
    fake=_fake_latent,
    check=_check_latent,
)


_RAGGED = "sparse_mla_decode_ragged"


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
    expect_kv_cache(cache, _RAGGED, cache_format, block_size, q.shape[2], kv_scale)
    expect(indices, f"{_RAGGED}: {prefix}indices [N]", INTS)
    expect(indptr, f"{_RAGGED}: {prefix}indptr [T + 1]", INTS)
    expect_rows(indptr.shape[0] - 1, q.shape[0], f"{_RAGGED}: {prefix}indptr")
    check(
        max_entries >= 0, "E201", got=f"{prefix}max_entries={max_entries}", rule=f"{_RAGGED}: a bound is 0 or positive"
    )


def _check_ragged(
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
    expect(q, f"{_RAGGED}: q [T, H, D]", (*FLOATS, E4M3))
    _check_list(q, k_cache, indices, indptr, block_size, cache_format, kv_scale, max_entries, "")
    if attn_sink is not None:
        expect(attn_sink, f"{_RAGGED}: attn_sink [H]", torch.float32)
        expect_dim(attn_sink.shape[0], q.shape[1], f"{_RAGGED}: attn_sink has one logit for every head of q")
    if extra_k_cache is not None and extra_indices is not None and extra_indptr is not None:
        extra = (extra_k_cache, extra_indices, extra_indptr, extra_block_size, cache_format, kv_scale)
        _check_list(q, *extra, extra_max_entries, "extra_")
        return
    second = {"extra_k_cache": extra_k_cache, "extra_indices": extra_indices, "extra_indptr": extra_indptr}
    missing = [name for name, value in second.items() if value is None]
    check(
        len(missing) == len(second),
        "E201",
        got=f"{_RAGGED} without {', '.join(missing)}",
        rule="a second cache comes with its list of slots and the ends of its rows",
    )


def _fake_ragged(q: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape, dtype=output_dtype(q)), q.new_empty(q.shape[:2], dtype=torch.float32)


sparse_mla_decode_ragged = define(
    "sparse_mla_decode_ragged(Tensor q, Tensor k_cache, Tensor indices, Tensor indptr, int block_size, "
    "str cache_format, float scale, Tensor? attn_sink=None, Tensor? extra_k_cache=None, Tensor? extra_indices=None, "
    "Tensor? extra_indptr=None, int extra_block_size=0, Tensor? kv_scale=None, int max_entries=0, "
    "int extra_max_entries=0) -> (Tensor, Tensor)",
    reference=reference.sparse_mla_decode_ragged,
    fake=_fake_ragged,
    check=_check_ragged,
)
