"""Derive a batch's metadata from positions and block tables, in traceable PyTorch without branches on data.

`build_metadata` takes the request and position of every token (a model's own batch); `build_batch_metadata` takes the
query starts and lengths of requests (an engine's batch). Both compute each value with the reference of its op.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ..layout import PAD_INDEX, WINDOW_BLOCK, listed_width
from ..reference.metadata.batch import token_positions, token_requests, visible_entries
from ..reference.metadata.batch_metadata import listed_rows
from ..reference.metadata.compressed_slot_mapping import compressed_slots
from ..sources import RATIOS, groups_of
from .on_cpu import build_on_cpu
from .types import AttentionMetadata, BlockTables, metadata_of


def build_metadata(
    *,
    positions: Tensor,
    token_to_req: Tensor,
    is_valid_token: Tensor,
    block_tables: BlockTables,
    window: int,
    max_model_len: int,
    ratios: Collection[int] = RATIOS,
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
        max_model_len: longest sequence of the block tables. It sets the width of lists of every entry, which take
            4 bytes for each of T * `layout.listed_width(ratio, max_model_len)` elements: at ratio 128, 32 KiB per token
            at a million tokens. In eager mode several int64 temporaries of that shape are added; in compiled code none.
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
    ratios: Collection[int] = RATIOS,
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
    groups = groups_of(ratios, window_block_size)
    tables = [block_tables.table(group) for group in groups]
    widths = {
        group.name: window if group.role == "window" else listed_width(group.ratio, max_model_len)
        for group in groups
        if group.listed
    }
    if positions.device.type == "cpu" and torch.compiler.is_dynamo_compiling():
        rows = build_on_cpu(positions, requests, groups, tables, widths)
    else:
        rows = {"positions": positions.clamp_min(0), "token_to_req": requests.to(torch.int32), "is_valid_token": valid}
        for group, table in zip(groups, tables, strict=True):
            place = table, group.page_rows, group.row_tokens
            rows[f"{group.name}_slots"] = compressed_slots(positions, requests, *place)
            if group.role == "entries":
                rows[f"{group.name}_context_lens"] = visible_entries(positions, group.ratio).to(torch.int32)
            if group.listed:
                listed = listed_rows(positions, requests, *place, widths[group.name])
                rows[f"{group.name}_indices"], rows[f"{group.name}_lens"] = listed
    return metadata_of(rows, block_tables.of_ratios(ratios))
