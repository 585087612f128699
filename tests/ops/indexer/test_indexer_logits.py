"""Logits in every format, by hand and against Hugging Face, and the contracts of the three scoring ops."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from dsv4_compile import layout
from dsv4_compile.errors import InputError
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.indexer.cp_gather_indexer_k import cp_gather_indexer_k
from dsv4_compile.ops.indexer.indexer_logits import indexer_logits, indexer_logits_topk, indexer_logits_topk_ragged
from dsv4_compile.ops.indexer.indexer_q_rope_quant import indexer_q_rope_quant
from dsv4_compile.reference.common.kv_format import store_indexer
from dsv4_compile.reference.indexer import indexer_logits as reference
from dsv4_compile.testing import (
    Tolerance,
    assert_bitwise,
    assert_close,
    check_op,
    padded,
    random_cache,
    refuse_synchronization,
    strided,
)
from tests.ops.largest_tensor import LargestTensor
from tests.support import scalar

FORMATS = pytest.mark.parametrize("fmt", layout.INDEXER_FORMATS)
BLOCK = 4
PAGES = 7
SUM = Tolerance(abs=2e-5, rel=1e-5, cosine=1e-10)
"""A logit adds 128 products and 3 heads of unit scale times 128^-0.5 in float32, here compared with double."""


def table_for(rope_dim: int) -> Tensor:
    angles = torch.arange(64)[:, None] * 0.3 ** torch.arange(rope_dim // 2)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def batch(
    fmt: str, tokens: int, *, heads: int = 3, columns: int = 3, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """q, q_scale, weights, k_cache, block_table, token_to_req, context_lens of two requests."""
    dim, rope_dim = (24, 8) if fmt == "plain" else (128, 64)
    q = torch.randn(tokens, heads, dim).to(dtype)
    weights = torch.randn(tokens, heads).to(dtype)
    prepared = indexer_q_rope_quant(q, torch.arange(tokens), table_for(rope_dim), weights, fmt)
    cache = random_cache(fmt, PAGES, BLOCK, live=PAGES * BLOCK, head_dim=dim, dtype=dtype).cache
    table = torch.randperm(PAGES)[: 2 * columns].int().view(2, columns)
    lens = torch.randint(columns * BLOCK + 1, (tokens,), dtype=torch.int32)
    return *prepared, cache, table, torch.arange(tokens, dtype=torch.int32) % 2, lens


def scalar_vector(fmt: str, data: Tensor, scale: Tensor) -> list[float]:
    """Values of one stored query or key, from its bytes."""
    if fmt == "plain":
        return data.tolist()
    payload, scales = bytes(data.view(torch.uint8).tolist()), bytes(scale.view(torch.uint8).tolist())
    if fmt == "indexer_fp8":
        factor = struct.unpack("<f", scales)[0] if scales else 1.0  # a query's factor is in its weights
        return [scalar.e4m3_value(code) * factor for code in payload]
    codes = [code for byte in payload for code in (byte & 15, byte >> 4)]
    return [scalar.e2m1_value(code) * 2.0 ** (scales[i // 32] - 127) for i, code in enumerate(codes)]


def stored_key(fmt: str, cache: Tensor, block: int, offset: int) -> list[float]:
    if fmt == "plain":
        return scalar_vector(fmt, cache[block, offset], cache[0, 0, :0])
    width = {"indexer_fp8": 128, "indexer_mxfp4": 64}[fmt]
    page, start = cache[block], BLOCK * width + offset * 4
    return scalar_vector(fmt, page[offset * width : (offset + 1) * width], page[start : start + 4])


def logits_by_hand(fmt: str, args: tuple[Tensor, ...], max_context: int) -> Tensor:
    q, q_scale, weights, cache, table, requests, lens = args
    expected = torch.full((len(q), max_context), -torch.inf, dtype=torch.float64)
    for t in range(len(q)):
        heads = [scalar_vector(fmt, q[t, h], q_scale[t, h]) for h in range(q.shape[1])]
        for j in range(min(lens[t].item(), max_context, table.shape[1] * BLOCK)):
            key = stored_key(fmt, cache, table[requests[t], j // BLOCK].item(), j % BLOCK)
            dots = [sum(a * b for a, b in zip(head, key, strict=True)) for head in heads]
            expected[t, j] = sum(w * max(dot, 0.0) for w, dot in zip(weights[t].tolist(), dots, strict=True))
    return expected


@FORMATS
@pytest.mark.parametrize("max_context", [0, 5, 12, 17])
def test_logits_are_those_of_the_stored_bytes(fmt: str, max_context: int) -> None:
    args = batch(fmt, 5)
    logits = indexer_logits(*args, BLOCK, fmt, max_context)
    assert logits.dtype is torch.float32
    assert_close(logits, logits_by_hand(fmt, args, max_context), SUM)


def test_logits_of_invisible_entries_are_minus_infinity() -> None:
    q, q_scale, weights, cache, table, requests, lens = batch("plain", 4)
    lens[:] = torch.tensor([0, 6, 12, -3])
    requests[2] = 9
    table[1, 0] = -1
    cache[table[1, 1].long(), 2:] = torch.nan
    logits = indexer_logits(q, q_scale, weights, cache, table, requests, lens, BLOCK, "plain", 12)
    assert logits.isfinite().nonzero().tolist() == [[1, 4], [1, 5]]
    assert logits.isneginf().sum() == 4 * 12 - 2


def test_the_scale_of_an_fp8_query_counts_once() -> None:
    """A query and its double give a logit and its double, though their stored values are the same bytes."""
    _, _, _, cache, table, requests, lens = batch("indexer_fp8", 1)
    q, weights, positions = torch.randn(1, 3, 128), torch.randn(1, 3), torch.tensor([7])
    lens[:] = 9
    logits = []
    for factor in (1.0, 2.0):
        prepared = indexer_q_rope_quant(q * factor, positions, table_for(64), weights, "indexer_fp8")
        logits.append(indexer_logits(*prepared, cache, table, requests, lens, BLOCK, "indexer_fp8", 9))
    assert_bitwise(logits[1], logits[0] * 2)


@FORMATS
@pytest.mark.parametrize("topk", [1, 4, 12])
def test_topk_selects_by_the_logits(fmt: str, topk: int) -> None:
    args = batch(fmt, 70)
    logits = indexer_logits(*args, BLOCK, fmt, 12)
    expected = []
    for row, length in zip(logits.tolist(), args[-1].tolist(), strict=True):
        best = sorted(sorted(range(length), key=lambda j: (-row[j], j))[:topk])
        expected.append(best + [-1] * (topk - len(best)))
    assert indexer_logits_topk(*args, BLOCK, fmt, topk).tolist() == expected


@FORMATS
def test_gathered_keys_select_what_their_pages_do(fmt: str) -> None:
    q, q_scale, weights, cache, table, _, _ = batch(fmt, 21)
    lengths = torch.tensor([9, 12])
    cumulative = torch.tensor([0, 9, 21], dtype=torch.int32)
    requests = torch.tensor([0] * 9 + [1] * 12, dtype=torch.int32)
    lens = torch.cat([torch.arange(1, n + 1) for n in lengths]).int()
    if fmt == "plain":
        k, k_scale = cache.new_empty(21, 24), torch.empty(21, 0, dtype=torch.uint8)
    else:
        page = layout.PAGE_LAYOUTS[fmt]
        k, k_scale = (torch.empty(21, width, dtype=torch.uint8) for width in (page.data, page.scale))
    cp_gather_indexer_k(cache, table, cumulative, k, k_scale, BLOCK, fmt)
    starts = cumulative[requests.long()]
    gathered = indexer_logits_topk_ragged(q, q_scale, weights, k, k_scale, starts, starts + lens, fmt, 5)
    paged = indexer_logits_topk(q, q_scale, weights, cache, table, requests, lens, BLOCK, fmt, 5)
    assert_bitwise(gathered, paged)


def test_the_real_dimensions() -> None:
    """64 heads of 128 dims, pages of 64 entries, 512 selected: every selected logit is at least every other one."""
    tokens, columns, block = 3, 11, 64
    q, weights = torch.randn(tokens, 64, 128).bfloat16(), torch.randn(tokens, 64).bfloat16()
    prepared = indexer_q_rope_quant(q, torch.tensor([3, 4, 5]), table_for(64), weights, "indexer_fp8")
    cache = layout.allocate_cache("indexer_fp8", columns, block)
    store_indexer(cache, "indexer_fp8", block, torch.arange(columns * block), torch.randn(columns * block, 128))
    table = torch.randperm(columns).int()[None]
    requests, lens = torch.zeros(3, dtype=torch.int32), torch.tensor([700, 513, 512], dtype=torch.int32)
    args = (*prepared, cache, table, requests, lens, block, "indexer_fp8")
    logits, selected = indexer_logits(*args, 704), indexer_logits_topk(*args, 512)
    assert selected[2].tolist() == list(range(512))
    for row, chosen, length in zip(logits, selected.long(), lens.tolist(), strict=True):
        assert chosen.unique().tolist() == chosen.tolist()
        others = torch.ones(length, dtype=torch.bool)
        others[chosen] = False
        assert length == 512 or row[chosen].min() >= row[:length][others].max()


def test_float32_scores_and_selections_are_those_of_hugging_face() -> None:
    tokens, ratio, dim = 150, 4, 32
    config = DeepseekV4Config(
        hidden_size=48,
        head_dim=64,
        qk_rope_head_dim=8,
        q_lora_rank=24,
        index_head_dim=dim,
        index_n_heads=32,
        index_topk=6,
        layer_types=["compressed_sparse_attention"],
        num_hidden_layers=1,
        max_position_embeddings=1024,
    )
    indexer = hf.DeepseekV4Indexer(config)
    with torch.no_grad():
        for parameter in indexer.parameters():
            parameter.normal_(std=0.3)
    hidden, latent, positions = torch.randn(1, tokens, 48), torch.randn(1, tokens, 24), torch.arange(tokens)
    seen: dict[str, Tensor] = {}
    indexer.scorer.register_forward_hook(lambda _, args, scores: seen.update(k=args[1][0], scores=scores[0]))
    with torch.no_grad():
        chosen = indexer(hidden, latent, positions[None], None, 0)[0]
        q = indexer.q_b_proj(latent)[0].view(tokens, 32, dim)
        weights = indexer.scorer.weights_proj(hidden)[0]
    cos, sin = indexer.rotary_emb(hidden, positions[None], layer_type="compress")
    prepared = indexer_q_rope_quant(q, positions, torch.cat((cos, sin), dim=-1)[0], weights, "plain")

    columns = layout.cdiv(tokens // ratio, BLOCK)
    cache, table = torch.full((columns, BLOCK, dim), torch.nan), torch.randperm(columns).int()[None]
    entries = torch.arange(tokens // ratio)
    cache[table[0, entries // BLOCK].long(), entries % BLOCK] = seen["k"]
    requests, lens = torch.zeros(tokens, dtype=torch.int32), ((positions + 1) // ratio).int()
    args = (*prepared, cache, table, requests, lens, BLOCK, "plain")

    expected = seen["scores"].masked_fill(entries >= lens[:, None], -torch.inf)
    assert_close(indexer_logits(*args, tokens // ratio), expected, Tolerance(abs=2e-5, rel=1e-5, cosine=1e-10))
    for ours, theirs, scores in zip(indexer_logits_topk(*args, 6), chosen, expected, strict=True):
        ours, theirs = ours[ours >= 0].long(), theirs[theirs >= 0]
        assert len(ours) == len(theirs)
        # Which of two scores within rounding of each other wins is nobody's promise.
        assert_close(scores[ours].sort().values, scores[theirs].sort().values, SUM)


@FORMATS
def test_memory_does_not_grow_with_the_tokens(fmt: str) -> None:
    largest = []
    for tokens in (reference.TOKENS_AT_A_TIME, 5 * reference.TOKENS_AT_A_TIME):
        args = batch(fmt, tokens)
        with LargestTensor() as seen:
            REFERENCES["indexer_logits_topk"](*args, BLOCK, fmt, 2)
        largest.append(seen.elements)
    assert largest[0] == largest[1]


@FORMATS
def test_layout_of_the_arguments_does_not_matter(fmt: str) -> None:
    q, q_scale, weights, cache, table, requests, lens = args = batch(fmt, 6)
    longer = torch.cat((lens, torch.tensor([9, 9], dtype=torch.int32)))
    views = (strided(q), q_scale, strided(weights), cache, padded(table), strided(requests.long()), longer)
    assert_close(indexer_logits(*views, BLOCK, fmt, 12), indexer_logits(*args, BLOCK, fmt, 12), SUM)
    assert_bitwise(indexer_logits_topk(*views, BLOCK, fmt, 12), indexer_logits_topk(*args, BLOCK, fmt, 12))


@FORMATS
def test_ops_keep_their_promises(fmt: str) -> None:
    args = batch(fmt, 5)
    one = (*(x[:1] for x in args[:3]), args[3], args[4], args[5][:1], args[6][:1])
    empty = (*(x[:0] for x in args[:3]), args[3], args[4], args[5][:0], args[6][:0])
    unseen = (*args[:6], torch.zeros_like(args[6]))
    views = (strided(args[0]), args[1], strided(args[2]), args[3], padded(args[4]), args[5].long(), strided(args[6]))
    for op in (indexer_logits, indexer_logits_topk):
        check_op(op, [(*sample, BLOCK, fmt, 7) for sample in (args, one, views)], utilities=fmt == "indexer_fp8")
        check_op(op, [(*sample, BLOCK, fmt, 7) for sample in (empty, unseen)], utilities=False)


@FORMATS
def test_ragged_op_keeps_its_promises(fmt: str) -> None:
    q, q_scale, weights, cache, _, _, lens = batch(fmt, 5)
    page = layout.PAGE_LAYOUTS.get(fmt)
    k = torch.randint(0x78, (12, page.data), dtype=torch.uint8) if page else cache[:3].reshape(12, -1)
    k_scale = torch.randint(0x60, 0x80, (12, page.scale if page else 0), dtype=torch.uint8)
    starts = torch.tensor([0, 0, 3, 5, 12], dtype=torch.int32)
    samples = [
        (q, q_scale, weights, k, k_scale, starts, starts + lens),
        (q[:1], q_scale[:1], weights[:1], k[:0], k_scale[:0], starts[:1], lens[:1]),
        (strided(q), q_scale, weights, padded(k), padded(k_scale) if page else k_scale, starts.long(), strided(lens)),
    ]
    check_op(indexer_logits_topk_ragged, [(*sample, fmt, 6) for sample in samples], utilities=fmt == "indexer_fp8")
    empty = (q[:0], q_scale[:0], weights[:0], k, k_scale, starts[:0], lens[:0], fmt, 6)
    check_op(indexer_logits_topk_ragged, [empty], utilities=False)


@FORMATS
def test_references_never_synchronise(fmt: str) -> None:
    args = batch(fmt, 3)
    page = layout.PAGE_LAYOUTS.get(fmt)
    k = torch.zeros(8, page.data if page else 24, dtype=torch.uint8 if page else torch.float32)
    k_scale = torch.zeros(8, page.scale if page else 0, dtype=torch.uint8)
    with refuse_synchronization():
        REFERENCES["indexer_logits"](*args, BLOCK, fmt, 12)
        REFERENCES["indexer_logits_topk"](*args, BLOCK, fmt, 2)
        REFERENCES["indexer_logits_topk_ragged"](*args[:3], k, k_scale, *args[5:], fmt, 2)


@pytest.mark.parametrize(("fmt", "backend"), [("indexer_fp8", "inductor"), ("plain", "aot_eager")])
def test_compiles_once_for_every_token_count(fmt: str, backend: str) -> None:
    _, _, _, cache, table, _, _ = batch(fmt, 1)

    def step(q: Tensor, q_scale: Tensor, weights: Tensor, requests: Tensor, lens: Tensor) -> Tensor:
        selected = indexer_logits_topk(q, q_scale, weights, cache, table, requests, lens, BLOCK, fmt, 4)
        return torch.where(selected >= 0, selected * 2, -1)

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (3, 8, 70):
            q, q_scale, weights, _, _, requests, lens = batch(fmt, tokens)
            inputs = (q, q_scale, weights, requests, lens)
            for x in inputs:
                torch._dynamo.mark_dynamic(x, 0)
            assert_bitwise(compiled(*inputs), step(*inputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(2, 3, 128)}, "float8_e4m3fn"),
        ({0: torch.zeros(2, 3, 64, dtype=torch.float8_e4m3fn)}, "q is stored in indexer_fp8"),
        ({1: torch.zeros(2, 3, 4)}, "last dim of q_scale"),
        ({2: torch.zeros(2, 3, dtype=torch.bfloat16)}, "weights"),
        ({2: torch.zeros(2, 4)}, "same heads"),
        ({3: torch.zeros(2, 12, dtype=torch.uint8)}, r"\[E203\]"),
        ({4: torch.zeros(2, 3)}, "block_table"),
        ({5: torch.zeros(1, dtype=torch.int32)}, "token_to_req has a row"),
        ({6: torch.zeros(2)}, "context_lens"),
        ({8: "fp8"}, "unknown cache format"),
        ({9: 0}, "topk is at least 1"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[int, object], message: str) -> None:
    args: list[object] = [*batch("indexer_fp8", 2), BLOCK, "indexer_fp8", 3]
    for index, value in change.items():
        args[index] = value
    with pytest.raises(InputError, match=message):
        indexer_logits_topk(*args)


def test_wrong_arguments_of_the_other_two_are_refused() -> None:
    args = batch("indexer_fp8", 2)
    with pytest.raises(InputError, match="not negative"):
        indexer_logits(*args, BLOCK, "indexer_fp8", -1)
    k, k_scale = torch.zeros(6, 128, dtype=torch.uint8), torch.zeros(6, 4, dtype=torch.uint8)
    for wrong, message in (
        ((k[:, :64], k_scale, *args[5:]), "width of k"),
        ((k, k_scale.float(), *args[5:]), r"k_scale \[N, bytes\]"),
        ((k, k_scale, args[5][:1], args[6]), "row_starts has a row"),
    ):
        with pytest.raises(InputError, match=message):
            indexer_logits_topk_ragged(*args[:3], *wrong, "indexer_fp8", 3)
