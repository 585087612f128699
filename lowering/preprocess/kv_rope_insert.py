"""Inductor IR for `kv_rope_insert`: one kernel, see ir/insert.py. Strided inputs are read in place."""

from __future__ import annotations

from typing import Any

from ...layout import ROPE_DIM
from ...selection.decisions import Call, Decision
from ..conditions import backend_lacks, cannot_rotate, decision
from ..ir.common import Rope
from ..ir.insert import Insert
from ..registry import lowers


def can_lower(call: Call) -> Decision:
    """Return the decision for `call`: IR in Triton, where stores can be predicated."""
    fmt = call.arguments["cache_format"]
    why_not = backend_lacks(call, fp8=fmt != "plain", predicated=True) or cannot_rotate(call, "kv")
    if not why_not and fmt == "fp8_ds_mla" and call.arguments["cos_sin_cache"].shape[1] != ROPE_DIM:
        why_not = f"an fp8_ds_mla row is lowered for a rope dim of {ROPE_DIM}"
    return decision(call, why_not)


@lowers("kv_rope_insert", can_lower)
def lower(
    kv: Any,
    k_cache: Any,
    slot_mapping: Any,
    positions: Any,
    cos_sin_cache: Any,
    block_size: int,
    cache_format: str,
    kv_scale: Any | None = None,
) -> None:
    """Build the IR."""
    insert = Insert.of(kv, k_cache, slot_mapping, Rope.of(positions, cos_sin_cache), block_size)
    if cache_format == "fp8_ds_mla":
        insert.tiles()
    else:
        insert.rows(cache_format, kv_scale)
