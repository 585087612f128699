"""What a batch looks like to attention, derived on the device from positions, lengths and block tables."""

from __future__ import annotations

from .types import AttentionMetadata, BlockTables, CompressedMetadata, WindowMetadata

__all__ = ["AttentionMetadata", "BlockTables", "CompressedMetadata", "WindowMetadata"]
