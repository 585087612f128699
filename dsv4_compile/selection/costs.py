"""What each op must do: bytes moved and products added, as sympy expressions of its sizes, and the time that allows.

    cost = costs.of("fp8_linear", T=8, K=4096, N=1536)      # 6.4 MB, 0.1 GFLOP
    costs.floor_us(cost, costs.H200)                        # 1.48 us: no implementation is faster

Bytes are those of arguments, read once, and of results; a cache or a table counts with the rows that a call touches.
Flops are those of GEMMs and of the score; a norm or a rotation costs bytes alone. Sizes that are not given stay
symbols, so that a cost can be looked at, compared and differentiated.

Symbols: T tokens, R requests, H heads, D head dim, G groups, N output features (of a group), K input features (of a
group), or keys that a token selects, S rows of a gathered workspace, L logits of a token, C cached entries that a step
reads or writes, W the sliding window or the raw tokens that one entry pools, Q the rank of the queries, `rope` rotated
dims, `width` of a state row; in bytes: `row` a cached row with its scales, `e` an activation, `s` a scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]

from .. import layout
from ..errors import check

_SYMBOLS = sympy.symbols("T R H D G N K S L C W Q rope width row e s", integer=True, nonnegative=True)
T, R, H, D, G, N, K, S, L, C, W, Q, rope, width, row, e, s = _SYMBOLS
_ZERO = sympy.Integer(0)
_INT32, _INT64, _FLOAT32, _E4M3 = 4, 8, 4, 1
_DEFAULTS: dict[str, Any] = {"e": 2, "s": 1}
"""Sizes that are taken unless others are given: bfloat16 activations, UE8M0 scales."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes and flops of one call: integers, or expressions of the sizes that were left open.

    `operands` is the narrowest dtype that the products may be made of, "bfloat16" or "e4m3".
    """

    bytes: Any
    flops: Any
    operands: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured rates of a machine: bytes/s of a large copy, read and written together, flops/s of GEMMs by dtype of
    the operands, and microseconds of an empty node of a CUDA graph."""

    name: str
    copy: float
    flops: Mapping[str, float]
    node_us: float


H200 = Machine("NVIDIA H200", copy=4.3e12, flops={"bfloat16": 790e12, "e4m3": 2 * 790e12}, node_us=1.3)
"""132 multiprocessors, torch 2.11, Triton 3.6, medians of CUDA graph replays: a copy much larger than the L2 cache, and
a large bfloat16 product. The figure of e4m3 is not measured: its data sheet says twice that of bfloat16."""


def floor_us(cost: Cost, machine: Machine, launches: int = 0) -> float:
    """Microseconds below which no implementation gets on `machine`, with `launches` graph nodes on top.

    E201 for a cost with open sizes.
    """
    open_sizes = sorted(map(str, sympy.sympify(cost.bytes + cost.flops).free_symbols))
    check(
        not open_sizes,
        "E201",
        got=f"a cost that depends on {', '.join(open_sizes)}",
        rule="a floor is that of a call of known sizes",
        fix="give every size of costs.sizes(op) to costs.of",
    )
    seconds = max(cost.bytes / machine.copy, cost.flops / machine.flops[cost.operands])
    return 1e6 * seconds + launches * machine.node_us


def names() -> tuple[str, ...]:
    """The ops with a known cost."""
    return tuple(_TABLE)


def sizes(op: str) -> tuple[str, ...]:
    """Names of the sizes that the cost of `op` depends on."""
    symbols = {symbol.name for expression in _expressions(op) for symbol in expression.free_symbols}
    return tuple(symbol.name for symbol in _SYMBOLS if symbol.name in symbols)


def of(op: str, **given: int | sympy.Expr) -> Cost:
    """Cost of one call of `op`. Raises E201 for an op or a size that the table does not know."""
    known = sizes(op)
    unknown = sorted(set(given) - set(known))
    fix = f"pass sizes among {', '.join(known)}"
    rule = f"the cost of {op} depends on {', '.join(known)}"
    check(not unknown, "E201", got=f"sizes {unknown} of {op}", rule=rule, fix=fix)
    low = {name: size for name, size in given.items() if isinstance(size, int) and size < 0}
    check(not low, "E201", got=f"sizes {low} of {op}", rule="a size is at least 0", fix="pass sizes of at least 0")
    sizes_given = _DEFAULTS | given
    values = {symbol: sizes_given[symbol.name] for symbol in _SYMBOLS if symbol.name in sizes_given}
    bytes_, flops = (expression.subs(values) for expression in _expressions(op))
    bytes_, flops = (int(expression) if expression.is_Integer else expression for expression in (bytes_, flops))
    return Cost(bytes_, flops, "e4m3" if op in _E4M3_PRODUCTS else "bfloat16")


