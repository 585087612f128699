"""Sparse attention for serving engines: five backends with one protocol, and the choice among them."""

from __future__ import annotations

from .protocol import AttentionBackend, SparseAttention
from .registry import NAMES, Selection, get_backend, select
from .types import CommonAttentionMetadata, CudaGraphSupport, Demand, LayerShape

__all__ = [
    "NAMES",
    "AttentionBackend",
    "CommonAttentionMetadata",
    "CudaGraphSupport",
    "Demand",
    "LayerShape",
    "Selection",
    "SparseAttention",
    "get_backend",
    "select",
]
