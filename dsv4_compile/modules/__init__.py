"""DeepSeek-V4 attention as nn.Modules that Dynamo traces in one graph, with the official names of all parameters."""

from __future__ import annotations

from .attention import DeepseekV4Attention
from .compressor import Compressor
from .indexer import Indexer

__all__ = ["Compressor", "DeepseekV4Attention", "Indexer"]
