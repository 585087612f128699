"""Inductor IR for `quantize_and_insert_k_cache`: one kernel, that of `kv_rope_insert` without RoPE."""

from __future__ import annotations

from typing import Any

from ...selection.decisions import Call, Decision
from ..conditions import backend_lacks, decision
from ..ir.insert import Insert
from ..registry import lowers


def can_lower(call: Call) -> Decision:
    """Return the decision for `call`: IR in Triton, where stores can be predicated."""
    return decision(call, backend_lacks(call, fp8=True, predicated=True))


@lowers("quantize_and_insert_k_cache", can_lower)
def lower(k: Any, k_cache: Any, slot_mapping: Any, block_size: int) -> None:
    """Build the IR."""
    Insert.of(k, k_cache, slot_mapping, None, block_size).tiles()
