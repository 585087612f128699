"""Inductor IR for `mhc_post`: one pointwise kernel, traced from the reference."""

from __future__ import annotations

from typing import Any

from ...ops.common.define import REFERENCES
from ..from_reference import lower_from_reference
from ..registry import lowers
from .mhc_pre import can_lower_streams


@lowers("mhc_post", can_lower_streams)
def lower(streams: Any, output: Any, post: Any, comb: Any) -> Any:
    """Build the IR."""
    return lower_from_reference(REFERENCES["mhc_post"], streams, output, post, comb)
