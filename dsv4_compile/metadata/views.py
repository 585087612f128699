"""The metadata of a step out of rows of the declared buffers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .types import AttentionMetadata, BlockTables, CompressedMetadata, WindowMetadata


def metadata_of(rows: Mapping[str, Tensor], tables: BlockTables) -> AttentionMetadata:
    """The tensors of `rows`, by the names of `buffers.BUFFERS`, beside the block tables of the same groups."""
    c4, c128 = None, None
    if tables.c4 is not None and tables.c4_state is not None:
        c4 = CompressedMetadata(
            slot_mapping=rows["c4_slots"],
            block_table=tables.c4,
            state_slot_mapping=rows["c4_state_slots"],
            state_block_table=tables.c4_state,
            context_lens=rows["c4_context_lens"],
            indexer_slot_mapping=rows["indexer_slots"],
            indexer_block_table=tables.indexer,
            indexer_state_slot_mapping=rows["indexer_state_slots"],
            indexer_state_block_table=tables.indexer_state,
        )
    if tables.c128 is not None and tables.c128_state is not None:
        c128 = CompressedMetadata(
            slot_mapping=rows["c128_slots"],
            block_table=tables.c128,
            state_slot_mapping=rows["c128_state_slots"],
            state_block_table=tables.c128_state,
            context_lens=rows["c128_context_lens"],
            indices=rows["c128_indices"],
            lens=rows["c128_lens"],
        )
    return AttentionMetadata(
        positions=rows["positions"],
        token_to_req=rows["token_to_req"],
        is_valid_token=rows["is_valid_token"],
        window=WindowMetadata(rows["window_slots"], rows["window_indices"], rows["window_lens"]),
        c4=c4,
        c128=c128,
    )
