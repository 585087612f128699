"""Sparse attention as serving engines know it: five backends behind one protocol, and the choice among them."""

from __future__ import annotations

from .common import CommonAttentionMetadata
from .facts import CudaGraphSupport, Demand, LayerShape, Support
from .protocol import AttentionBackend, SparseAttention
from .registry import NAMES, Selection, get_backend, select

__all__ = [
    "NAMES",
    "AttentionBackend",
    "CommonAttentionMetadata",
    "CudaGraphSupport",
    "Demand",
    "LayerShape",
    "Selection",
    "SparseAttention",
    "Support",
    "get_backend",
    "select",
]
