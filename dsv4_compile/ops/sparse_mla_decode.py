"""`sparse_mla_decode` and its forms with given or quantised outputs; reference/sparse_mla_decode.py defines them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import check
from ..reference import sparse_mla_decode as reference
from ._define import define
from ._validate import (
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
from .inv_rope_fp8_quant import check_groups, new_groups

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
