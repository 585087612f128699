"""DeepSeek-V4 attention as nn.Modules that Dynamo traces in one graph. Parameters carry the official checkpoint names."""

from __future__ import annotations

from .attention import DeepseekV4Attention
from .compressor import Compressor
from .indexer import Indexer

__all__ = ["Compressor", "DeepseekV4Attention", "Indexer"]
