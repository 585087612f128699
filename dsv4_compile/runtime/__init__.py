"""Capture and replay of graphs: addresses that a capture owns, and changes that are allowed between two replays."""

from __future__ import annotations

from .addresses import mark_static_inputs
from .backends import graphs_for
from .bucket_sizes import request_buckets, token_buckets
from .captures import Capture, Footprint, Graphs, MemoryPlan
from .compiled import Counts, counting
from .drafting import DraftSource, DraftStatistics
from .runner import DecodeRunner, Statistics
from .step import padded_buckets
from .warmup import warming_up

__all__ = [
    "Capture",
    "Counts",
    "DecodeRunner",
    "DraftSource",
    "DraftStatistics",
    "Footprint",
    "Graphs",
    "MemoryPlan",
    "Statistics",
    "counting",
    "graphs_for",
    "mark_static_inputs",
    "padded_buckets",
    "request_buckets",
    "token_buckets",
    "warming_up",
]
