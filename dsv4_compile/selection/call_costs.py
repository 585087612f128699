"""The cost of one call from its arguments, as the code that chooses an implementation sees them: by their shapes alone.

    cost = call_costs.of("sparse_mla_decode", arguments)  # the most that the call can have to do

What a call touches depends on values that nobody knows while it is compiled. So index rows count at their full width,
an indexer scores as many entries as its block table has room for, and of a compressor one token in R closes a group of
ratio R. Dynamic dims count with the size they were traced with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import layout
from . import costs


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of a call by schema name: fake tensors and plain values. Mutated caches may be absent."""

    arguments: Mapping[str, Any]

    def dims(self, name: str) -> list[int]:
        """Shape of a tensor. ValueError for a size that has no number yet."""
        return [_number(size) for size in self.arguments[name].shape]

    def size(self, name: str) -> int:
        """Bytes of an element."""
        return int(self.arguments[name].element_size())

    def of_heads(self, name: str) -> dict[str, int]:
        """Sizes of `[T, H, D]`."""
        return dict(zip(("T", "H", "D"), self.dims(name), strict=True)) | {"e": self.size(name)}

    def of_rows(self, name: str) -> dict[str, int]:
        """Sizes of `[T, D]`."""
        return dict(zip(("T", "D"), self.dims(name), strict=True)) | {"e": self.size(name)}

    def of_streams(self) -> dict[str, int]:
        """Sizes of `[T, G, D]` streams."""
        return dict(zip(("T", "G", "D"), self.dims("streams"), strict=True)) | {"e": self.size("streams")}

    def row(self, dim: int, like: str, cache_format: str = "cache_format") -> dict[str, int]:
        """Bytes of a row; plain rows are as wide as elements of `like`."""
        return {"row": costs.row_bytes(self.arguments[cache_format], dim, self.size(like))}

    @property
    def rope(self) -> dict[str, int]:
        """Rotated dims."""
        return {"rope": self.dims("cos_sin_cache")[-1]}


def of(op: str, arguments: Mapping[str, Any]) -> costs.Cost | None:
    """Cost of a call of `op`, or None where its arguments do not tell."""
    if op not in _SIZES:
        return None
    call = _Call(arguments)
    try:
        cost = costs.of(op, **{name: size for name, size in _SIZES[op](call).items() if name in costs.sizes(op)})
        parts = _PARTS[op](call) if op in _PARTS else []
    except (ValueError, ZeroDivisionError):  # a size without a number, or sums of nothing
        return None
    terms = [cost, *parts]
    return costs.Cost(sum(term.bytes for term in terms), sum(term.flops for term in terms), cost.operands)


def _number(size: Any) -> int:
    number = size if isinstance(size, int) else getattr(size.node, "hint", None)
    if number is None:
        raise ValueError(f"no number is known of {size}")
    return int(number)


def _insert(call: _Call) -> dict[str, int]:
    kv = call.of_rows("kv")
    return kv | call.rope | call.row(kv["D"], "kv") | {"Q": call.dims("qr")[-1] if "qr" in call.arguments else 0}


def _compressors(call: _Call) -> list[costs.Cost]:
    """What the compressors of a `preprocess_insert` add to it."""
    parts = []
    for prefix, cache_format in (("", "cache_format"), ("indexer_", "indexer_cache_format")):
        if call.arguments.get(f"{prefix}kv_score") is not None:
            tokens, width = call.dims(f"{prefix}kv_score")
            parts.append(costs.of("save_partial_states", T=tokens, width=width))
            sizes = _pooled(call, tokens, width, f"{prefix}norm_weight", cache_format)
            parts.append(costs.of("compress_norm_rope_insert", **sizes))
    return parts


