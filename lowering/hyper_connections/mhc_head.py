"""Inductor IR for `mhc_head`, traced from the reference."""

from __future__ import annotations

from typing import Any

from ...ops.common.define import REFERENCES
from ..from_reference import lower_from_reference
from ..registry import lowers
from .mhc_pre import can_lower_streams, yields


@lowers("mhc_head", can_lower_streams, yields)
def lower(call: Any) -> Any:
    """Build the IR."""
    return lower_from_reference(REFERENCES["mhc_head"], *call)
