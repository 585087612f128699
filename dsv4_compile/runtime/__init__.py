"""Captures and replays of graphs: who owns which address, and what may change between two replays."""

from __future__ import annotations

from .buckets import padded_buckets
from .counts import Counts, Statistics, counting
from .graphs import Capture, Footprint, Graphs, graphs_for
from .plan import Plan
from .runner import DecodeRunner
from .static_inputs import mark_static_inputs

__all__ = [
    "Capture",
    "Counts",
    "DecodeRunner",
    "Footprint",
    "Graphs",
    "Plan",
    "Statistics",
    "counting",
    "graphs_for",
    "mark_static_inputs",
    "padded_buckets",
]
