"""Schemas, checks and fakes of `sparse_mla_decode` and its variants; reference/attention/ defines what they compute."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...cpu.attention import sparse_mla_decode as cpu
from ...errors import check
from ...layout import cdiv
from ...reference.attention import sparse_mla_decode as reference
from ...reference.attention.sparse_mla_decode import (
    DecodeArguments,
    DecodeOutArguments,
    DecodeQuantArguments,
    LatentDecodeArguments,
    RaggedDecodeArguments,
)
from ...selection.costs import FLOAT32, FP8, INT32, CallSizes, CostModel, act_tiles
from ..common.define import define
from ..common.invariance import AS_IT_IS, PINNED, Invariance
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

_OP, _RAGGED, _LATENT = "sparse_mla_decode", "sparse_mla_decode_ragged", "sparse_mla_decode_latent"


def _check_slots(op: str, prefix: str, tokens: int, indices: Tensor, lens: Tensor, columns: str = "N") -> None:
    """Check the rows of slots of one cache."""
    expect(indices, f"{op}: {prefix}indices [T, {columns}]", INTS)
    expect(lens, f"{op}: {prefix}lens [T]", INTS)
    expect_rows(indices.shape[0], tokens, f"{op}: {prefix}indices")
    expect_rows(lens.shape[0], tokens, f"{op}: {prefix}lens")


def _check_sink(op: str, call: DecodeArguments | RaggedDecodeArguments) -> None:
    if call.attn_sink is not None:
        expect(call.attn_sink, f"{op}: attn_sink [H]", torch.float32)
        expect_dim(call.attn_sink.shape[0], call.q.shape[1], f"{op}: attn_sink has one logit for every head of q")


def _check_all_or_none(op: str, rule: str, **arguments: Tensor | None) -> None:
    """Check that either all `arguments` of a second cache are given or none."""
    missing = [name for name, value in arguments.items() if value is None]
    check(len(missing) in (0, len(arguments)), "E201", got=f"{op} without {', '.join(missing)}", rule=rule)


def _check_rope(call: DecodeArguments) -> None:
    q, positions, table = call.q, call.positions, call.cos_sin_cache
    if positions is not None and table is not None:
        expect(positions, f"{_OP}: positions [T]", INTS)
        expect_rows(positions.shape[0], q.shape[0], f"{_OP}: positions")
        expect_rope_table(table, _OP, q.shape[2])
    else:
        names = {"positions": positions, "cos_sin_cache": table}
        present = [name for name, value in names.items() if value is not None]
        present += ["q_norm_eps"] * (call.q_norm_eps is not None) + ["inverse_rope"] * call.inverse_rope
        check(
            not present,
            "E201",
            got=f"{_OP} with {', '.join(present)}, without {' or '.join(n for n, v in names.items() if v is None)}",
            rule="positions and cos_sin_cache come together; q_norm_eps and inverse_rope need them",
        )
    check(
        call.q_norm_eps is None or q.dtype is not E4M3,
        "E201",
        got=f"{_OP}: q_norm_eps with q {describe(q)}",
        rule="what q_norm_eps normalises is bfloat16, float16 or float32",
    )


def _check(call: DecodeArguments) -> None:
    q, cache_format, kv_scale = call.q, call.cache_format, call.kv_scale
    expect(q, f"{_OP}: q [T, H, D]", (*FLOATS, E4M3))
    expect_kv_cache(call.k_cache, _OP, cache_format, call.block_size, q.shape[2], kv_scale)
    _check_slots(_OP, "", q.shape[0], call.indices, call.lens)
    _check_rope(call)
    _check_sink(_OP, call)
    extra, indices, lens = call.extra_k_cache, call.extra_indices, call.extra_lens
    if extra is not None and indices is not None and lens is not None:
        expect_kv_cache(extra, _OP, cache_format, call.extra_block_size, q.shape[2], kv_scale)
        _check_slots(_OP, "extra_", q.shape[0], indices, lens)
    rule = "a second cache comes with its indices and its lengths"
    _check_all_or_none(_OP, rule, extra_k_cache=extra, extra_indices=indices, extra_lens=lens)


def _fake(call: DecodeArguments | RaggedDecodeArguments) -> tuple[Tensor, Tensor]:
    q = call.q
    return q.new_empty(q.shape, dtype=reference.output_dtype(q)), q.new_empty(q.shape[:2], dtype=torch.float32)


def _check_out(call: Any) -> None:
    out, lse, *arguments = call
    _check(DecodeArguments(*arguments))
    expect(out, f"{_OP}_out: out [T, H, D]", reference.output_dtype(call.q))
    expect(lse, f"{_OP}_out: lse [T, H]", torch.float32)
    check(
        out.shape == call.q.shape and lse.shape == call.q.shape[:2],
        "E201",
        got=f"out {describe(out)}, lse {describe(lse)}, q {describe(call.q)}",
        rule=f"{_OP}_out: out has the shape of q, and lse its tokens and heads",
    )


def _fake_out(call: Any) -> None:
    return None


def _check_quant(call: DecodeQuantArguments) -> None:
    _check(call.decode())
    check_groups(call.q, call.n_groups, call.group_heads(), f"{_OP}_quant")


def _fake_quant(call: DecodeQuantArguments) -> tuple[Tensor, Tensor]:
    return new_groups(call.q, call.n_groups, call.group_heads(), call.packed_scales)


def _check_latent(call: LatentDecodeArguments) -> None:
    expect(call.q, f"{_LATENT}: q [T, H, D]", FLOATS)
    expect_kv_cache(call.k_cache, _LATENT, "plain", call.block_size, call.q.shape[2])
    _check_slots(_LATENT, "", call.q.shape[0], call.indices, call.lens, columns="K")
    expect_positive(_LATENT, value_dim=call.value_dim)
    expect_range(_LATENT, "value_dim", call.value_dim, call.q.shape[2])


def _fake_latent(call: LatentDecodeArguments) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = call.q.shape
    return call.q.new_empty((tokens, heads, call.value_dim)), call.q.new_empty((tokens, heads), dtype=torch.float32)


def _check_list(prefix: str, tokens: int, indices: Tensor, indptr: Tensor, max_entries: int) -> None:
    """Check the list of slots of one cache."""
    expect(indices, f"{_RAGGED}: {prefix}indices [N]", INTS)
    expect(indptr, f"{_RAGGED}: {prefix}indptr [T + 1]", INTS)
    expect_rows(indptr.shape[0] - 1, tokens, f"{_RAGGED}: {prefix}indptr")
    check(
        max_entries >= 0, "E201", got=f"{prefix}max_entries={max_entries}", rule=f"{_RAGGED}: a bound is 0 or positive"
    )


def _check_ragged(call: RaggedDecodeArguments) -> None:
    q, cache_format, kv_scale = call.q, call.cache_format, call.kv_scale
    expect(q, f"{_RAGGED}: q [T, H, D]", (*FLOATS, E4M3))
    expect_kv_cache(call.k_cache, _RAGGED, cache_format, call.block_size, q.shape[2], kv_scale)
    _check_list("", q.shape[0], call.indices, call.indptr, call.max_entries)
    _check_sink(_RAGGED, call)
    extra, indices, indptr = call.extra_k_cache, call.extra_indices, call.extra_indptr
    if extra is not None and indices is not None and indptr is not None:
        expect_kv_cache(extra, _RAGGED, cache_format, call.extra_block_size, q.shape[2], kv_scale)
        _check_list("extra_", q.shape[0], indices, indptr, call.extra_max_entries)
    rule = "a second cache comes with its list of slots and the ends of its rows"
    _check_all_or_none(_RAGGED, rule, extra_k_cache=extra, extra_indices=indices, extra_indptr=indptr)


def head_bytes(T: Any, H: Any, D: Any, e: Any) -> Any:
    """Return the bytes of queries, outputs and LSE of all heads."""
    return T * H * (2 * e * D + FLOAT32)


def ragged_sizes(call: CallSizes) -> dict[str, int]:
    """Return the sizes of a call with lists of slots: as many keys a token as the mean."""
    q, keys = call.of_heads("q"), call.dims("indices")[0]
    if call.arguments.get("extra_indices") is not None:
        keys += call.dims("extra_indices")[0]
    sizes = q | {"K": cdiv(keys, max(1, q["T"]))}
    return sizes | ({"S": call.dims("kv")[0]} if "kv" in call.arguments else call.row(q["D"], "q"))


def _attended_sizes(call: CallSizes) -> dict[str, int]:
    q, extra = call.of_heads("q"), call.arguments.get("extra_indices")
    keys = call.dims("indices")[-1] + (0 if extra is None else call.dims("extra_indices")[-1])
    return q | {"K": keys} | call.row(q["D"], "q")


def _latent_sizes(call: CallSizes) -> dict[str, int]:
    q = call.of_heads("q")
    return q | {"K": call.dims("indices")[-1], "N": call.arguments["value_dim"], "row": q["D"] * q["e"]}


sparse_mla_decode = define(
    "sparse_mla_decode",
    arguments=DecodeArguments,
    reference=reference.sparse_mla_decode,
    on_cpu=cpu.sparse_mla_decode,
    fake=_fake,
    check=_check,
    kernel="dsv4_compile.kernels.attention.sparse_mla_decode",
    cost=CostModel(
        lambda T, H, D, K, row, e=2: (T * K * (row + INT32) + head_bytes(T, H, D, e), 4 * T * H * K * D),
        sizes=_attended_sizes,
    ),
    invariant=Invariance(
        rows=("q", "indices", "lens", "extra_indices", "extra_lens", "positions"), on_cpu=AS_IT_IS, kernel=PINNED
    ),
)
sparse_mla_decode_out = define(
    "sparse_mla_decode_out",
    mutates=("out", "lse"),
    arguments=DecodeOutArguments,
    reference=reference.sparse_mla_decode_out,
    on_cpu=partial(reference.sparse_mla_decode_out, decode=cpu.sparse_mla_decode),
    fake=_fake_out,
    check=_check_out,
    kernel="dsv4_compile.kernels.attention.sparse_mla_decode",
    cost=CostModel(
        lambda T, H, D, K, row, e=2: (T * K * (row + INT32) + head_bytes(T, H, D, e), 4 * T * H * K * D),
        sizes=_attended_sizes,
    ),
)
sparse_mla_decode_quant = define(
    "sparse_mla_decode_quant",
    arguments=DecodeQuantArguments,
    reference=reference.sparse_mla_decode_quant,
    on_cpu=partial(reference.sparse_mla_decode_quant, decode=cpu.sparse_mla_decode),
    fake=_fake_quant,
    check=_check_quant,
    kernel="dsv4_compile.kernels.attention.sparse_mla_decode",
    cost=CostModel(
        lambda T, H, D, K, row, e=2: (
            T * (K * (row + INT32) + H * D * (e + FP8) + FLOAT32 * act_tiles(H * D)),
            4 * T * H * K * D,
        ),
        sizes=lambda call: _attended_sizes(call) | call.grouped_heads,
    ),
    invariant=Invariance(rows=("q", "indices", "lens", "extra_indices", "extra_lens", "positions"), kernel=PINNED),
)
sparse_mla_decode_latent = define(
    "sparse_mla_decode_latent",
    arguments=LatentDecodeArguments,
    reference=reference.sparse_mla_decode_latent,
    on_cpu=partial(reference.sparse_mla_decode_latent, decode=cpu.sparse_mla_decode),
    fake=_fake_latent,
    check=_check_latent,
    kernel="dsv4_compile.kernels.attention.sparse_mla_decode",
    cost=CostModel(
        lambda T, H, D, N, K, row, e=2: (
            T * (K * (row + INT32) + H * (e * (D + N) + FLOAT32)),
            2 * T * H * K * (D + N),
        ),
        sizes=_latent_sizes,
    ),
)
sparse_mla_decode_ragged = define(
    "sparse_mla_decode_ragged",
    arguments=RaggedDecodeArguments,
    reference=reference.sparse_mla_decode_ragged,
    on_cpu=partial(reference.sparse_mla_decode_ragged, decode=cpu.sparse_mla_decode),
    fake=_fake,
    check=_check_ragged,
    kernel="dsv4_compile.kernels.attention.sparse_mla_decode",
    cost=CostModel(
        lambda T, H, D, K, row, e=2: (T * K * (row + INT32) + head_bytes(T, H, D, e), 4 * T * H * K * D),
        sizes=ragged_sizes,
    ),
)