def _beside(call: _Call) -> list[costs.Cost]:
    """The second product of a `fp8_linear`, of a weight that is not quantised."""
    if call.arguments.get("beside") is None:
        return []
    (rows, k), x, outputs = call.dims("beside"), call.dims("x"), call.dims("weight")[0]
    return [costs.beside(math.prod(x) // k, k, outputs, rows, call.size("x"))]


def _other_results(call: _Call) -> list[costs.Cost]:
    """Bytes added, or saved, by padded or quantised queries."""
    (tokens, heads, dim), e = call.dims("q"), call.size("q")
    padded = max(heads, call.arguments.get("padded_heads", 0))
    written = padded * (e if call.arguments.get("q_scale") is None else 1)
    return [costs.Cost(tokens * dim * (written - heads * e), 0)]


def _other_queries(call: _Call) -> list[costs.Cost]:
    """Bytes that an indexer's queries add to those of e4m3; negative for MXFP4, scales included."""
    (tokens, heads, dim), fmt = call.dims("q"), call.arguments["cache_format"]
    more = dim * (call.size("q") - 1) if fmt == "plain" else 0
    if fmt == "indexer_mxfp4":
        more = costs.row_bytes(fmt) - layout.INDEXER_HEAD_DIM
    return [costs.Cost(tokens * heads * more, 0)]


def _wide_results(call: _Call) -> list[costs.Cost]:
    """Bytes that a float32 result adds to one in the dtype of x."""
    if not call.arguments.get("float32", False):
        return []
    rows, k = call.dims("weight")
    tokens = math.prod(call.dims("x")) // (k * call.arguments["groups"])
    return [costs.Cost(tokens * rows * (4 - call.size("x")), 0)]


def _bytes(call: _Call, *names: str) -> int:
    """Bytes of tensors, of those that are given."""
    present = [name for name in names if call.arguments.get(name) is not None]
    return sum(math.prod(call.dims(name)) * call.size(name) for name in present)


def _experts(call: _Call) -> dict[str, int]:
    (experts, rows, _), (_, top_k) = call.dims("w13"), call.dims("ids")
    row_bytes = _bytes(call, "w13", "w2", "w13_scale", "w2_scale") // experts
    return call.of_rows("x") | {"K": top_k, "N": experts, "L": rows // 2, "row": row_bytes}


def _shared_expert(call: _Call) -> list[costs.Cost]:
    """What a shared expert adds, and ids of 64 bits."""
    tokens, hidden = call.dims("x")
    more = math.prod(call.dims("ids")) * (call.size("ids") - 4)
    if call.arguments.get("shared_w13") is None:
        return [costs.Cost(more, 0)]
    read = _bytes(call, "shared_w13", "shared_w2", "shared_w13_scale", "shared_w2_scale")
    return [costs.Cost(more + read, 3 * tokens * hidden * call.dims("shared_w13")[0])]


def _other_gate(call: _Call) -> list[costs.Cost]:
    """Bytes that a router reads more than a gate in the dtype of x and a bias: a wider gate, or a token id and a
    row."""
    (experts, size), tokens = call.dims("gate"), call.dims("x")[0]
    more = experts * size * (call.size("gate") - call.size("x"))
    if call.arguments.get("bias") is None:
        more -= 4 * experts
    if call.arguments.get("tid2eid") is not None:
        more += tokens * (call.size("token_ids") + call.size("tid2eid") * int(call.arguments["top_k"]))
    return [costs.Cost(more, 0)]


def _pooled(call: _Call, tokens: int, width: int, weight: str, cache_format: str) -> dict[str, int]:
    """Sizes of compressed entries; a state row holds values and scores of one or two groups."""
    (dim,), ratio = call.dims(weight), call.arguments["ratio"] or layout.CSA_RATIO
    closing = {"T": tokens, "C": layout.cdiv(tokens, ratio), "W": ratio * width // (2 * dim), "D": dim}
    return closing | call.row(dim, weight, cache_format)


def _scored(call: _Call) -> dict[str, int]:
    q = call.of_heads("q")
    if call.arguments["cache_format"] == "indexer_mxfp4":
        q["D"] *= 2  # two codes a byte
    requests, pages = call.dims("block_table")
    entries = pages * call.arguments["block_size"]
    sizes = q | {"L": entries, "C": min(q["T"], requests) * entries, "K": call.arguments.get("topk", 0)}
    return sizes | call.row(q["D"], "q")


def _attended(call: _Call) -> dict[str, int]:
    q, extra = call.of_heads("q"), call.arguments.get("extra_indices")
    keys = call.dims("indices")[-1] + (0 if extra is None else call.dims("extra_indices")[-1])
    return q | {"K": keys} | call.row(q["D"], "q")


def _ragged(call: _Call) -> dict[str, int]:
    """Of slots as lists: as many keys a token as there are in the mean."""
    q, keys = call.of_heads("q"), call.dims("indices")[0]
    if call.arguments.get("extra_indices") is not None:
        keys += call.dims("extra_indices")[0]
    sizes = q | {"K": layout.cdiv(keys, max(1, q["T"]))}
    return sizes | ({"S": call.dims("kv")[0]} if "kv" in call.arguments else call.row(q["D"], "q"))


def _grouped(call: _Call) -> dict[str, int]:
    """Heads that are in a group, all where nothing is said of them; others are padding."""
    groups, heads = call.arguments["n_groups"], call.arguments["heads_per_group"]
    return {"H": groups * heads} if heads else {}


def _latent(call: _Call) -> dict[str, int]:
    q = call.of_heads("q")
    return q | {"K": call.dims("indices")[-1], "N": call.arguments["value_dim"], "row": q["D"] * q["e"]}


def _gathered(call: _Call) -> dict[str, int]:
    """Of gathered keys, which every token may score."""
    q, keys = call.of_heads("q"), call.dims("k")[0]
    if call.arguments["cache_format"] == "indexer_mxfp4":
        q["D"] *= 2  # two codes a byte
    return q | {"L": keys, "C": keys, "K": call.arguments["topk"]} | call.row(q["D"], "q")


def _indices(name: str) -> Callable[[_Call], dict[str, int]]:
    """Sizes of `[T, ..., K]` indices, at most `topk` of them read, and of the window where there is one."""

    def sizes(call: _Call) -> dict[str, int]:
        dims = call.dims(name)
        return {"T": dims[0], "K": call.arguments.get("topk", dims[-1]), "W": call.arguments.get("window", 0)}

    return sizes


def _product(x: str, weight: str, scale: str = "") -> Callable[[_Call], dict[str, int]]:
    """Sizes of a product, whether groups are a dim of x or not."""

    def sizes(call: _Call) -> dict[str, int]:
        (rows, k), dims = call.dims(weight), call.dims(x)
        groups = call.arguments.get("groups", dims[1] if scale == "b_scale" else 1)
        result = {"T": math.prod(dims) // (groups * k), "G": groups, "N": rows // groups, "K": k, "e": call.size(x)}
        return result | ({"s": call.size(scale)} if scale else {})

    return sizes


_SIZES: Mapping[str, Callable[[_Call], dict[str, int]]] = {
    "fused_q_kv_rmsnorm": lambda call: call.of_rows("kv") | {"Q": call.dims("qr")[-1]},
    "q_norm_rope": lambda call: call.of_heads("q") | call.rope,
    "q_norm_rope_kv_insert": lambda call: call.of_heads("q") | _insert(call),
    "kv_rope_insert": _insert,
    "quantize_and_insert_k_cache": lambda call: (
        call.of_rows("k") | {"row": costs.row_bytes("fp8_ds_mla", call.dims("k")[-1])}
    ),
    "preprocess_insert": _insert,
    "preprocess_insert_quant": _insert,
    "inv_rope": lambda call: call.of_heads("o") | call.rope,
    "inv_rope_fp8_quant": lambda call: call.of_heads("o") | call.rope | _grouped(call),
    "fp8_linear": _product("x", "weight", "weight_scale"),
    "fp8_grouped_einsum": _product("a", "b", "b_scale"),
    "fp8_grouped_einsum_quant": _product("a", "b", "b_scale"),
    "grouped_linear": _product("x", "weight"),
    "mhc_pre": _Call.of_streams,
    "mhc_post": _Call.of_streams,
    "mhc_boundary": _Call.of_streams,
    "mhc_head": _Call.of_streams,
    "moe_experts": _experts,
    "moe_route": lambda call: call.of_rows("x") | {"N": call.dims("gate")[0], "K": int(call.arguments["top_k"])},
    "save_partial_states": lambda call: dict(zip(("T", "width"), call.dims("kv_score"), strict=True)),
    "compress_norm_rope_insert": lambda call: _pooled(
        call, call.dims("positions")[0], call.dims("state_cache")[-1], "norm_weight", "cache_format"
    ),
    "indexer_q_rope_quant": lambda call: call.of_heads("q") | call.rope,
    "indexer_logits": _scored,
    "indexer_logits_topk": _scored,
    "indexer_topk_slots": _scored,
    "indexer_logits_topk_ragged": _gathered,
    "global_topk": _indices("topk_indices"),
    "global_topk_ragged": _indices("topk_indices"),
    "ragged_from_dense": _indices("indices"),
    "combine_topk_swa": _indices("topk_indices"),
    "combine_topk_swa_ragged": _indices("topk_indices"),
    "convert_req_index": _indices("token_indices"),
    "compressed_slot_mapping": lambda call: {"T": call.dims("slot_mapping")[0]},
    "swa_metadata": lambda call: {"T": call.dims("slot_mapping")[0], "W": call.arguments["window"]},
    "prefill_gather_lens": lambda call: {"R": call.dims("seq_lens")[0]},
    "advance": lambda call: {"R": call.dims("num_new")[0]},
    "sparse_mla_decode": _attended,
    "sparse_mla_decode_out": _attended,
    "sparse_mla_decode_quant": lambda call: _attended(call) | _grouped(call),
    "sparse_mla_decode_latent": _latent,
    "sparse_mla_decode_ragged": _ragged,
    "sparse_mla_prefill_ragged": _ragged,
    "sparse_mla_prefill": lambda call: call.of_heads("q") | {"K": call.dims("indices")[-1], "S": call.dims("kv")[0]},
}

_PARTS: Mapping[str, Callable[[_Call], list[costs.Cost]]] = {
    "preprocess_insert": _compressors,
    "preprocess_insert_quant": _compressors,
    "fp8_linear": _beside,
    "grouped_linear": _wide_results,
    "moe_experts": _shared_expert,
    "moe_route": _other_gate,
    "q_norm_rope": _other_results,
    "q_norm_rope_kv_insert": _other_results,
    "indexer_q_rope_quant": _other_queries,
    "indexer_logits": _other_queries,
    "indexer_logits_topk": _other_queries,
    "indexer_topk_slots": _other_queries,
    "indexer_logits_topk_ragged": _other_queries,
}
"""Costs that optional arguments of an op add."""
