"""Derive a batch's metadata from positions and block tables, in traceable PyTorch without branches on data.

`build_metadata` takes the request and position of every token (a model's own batch); `build_batch_metadata` takes the
query starts and lengths of requests (an engine's batch). Both compute each value with the reference of its op.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ..errors import fail
from ..layout import CSA_RATIO, HCA_RATIO, PAD_INDEX, WINDOW_BLOCK, c128a_width, state_block_size, storage_block_size
from ..reference.common.paging import lookup_slots
from ..reference.metadata.batch import token_positions, token_requests, visible_entries
from ..reference.metadata.c128a_topk_metadata import entry_lens, entry_slot_rows
from ..reference.metadata.compressed_slot_mapping import compressed_slots
from ..reference.metadata.swa_metadata import window_rows
from .on_cpu import build_on_cpu
from .types import AttentionMetadata, BlockTables, CompressedMetadata, WindowMetadata


def build_metadata(
    *,
    positions: Tensor,
    token_to_req: Tensor,
    is_valid_token: Tensor,
    block_tables: BlockTables,
    window: int,
    max_model_len: int,
    ratios: Collection[int] = (CSA_RATIO, HCA_RATIO),
    window_block_size: int = WINDOW_BLOCK,
) -> AttentionMetadata:
    """Build the metadata of T tokens from their requests and positions; requests come in any order.

    The tokens of a request are neighbouring rows in the order of their positions, as `preprocess_insert` pools them.

    Args:
        positions: int `[T]`, position of each token in its request.
        token_to_req: int `[T]`, its row in the block tables.
        is_valid_token: bool `[T]`, False for padding, which reads and writes nothing at any position.
        block_tables: the tables that `ratios` need, `[R, B]` each; E201 if one is missing.
        window: tokens a token attends directly, itself included.
        max_model_len: longest sequence of the block tables. It sets the width of `c128.indices`, which takes 4 bytes
            for each of T * `layout.c128a_width(max_model_len)` elements: 32 KiB per token at a million tokens. In eager
            mode several int64 temporaries of that shape are added; in compiled code none.
        ratios: compress ratios of the model's layers; 0 and 1 (window only) need nothing here.
        window_block_size: tokens of a page of the window cache.

    Tokens with a negative position, or a request outside the block tables, are padding too.
    """
    requests = token_to_req.long()
    known = (requests >= 0) & (requests < block_tables.window.shape[0])
    positions = torch.where(is_valid_token & known, positions.long(), PAD_INDEX)
    return _build(positions, requests, block_tables, window, max_model_len, ratios, window_block_size)


def build_batch_metadata(
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    block_tables: BlockTables,
    window: int,
    max_model_len: int,
    ratios: Collection[int] = (CSA_RATIO, HCA_RATIO),
    slot_mapping: Tensor | None = None,
    window_block_size: int = WINDOW_BLOCK,
) -> AttentionMetadata:
    """Build the metadata of an engine's batch: decodes of one or more tokens, chunked prefills and prefills, in any
    mix.

    Args:
        query_start_loc: int `[R + 1]`, first token of each request and the end of the last; padded requests repeat it.
        seq_lens: int `[R]`, tokens of each request, this step's query included; 0 for padded requests.
        num_tokens: T, at least `query_start_loc[-1]`; tokens after it are padding.
        slot_mapping: int `[T]`, the engine's slots of raw tokens, if it has them: a token with a negative slot is
            padding. Positive slots are ignored; slots always come from the block tables.
        block_tables, window, max_model_len, ratios, window_block_size: see `build_metadata`.
    """
    tokens = torch.arange(num_tokens, device=query_start_loc.device)
    requests = token_requests(query_start_loc, tokens)
    positions = token_positions(query_start_loc, seq_lens, requests, tokens)
    if slot_mapping is not None:
        positions = torch.where(slot_mapping >= 0, positions, PAD_INDEX)
    return _build(positions, requests, block_tables, window, max_model_len, ratios, window_block_size)


def _build(
    positions: Tensor,
    requests: Tensor,
    block_tables: BlockTables,
    window: int,
    max_model_len: int,
    ratios: Collection[int],
    window_block_size: int,
) -> AttentionMetadata:
    """Build metadata from positions and requests; a token with a negative position is padding."""
    valid = positions >= 0
    requests = torch.where(valid, requests, 0)
    if positions.device.type == "cpu" and torch.compiler.is_dynamo_compiling():
        _check_tables(block_tables, ratios)
        return build_on_cpu(positions, requests, block_tables, window, max_model_len, ratios, window_block_size)
    indices, lens = window_rows(positions, requests, block_tables.window, window, window_block_size)
    slots = lookup_slots(block_tables.window, requests, positions, window_block_size)
    return AttentionMetadata(
        positions=positions.clamp_min(0),
        token_to_req=requests.to(torch.int32),
        is_valid_token=valid,
        window=WindowMetadata(slot_mapping=slots, indices=indices, lens=lens),
        c4=_build_c4(positions, requests, block_tables) if CSA_RATIO in ratios else None,
        c128=_build_c128(positions, requests, block_tables, max_model_len) if HCA_RATIO in ratios else None,
    )


def _build_c4(positions: Tensor, requests: Tensor, block_tables: BlockTables) -> CompressedMetadata:
    table, state = _table(block_tables.c4, "c4"), _table(block_tables.c4_state, "c4_state")
    indexer = _table(block_tables.indexer, "indexer")
    indexer_state = _table(block_tables.indexer_state, "indexer_state")
    block_size, state_block = storage_block_size(CSA_RATIO), state_block_size(CSA_RATIO)
    return CompressedMetadata(
        slot_mapping=compressed_slots(positions, requests, table, block_size, CSA_RATIO),
        block_table=table,
        state_slot_mapping=lookup_slots(state, requests, positions, state_block),
        state_block_table=state,
        context_lens=visible_entries(positions, CSA_RATIO).to(torch.int32),
        indexer_slot_mapping=compressed_slots(positions, requests, indexer, block_size, CSA_RATIO),
        indexer_block_table=indexer,
        indexer_state_slot_mapping=lookup_slots(indexer_state, requests, positions, state_block),
        indexer_state_block_table=indexer_state,
    )


def _build_c128(
    positions: Tensor, requests: Tensor, block_tables: BlockTables, max_model_len: int
) -> CompressedMetadata:
    table, state = _table(block_tables.c128, "c128"), _table(block_tables.c128_state, "c128_state")
    block_size, width = storage_block_size(HCA_RATIO), c128a_width(max_model_len)
    lens = entry_lens(positions, HCA_RATIO, width)
    return CompressedMetadata(
        slot_mapping=compressed_slots(positions, requests, table, block_size, HCA_RATIO),
        block_table=table,
        state_slot_mapping=lookup_slots(state, requests, positions, state_block_size(HCA_RATIO)),
        state_block_table=state,
        context_lens=visible_entries(positions, HCA_RATIO).to(torch.int32),
        indices=entry_slot_rows(lens, requests, table, width, block_size),
        lens=lens,
    )


def _check_tables(tables: BlockTables, ratios: Collection[int]) -> None:
    """Raise E201 if a table is missing that `ratios` need."""
    needed = {CSA_RATIO: ("c4", "c4_state", "indexer", "indexer_state"), HCA_RATIO: ("c128", "c128_state")}
    for name in (name for ratio in sorted(needed) if ratio in ratios for name in needed[ratio]):
        _table(getattr(tables, name), name)


def _table(table: Tensor | None, name: str) -> Tensor:
    if table is None:
        fail("E201", got=f"block_tables.{name}=None", rule="every ratio in `ratios` comes with its block tables")
    return table
