"""Samples of the compressor, the indexer, the metadata and the index maps. See samples.py."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import layout
from ..reference.common.kv_format import quantize_indexer
from ..reference.indexer import indexer_q_rope_quant as queries
from ._samples_step import (
    BATCH,
    DECODE_TOKENS,
    DECODES,
    ENTRY_BLOCK,
    EPS,
    INDEXER,
    KV,
    REQUESTS,
    TOKENS,
    Args,
    Step,
    rope_dim,
    sample,
)

CSA, HCA, WINDOW = layout.CSA_RATIO, layout.HCA_RATIO, layout.SLIDING_WINDOW
BUFFER_ROWS = TOKENS + 2


@sample
def save_partial_states(s: Step) -> list[Args]:
    samples: list[Args] = []
    for ratio, dim in ((CSA, layout.INDEXER_HEAD_DIM), (HCA, layout.HEAD_DIM)):
        state, table, block = s.state(ratio, dim)
        width = state.shape[2]
        kv_score, ape = s.randn(TOKENS, width, dtype=torch.float32), s.randn(ratio, width // 2, dtype=torch.float32)
        samples.append((kv_score, ape, state, s.slots(table, block), s.positions, block))
    return samples


@sample
def compress_norm_rope_insert(s: Step) -> list[Args]:
    cases = [(CSA, fmt, dim, dtype, False) for fmt, dim, dtype in KV]
    cases += [(CSA, fmt, dim, dtype, True) for fmt, dim, dtype in INDEXER]
    cases += [(CSA, *INDEXER[0], False), (HCA, *KV[0], False)]
    samples: list[Args] = []
    for ratio, fmt, dim, dtype, hadamard in cases:
        block = ENTRY_BLOCK if ratio == CSA else layout.storage_block_size(ratio)
        state, state_table, state_block = s.state(ratio, dim)
        table = s.table(block, ratio)
        entries = s.cache(fmt, table, block, head_dim=dim, dtype=dtype)
        read = (state, s.slots(state_table, state_block), state_table, s.token_to_req, s.positions)
        norm = (s.entry_slots(table, block, ratio), s.randn(dim), s.rope(rope_dim(dim)), entries.cache, EPS)
        samples.append((*read, *norm, ratio, state_block, block, fmt, hadamard, entries.kv_scale))
    return samples


@sample
def indexer_q_rope_quant(s: Step) -> list[Args]:
    return [
        (
            s.randn(TOKENS, 4, dim, dtype=dtype),
            s.positions,
            s.rope(rope_dim(dim)),
            s.randn(TOKENS, 4, dtype=dtype),
            fmt,
            hadamard,
        )
        for fmt, dim, dtype in INDEXER
        for hadamard in (False, True)
    ]


def _queries(s: Step, fmt: str, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `indexer_q_rope_quant` for random queries."""
    q, weights = s.randn(TOKENS, 4, dim, dtype=dtype), s.randn(TOKENS, 4, dtype=dtype)
    return queries.indexer_q_rope_quant(q, s.positions, s.rope(rope_dim(dim)), weights, fmt)


def _paged_scores(s: Step, last: int) -> list[Args]:
    table, samples = s.table(ENTRY_BLOCK, CSA), []
    for fmt, dim, dtype in INDEXER:
        cache = s.cache(fmt, table, ENTRY_BLOCK, head_dim=dim, dtype=dtype).cache
        seen = (table, s.token_to_req, s.entry_counts(CSA))
        samples.append((*_queries(s, fmt, dim, dtype), cache, *seen, ENTRY_BLOCK, fmt, last))
    return samples


@sample
def indexer_logits(s: Step) -> list[Args]:
    return _paged_scores(s, 40)


@sample
def indexer_logits_topk(s: Step) -> list[Args]:
    return _paged_scores(s, 12)


@sample
def indexer_topk_slots(s: Step) -> list[Args]:
    return [(*scores, s.table(ENTRY_BLOCK, CSA), s.is_valid, ENTRY_BLOCK) for scores in _paged_scores(s, 12)]


@sample
def indexer_logits_topk_ragged(s: Step) -> list[Args]:
    samples: list[Args] = []
    starts = s.randint(0, 40, TOKENS)
    ends = starts + s.randint(-1, 20, TOKENS)
    for fmt, dim, dtype in INDEXER:
        keys = s.randn(50, dim, dtype=dtype)
        gathered: tuple[Tensor, ...] = (keys, torch.empty(50, 0, dtype=torch.uint8))
        if fmt != "plain":
            gathered = tuple(x.view(torch.uint8) for x in quantize_indexer(keys.float(), fmt))
        samples.append((*_queries(s, fmt, dim, dtype), *gathered, starts, ends, fmt, 12))
    return samples