def beside(T: int, K: int, N: int, M: int, e: int = 2) -> Cost:
    """Cost that a second, floating weight `[M, K]` adds to a `fp8_linear` of `[N, K]`: both results are float32, and x,
    of `e` bytes an element as that weight, is read once."""
    return Cost(T * (N * (_FLOAT32 - e) + M * _FLOAT32) + e * M * K, 2 * T * M * K)


def row_bytes(cache_format: str, dim: int = layout.HEAD_DIM, itemsize: int = 2) -> int:
    """Bytes of one cached vector of `dim` elements with its scales, in any format of keys and values or of the indexer.

    `itemsize` is that of `plain` rows.
    """
    if cache_format in layout.PAGE_LAYOUTS:
        page = layout.PAGE_LAYOUTS[cache_format]
        return page.data + page.scale
    return dim * (itemsize if cache_format == "plain" else _E4M3)


def _expressions(op: str) -> tuple[sympy.Expr, sympy.Expr]:
    fix = "pass one of costs.names()"
    check(op in _TABLE, "E201", got=repr(op), rule=f"costs are known of {', '.join(_TABLE)}", fix=fix)
    bytes_, flops = _TABLE[op]
    return sympy.sympify(bytes_), sympy.sympify(flops)


_ANGLES = _INT64 + rope * _FLOAT32
_INSERTED = _INT64 + row
_STRIPS = sympy.ceiling(K / layout.ACT_TILE)
_BLOCKS = sympy.ceiling(G * N / layout.WEIGHT_TILE) * _STRIPS
_FLAT_BLOCKS = _BLOCKS.subs(G, 1)
_ALIGNED = layout.INDEX_ALIGN * sympy.ceiling((K + W) / layout.INDEX_ALIGN)
_QUERIES = H * (D + _FLOAT32) + 2 * _INT32
_COEFFICIENTS = _FLOAT32 * (G + G * G)
_MIX = _FLOAT32 * ((G + 2) * G * (G * D + 1) + 3 + D)
_HEADS = T * H * (2 * e * D + _FLOAT32)

