"""Window and ragged metadata against plain Python, exactly, and at fixed addresses."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.attention_backends.v4 import Inputs
from dsv4_compile.attention_backends.window_metadata import DeepseekSparseSWAMetadata
from dsv4_compile.testing.batch import entry_row, index, row, window_row
from tests.attention_backends.systems import DECODE_THRESHOLD, MAX_MODEL_LEN, PHASES, Layer, Setup, case_of
from tests.support.attention import AttentionCase

ROCM, FLASHMLA = "ROCM_FLASHMLA_SPARSE_DSV4", "FLASHMLA_SPARSE_DSV4"


def split(case: AttentionCase) -> tuple[int, int]:
    """Return the number of decode requests and of their tokens; from the first longer query on, all are prefills."""
    lens = case.batch.query_lens
    longer = [request for request, length in enumerate(lens) if length > DECODE_THRESHOLD]
    if not longer:
        return len(lens), case.batch.num_tokens
    return longer[0], sum(lens[: longer[0]])


def windows(case: AttentionCase, tokens: int) -> list[tuple[list[int], int]]:
    """Return the index row and its length for the first `tokens` tokens; padding has length 0."""
    rows = []
    for request, position in case.batch.tokens()[:tokens]:
        rows.append(window_row(case.window_table, request, position, case.window, layout.WINDOW_BLOCK))
    return rows


def lists(rows: Tensor, ends: Tensor) -> list[list[int]]:
    """Return the rows of a CSR list."""
    flat, bounds = rows.tolist(), ends.tolist()
    return [flat[a:b] for a, b in pairwise(bounds)]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", [FLASHMLA, ROCM])
def test_window_metadata_is_exact(name: str, phase: str, seed: int) -> None:
    rng, setup = random.Random(seed), Setup(name, "bfloat16", 1, phase)
    case = case_of(rng, setup)
    swa: DeepseekSparseSWAMetadata = Layer(setup, case).metadata(case).swa
    requests, tokens = split(case)
    batch, rows = case.batch, windows(case, tokens)
    assert (swa.num_decodes, swa.num_decode_tokens) == (requests, tokens)
    assert swa.num_prefills == len(batch.seq_lens) - requests
    assert swa.num_prefill_tokens == batch.num_tokens - tokens
    assert swa.decode_swa_indices.squeeze(1).tolist() == [indices for indices, _ in rows]
    assert swa.decode_swa_lens.tolist() == [length for _, length in rows]
    assert swa.token_to_req_indices.tolist() == [max(request, 0) for request, _ in batch.tokens()]
    assert swa.is_valid_token.tolist() == [position >= 0 for _, position in batch.tokens()]
    assert swa.prefill_seq_lens.tolist() == list(batch.seq_lens[requests:])
    assert swa.prefill_gather_lens.tolist() == [
        min(seq_len, query_len + case.window - 1)
        for query_len, seq_len in zip(batch.query_lens[requests:], batch.seq_lens[requests:], strict=True)
    ]
    assert swa.max_decode_query_len == max(batch.query_lens[:requests], default=0)
    assert swa.max_prefill_query_len == max(batch.query_lens[requests:], default=0)


@pytest.mark.parametrize("phase", ["decode", "mixed"])
def test_ragged_metadata_lists_the_rows_of_the_decodes(phase: str, seed: int) -> None:
    rng, setup = random.Random(seed), Setup(ROCM, "bfloat16", 128, phase)
    case = case_of(rng, setup)
    metadata = Layer(setup, case).metadata(case)
    _, tokens = split(case)
    swa, extra = metadata.swa, metadata.extra
    assert lists(swa.decode_swa_ragged_indices, swa.decode_swa_ragged_indptr) == [
        indices[:length] for indices, length in windows(case, tokens)
    ]
    entries = [
        entry_row(case.extra_table, request, position, layout.c128a_width(MAX_MODEL_LEN), 2, 128)
        for request, position in case.batch.tokens()[:tokens]
    ]
    assert lists(extra.c128a_decode_topk_ragged_indices, extra.c128a_decode_topk_ragged_indptr) == [
        indices[:length] for indices, length in entries
    ]


def test_mixed_index_rows_are_exact(seed: int) -> None:
    """Rows of decodes come from the metadata and rows of prefills from the op; both have the same layout."""
    rng, setup = random.Random(seed), Setup("FLASHINFER_MLA_SPARSE_DSV4", "bfloat16", 4, "mixed")
    case = case_of(rng, setup)
    layer = Layer(setup, case)
    arguments = layer.arguments(case)
    indices, lens = layer.module.mixed_indices(Inputs(*arguments[1:]))
    assert case.extra_cache is not None and case.topk is not None
    block = case.extra_cache.block_size
    want_rows, want_lens = [], []
    for token, (request, position) in enumerate(case.batch.tokens()):
        slots, _ = window_row(case.window_table, request, position, case.window, layout.WINDOW_BLOCK)
        chosen = [entry for entry in case.topk[token].tolist() if entry >= 0]
        entries = [index(case.extra_table, request, entry, block) for entry in chosen]
        want_rows.append(slots + row(entries, case.topk.shape[1]))
        want_lens.append(case.window + len(entries))
    assert indices.tolist() == want_rows
    assert lens.tolist() == want_lens


@pytest.mark.parametrize("name", [FLASHMLA, ROCM])
def test_metadata_addresses_do_not_change_between_steps(name: str, seed: int) -> None:
    rng, setup = random.Random(seed), Setup(name, "bfloat16", 128, "decode")
    cases = [case_of(rng, setup) for _ in range(4)]
    layer = Layer(setup, cases[0])

    def addresses(part: Any) -> dict[str, int]:
        owned = ("token_to_req_indices", "is_valid_token", "decode_swa_indices", "decode_swa_lens")
        owned += ("decode_swa_ragged_indices", "decode_swa_ragged_indptr", "c128a_global_decode_topk_indices")
        owned += ("c128a_decode_topk_lens", "c128a_decode_topk_ragged_indices", "c128a_decode_topk_ragged_indptr")
        return {name: value.data_ptr() for name in owned if isinstance(value := getattr(part, name, None), Tensor)}

    seen = []
    for case in cases:
        metadata = layer.metadata(case)
        seen.append(addresses(metadata.swa) | addresses(metadata.extra))
    assert all(step == seen[0] for step in seen)
    assert len(seen[0]) == (10 if name == ROCM else 6)