@sample
def cp_gather_indexer_k(s: Step) -> list[Args]:
    table, samples = s.table(ENTRY_BLOCK, CSA), []
    lens = torch.tensor([seq_len // CSA for seq_len in (0, *BATCH.seq_lens)])
    for fmt, dim, dtype in INDEXER:
        cache = s.cache(fmt, table, ENTRY_BLOCK, head_dim=dim, dtype=dtype).cache
        page = layout.PAGE_LAYOUTS.get(fmt)
        k = torch.zeros(80, page.data if page else dim, dtype=torch.uint8 if page else dtype)
        scale = torch.zeros(80, page.scale if page else 0, dtype=torch.uint8)
        samples.append((cache, table, lens.cumsum(0).int(), k, scale, ENTRY_BLOCK, fmt))
    return samples


@sample
def compressed_slot_mapping(s: Step) -> list[Args]:
    slots, table = s.slots(s.window, layout.WINDOW_BLOCK), s.table(ENTRY_BLOCK, CSA)
    out = torch.zeros(BUFFER_ROWS, dtype=torch.int64)
    return [(slots, s.query_start_loc, s.seq_lens, table, ENTRY_BLOCK, CSA, out)]


@sample
def c128a_topk_metadata(s: Step) -> list[Args]:
    block, width = layout.storage_block_size(HCA), layout.c128a_width(1000)
    table, slots = s.table(block, HCA), s.slots(s.window, layout.WINDOW_BLOCK)
    rows, lens = torch.zeros(BUFFER_ROWS, width, dtype=torch.int32), torch.zeros(BUFFER_ROWS, dtype=torch.int32)
    return [
        (s.positions, s.token_to_req, table, slots, block, HCA, decodes, rows.clone(), lens.clone(), rows.clone())
        for decodes in (DECODE_TOKENS, TOKENS, 0)
    ]


@sample
def swa_metadata(s: Step) -> list[Args]:
    step = (s.query_start_loc, s.seq_lens, s.window, s.slots(s.window, layout.WINDOW_BLOCK))
    samples: list[Args] = []
    for decodes in (DECODE_TOKENS, TOKENS):
        rows = torch.zeros(BUFFER_ROWS, WINDOW, dtype=torch.int32)
        requests, lens = (torch.zeros(BUFFER_ROWS, dtype=torch.int32) for _ in range(2))
        valid = torch.zeros(BUFFER_ROWS, dtype=torch.bool)
        samples.append((*step, layout.WINDOW_BLOCK, WINDOW, decodes, requests, valid, rows, lens))
    return samples


@sample
def prefill_gather_lens(s: Step) -> list[Args]:
    return [(s.query_start_loc, s.seq_lens, decodes, WINDOW) for decodes in (DECODES, 0, REQUESTS)]


@sample
def global_topk(s: Step) -> list[Args]:
    table = s.table(ENTRY_BLOCK, CSA)
    return [(s.hostile(table.shape[1] * ENTRY_BLOCK, TOKENS, 12), s.token_to_req, table, s.is_valid, ENTRY_BLOCK)]


@sample
def global_topk_ragged(s: Step) -> list[Args]:
    return global_topk(s)


@sample
def ragged_from_dense(s: Step) -> list[Args]:
    return [(s.hostile(50, TOKENS, 12), s.randint(-1, 14, TOKENS))]


@sample
def combine_topk_swa(s: Step) -> list[Args]:
    starts, seq_lens = s.query_start_loc[DECODES:], s.seq_lens[DECODES:]
    topk, entries = s.hostile(32, TOKENS - DECODE_TOKENS, 12), 33
    gather_lens = torch.tensor([131, 0], dtype=torch.int32)
    return [
        (topk, starts, seq_lens, gather_lens, WINDOW, CSA, 12, entries + 140, entries),
        (topk, starts, seq_lens, gather_lens, WINDOW, 1, 0, 140, 0),
    ]


@sample
def combine_topk_swa_ragged(s: Step) -> list[Args]:
    return combine_topk_swa(s)


@sample
def flashinfer_mixed_indices(s: Step) -> list[Args]:
    table, entries = s.table(ENTRY_BLOCK, CSA), 32
    window, prefill = s.hostile(500, DECODE_TOKENS, WINDOW), s.hostile(entries, TOKENS - DECODE_TOKENS, 12)
    step = (prefill, s.query_start_loc, s.seq_lens, s.token_to_req, s.window, layout.WINDOW_BLOCK)
    local = (window, s.hostile(entries, DECODE_TOKENS, 10), None, *step, table, ENTRY_BLOCK, WINDOW, CSA, 12, True)
    full_lens = (window, s.hostile(500, DECODE_TOKENS, 10), s.randint(0, 10, DECODE_TOKENS), *step, table, ENTRY_BLOCK)
    alone = (window, None, None, prefill[:, :0], *step[1:], None, layout.WINDOW_BLOCK, WINDOW, 1, 0)
    return [(*local, s.is_valid), (*full_lens, WINDOW, CSA, 12, False, None, BUFFER_ROWS, 80, 9), alone]


@sample
def convert_req_index(s: Step) -> list[Args]:
    indices = s.hostile(s.window.shape[1] * layout.WINDOW_BLOCK, TOKENS, 12)
    return [(s.token_to_req, s.window, indices, layout.WINDOW_BLOCK, compact) for compact in (False, True)]