_TABLE: dict[str, tuple[Any, Any]] = {
    # Around the projections.
    "fused_q_kv_rmsnorm": (2 * T * e * (Q + D) + e * (Q + D), _ZERO),
    "q_norm_rope": (T * (_ANGLES + 2 * e * H * D), _ZERO),
    "preprocess_insert": (T * (e * (2 * Q + D) + _ANGLES + _INSERTED) + e * (Q + D), _ZERO),
    "preprocess_insert_quant": (
        T * (e * (Q + D) + Q * _E4M3 + _FLOAT32 * sympy.ceiling(Q / layout.ACT_TILE) + _ANGLES + _INSERTED)
        + e * (Q + D),
        _ZERO,
    ),
    "kv_rope_insert": (T * (_ANGLES + e * D + _INSERTED), _ZERO),
    "q_norm_rope_kv_insert": (T * (_ANGLES + 2 * e * H * D + e * D + _INSERTED), _ZERO),
    "quantize_and_insert_k_cache": (T * (e * D + _INSERTED), _ZERO),
    "dequantize_and_gather_k_cache": (S * (row + e * D), _ZERO),
    "inv_rope": (T * (_ANGLES + 2 * e * H * D), _ZERO),
    "inv_rope_fp8_quant": (T * (_ANGLES + (e + _E4M3) * H * D + _FLOAT32 * H * D / layout.ACT_TILE), _ZERO),
    # Matrix products.
    "fp8_linear": (e * T * (K + N) + N * K + s * _FLAT_BLOCKS, 2 * T * N * K),
    "fp8_grouped_einsum": (
        T * G * (K + _FLOAT32 * _STRIPS + 2 * N) + G * N * K + s * _BLOCKS,
        2 * T * G * N * K,
    ),
    "fp8_grouped_einsum_quant": (
        T * G * (K + _FLOAT32 * _STRIPS + N * _E4M3 + _FLOAT32 * N / layout.ACT_TILE) + G * N * K + s * _BLOCKS,
        2 * T * G * N * K,
    ),
    "grouped_linear": (e * G * (T * (K + N) + N * K), 2 * T * G * N * K),
    # Hyper-connections.
    "mhc_pre": (T * (e * (G + 1) * D + _COEFFICIENTS) + _MIX, 2 * T * (G + 2) * G * G * D),
    "mhc_post": (T * (e * (2 * G + 1) * D + _COEFFICIENTS), _ZERO),
    "mhc_boundary": (T * (e * (2 * G + 2) * D + 2 * _COEFFICIENTS) + _MIX, 2 * T * (G + 2) * G * G * D),
    "mhc_head": (T * e * (G + 1) * D + _FLOAT32 * (G * G * D + G + 1 + D), 2 * T * G * G * D),
    # Mixture of experts.
    "moe_experts": (
        T * (2 * e * D + K * (_INT32 + _FLOAT32)) + sympy.Min(N, T * K) * row,
        6 * T * K * D * L,
    ),
    "moe_route": (e * D * (T + N) + _FLOAT32 * N + T * K * (_INT32 + _FLOAT32), 2 * T * N * D),
    # Drafts.
    "accept_drafts": (
        R * (N * (e * (K + 1) + _FLOAT32 * K) + _INT64 * (2 * K + 7) + _INT32),
        _ZERO,
    ),
    "markov_drafts": (
        R * K * (N * (e + _FLOAT32) + e * D + _INT64) + e * K * N * D + R * 7 * _INT64,
        2 * R * K * N * D,
    ),
    # Compressors and indexer.
    "save_partial_states": (T * (2 * _FLOAT32 * width + 2 * _INT64), _ZERO),
    "compress_norm_rope_insert": (C * (2 * _FLOAT32 * W * D + row) + T * (3 * _INT64 + _INT32), _ZERO),
    "indexer_q_rope_quant": (T * (H * ((e + _E4M3) * D + e + _FLOAT32) + _ANGLES), _ZERO),
    "indexer_logits": (C * row + T * (_QUERIES + _FLOAT32 * L), 2 * T * H * D * L),
    "indexer_logits_topk": (C * row + T * (_QUERIES + _INT32 * K), 2 * T * H * D * L),
    "indexer_topk_slots": (C * row + T * (_QUERIES + _INT32 * (K + 1)), 2 * T * H * D * L),
    "indexer_logits_topk_ragged": (C * row + T * (_QUERIES + _INT32 * K), 2 * T * H * D * L),
    "cp_gather_indexer_k": (2 * S * row, _ZERO),
    # Indices.
    "global_topk": (T * (2 * _INT32 * K + _INT32), _ZERO),
    "global_topk_ragged": (T * (2 * _INT32 * K + 2 * _INT32), _ZERO),
    "ragged_from_dense": (T * (2 * _INT32 * K + 2 * _INT32), _ZERO),
    "combine_topk_swa": (T * _INT32 * (K + _ALIGNED + 1), _ZERO),
    "combine_topk_swa_ragged": (T * (_INT32 * (2 * K + W) + 2 * _INT32), _ZERO),
    "convert_req_index": (T * (2 * _INT32 * K + 2 * _INT32), _ZERO),
    "compressed_slot_mapping": (2 * T * _INT64, _ZERO),
    "c128a_topk_metadata": (T * (3 * _INT64 + _INT32 * (K + 1)), _ZERO),
    "flashinfer_mixed_indices": (T * (_INT32 * 2 * (K + W) + _INT32), _ZERO),
    "swa_metadata": (T * (_INT32 * (W + 2) + 1), _ZERO),
    "batch_metadata": (T * (8 * _INT64 + 5 * _INT32 + 1 + _INT32 * (W + K)), _ZERO),
    "advance": (R * (6 * _INT32 + 2 * _INT64), _ZERO),
    "copy_ragged_to_graph_buffers": (T * (2 * _INT32 * K + 2 * _INT32), _ZERO),
    "prefill_gather_lens": (3 * R * _INT32, _ZERO),
    # Attention.
    "sparse_mla_decode": (T * K * (row + _INT32) + _HEADS, 4 * T * H * K * D),
    "sparse_mla_decode_ragged": (T * K * (row + _INT32) + _HEADS, 4 * T * H * K * D),
    "sparse_mla_decode_latent": (
        T * (K * (row + _INT32) + H * (e * (D + N) + _FLOAT32)),
        2 * T * H * K * (D + N),
    ),
    "sparse_mla_decode_out": (T * K * (row + _INT32) + _HEADS, 4 * T * H * K * D),
    "sparse_mla_decode_quant": (
        T * (K * (row + _INT32) + H * D * (e + _E4M3) + _FLOAT32 * H * D / layout.ACT_TILE),
        4 * T * H * K * D,
    ),
    "sparse_mla_prefill": (e * S * D + T * (_INT32 * K + _FLOAT32 * H) + _HEADS, 4 * T * H * K * D),
    "sparse_mla_prefill_ragged": (e * S * D + T * (_INT32 * K + _FLOAT32 * H) + _HEADS, 4 * T * H * K * D),
}
"""Bytes and flops by name of the op. Index rows are counted at their full width, K or W; keys of `sparse_mla_decode`
are those of both caches together, each read once for every token that attends it. `preprocess_insert`, quantised or
not, is counted without compressors: each adds a `save_partial_states` and a `compress_norm_rope_insert`. N of
`sparse_mla_decode_latent` is the dims of a value. G of hyper-connections is their streams; `mhc_head` is counted
without the output of a sub-layer, and weights in float32. Of drafts, K is how many a request has, N the vocabulary and
D the rank of the Markov head; each draft reads its `w2` once for all requests."""

_E4M3_PRODUCTS = {
    "fp8_linear",
    "fp8_grouped_einsum",
    "fp8_grouped_einsum_quant",
    "indexer_logits",
    "indexer_logits_topk",
    "indexer_logits_topk_ragged",
    "indexer_topk_slots",
}
