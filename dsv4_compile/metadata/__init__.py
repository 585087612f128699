"""Attention metadata of a batch, derived on the device from positions, lengths and block tables."""

from __future__ import annotations

from .buffers import BUFFERS, BufferPlan, BufferSpec, plan_buffers
from .build import build_batch_metadata, build_metadata
from .chunk import PrefillChunk, get_prefill_chunk_plan, prefill_workspace_rows
from .persistent import MetadataBuffers
from .split import BatchSplit, split_decodes_and_prefills
from .types import AttentionMetadata, BlockTables, CompressedMetadata, SourceTables, WindowMetadata

__all__ = [
    "BUFFERS",
    "AttentionMetadata",
    "BatchSplit",
    "BlockTables",
    "BufferPlan",
    "BufferSpec",
    "CompressedMetadata",
    "MetadataBuffers",
    "PrefillChunk",
    "SourceTables",
    "WindowMetadata",
    "build_batch_metadata",
    "build_metadata",
    "get_prefill_chunk_plan",
    "plan_buffers",
    "prefill_workspace_rows",
    "split_decodes_and_prefills",
]
