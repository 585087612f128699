"""Builders of single cache groups and of all groups: equal results, one split, fixed addresses."""

from __future__ import annotations

import random
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.attention_backends import CudaGraphSupport
from dsv4_compile.attention_backends.group_metadata import (
    DeepseekV4CompressorMetadataBuilder,
    DeepseekV4FlashMLAMetadataBuilder,
    DeepseekV4IndexerMetadataBuilder,
)
from dsv4_compile.attention_backends.step_metadata import DeepseekV4StepBuilder
from dsv4_compile.attention_backends.types import CommonAttentionMetadata
from dsv4_compile.attention_backends.window_metadata import DeepseekSparseSWAMetadataBuilder
from dsv4_compile.errors import InputError
from dsv4_compile.metadata import BlockTables, MetadataBuffers
from dsv4_compile.testing.batch import Batch, Table, compressed_slot, entry_row, random_table, row, slot, table_tensor

MAX_LEN, TOKENS = 700, 600
WIDTH = layout.c128a_width(MAX_LEN)
MIXED = Batch((1, 1, 1, 2, 40, 300), (1, 640, 128, 257, 165, 300), padding=3)
DECODES = Batch((2, 2, 2, 0), (129, 4, 260, 0), padding=2)


def common(batch: Batch, table: Table) -> CommonAttentionMetadata:
    return CommonAttentionMetadata.of(
        query_start_loc=batch.query_start_loc().tolist(),
        seq_lens=batch.seq_lens,
        block_table=table_tensor(table, 3),
        slot_mapping=batch.slot_mapping(),
    )


def pages(seed: int, batch: Batch, tokens: int = layout.KV_BLOCK) -> Table:
    return random_table(random.Random(seed), len(batch.seq_lens), -(-MAX_LEN // tokens))


def padded_tokens(batch: Batch) -> list[tuple[int, int]]:
    return [(request if position >= 0 else 0, position) for request, position in batch.tokens()]


def tensors_of(value: Any) -> dict[str, Tensor]:
    values = {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: tensor for name, tensor in values.items() if isinstance(tensor, Tensor)}


@pytest.mark.parametrize("batch", [MIXED, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize("ratio", [4, 128])
def test_compressed_slots_and_split_are_exact(ratio: int, batch: Batch, seed: int) -> None:
    table = pages(seed, batch)
    builder = DeepseekV4FlashMLAMetadataBuilder(
        TOKENS, max_model_len=MAX_LEN, ratio=ratio, topk_tokens=512, decode_threshold=2
    )
    metadata = builder.build(0, common(batch, table))
    block = layout.storage_block_size(ratio)
    tokens = padded_tokens(batch)
    assert metadata.slot_mapping.tolist() == [compressed_slot(table, *token, block, ratio) for token in tokens]
    assert metadata.req_id_per_token.tolist() == [request for request, _ in tokens]
    assert (metadata.num_reqs, metadata.num_actual_tokens) == (len(batch.seq_lens), batch.num_tokens)
    assert (metadata.max_query_len, metadata.max_seq_len) == (max(batch.query_lens), max(batch.seq_lens))
    assert (metadata.block_size, metadata.topk_tokens) == (256, 512)
    split = (metadata.num_decodes, metadata.num_prefills, metadata.num_decode_tokens, metadata.num_prefill_tokens)
    assert split == ((4, 2, 5, 343) if batch is MIXED else (4, 0, 8, 0))


@pytest.mark.parametrize("batch", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_ratio_128_rows_are_slots_for_decodes_and_request_indices_for_prefills(batch: Batch, seed: int) -> None:
    table = pages(seed, batch)
    builder = DeepseekV4FlashMLAMetadataBuilder(TOKENS, max_model_len=MAX_LEN, ratio=128, decode_threshold=2)
    metadata = builder.build(0, common(batch, table))
    tokens = padded_tokens(batch)
    rows = [entry_row(table, *token, WIDTH, 2, 128) for token in tokens[: metadata.num_decode_tokens]]
    assert metadata.c128a_global_decode_topk_indices.shape == (metadata.num_decode_tokens, 1, WIDTH)
    assert metadata.c128a_global_decode_topk_indices.squeeze(1).tolist() == [indices for indices, _ in rows]
    assert metadata.c128a_decode_topk_lens.tolist() == [count for _, count in rows]
    if batch is DECODES:
        assert metadata.c128a_prefill_topk_indices is None
    else:
        local = [row(range((position + 1) // 128), WIDTH) for _, position in tokens[metadata.num_decode_tokens :]]
        assert metadata.c128a_prefill_topk_indices.tolist() == local


def test_window_only_layer_keeps_the_raw_slots(seed: int) -> None:
    cm = common(MIXED, pages(seed, MIXED))
    metadata = DeepseekV4FlashMLAMetadataBuilder(TOKENS, max_model_len=MAX_LEN).build(0, cm)
    assert metadata.slot_mapping is cm.slot_mapping
    assert metadata.c128a_global_decode_topk_indices is None


def test_indexer_metadata_is_exact(seed: int) -> None:
    table = pages(seed, MIXED)
    metadata = DeepseekV4IndexerMetadataBuilder(TOKENS, max_model_len=MAX_LEN, ratio=4).build(0, common(MIXED, table))
    tokens = padded_tokens(MIXED)
    assert metadata.slot_mapping.tolist() == [compressed_slot(table, *token, 64, 4) for token in tokens]
    assert metadata.context_lens.tolist() == [(position + 1) // 4 for _, position in tokens]
    assert metadata.is_valid_token.tolist() == [position >= 0 for _, position in tokens]
    assert metadata.max_context == 175
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (3, 3)


@pytest.mark.parametrize(("ratio", "indexer", "block"), [(4, False, 4), (4, True, 4), (128, False, 8)])
def test_compressor_metadata_has_a_state_slot_for_each_token(ratio: int, indexer: bool, block: int, seed: int) -> None:
    table = pages(seed, MIXED, block)
    builder = DeepseekV4CompressorMetadataBuilder(TOKENS, max_model_len=MAX_LEN, ratio=ratio, indexer=indexer)
    metadata = builder.build(0, common(MIXED, table))
    assert metadata.slot_mapping.tolist() == [slot(table, *token, block) for token in padded_tokens(MIXED)]
    assert metadata.block_size == block


def loaded(batch: Batch, seed: int) -> tuple[MetadataBuffers, dict[str, Table]]:
    buffers = MetadataBuffers(max_num_batched_tokens=TOKENS, max_num_seqs=7, max_model_len=MAX_LEN)
    tables = {
        group: random_table(random.Random(seed + i), len(batch.seq_lens), buffers.plan.sizes[f"{group}_blocks"])
        for i, group in enumerate(buffers.groups)
    }
    tensors = {group: table_tensor(table) for group, table in tables.items()}
    buffers.load(batch.query_start_loc(), batch.seq_lens, block_tables=BlockTables.of(tensors))
    return buffers, tables


@pytest.mark.parametrize("batch", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_step_builder_equals_the_builders_of_single_groups(batch: Batch, seed: int) -> None:
    buffers, tables = loaded(batch, seed)
    step = DeepseekV4StepBuilder(buffers, topk_tokens=64, decode_threshold=2).build(
        batch.query_start_loc().tolist(), batch.seq_lens, batch.num_tokens
    )
    sizes: dict[str, Any] = {"max_model_len": MAX_LEN, "decode_threshold": 2}
    single: list[tuple[Any, Any]] = [
        (step.extra[ratio], DeepseekV4FlashMLAMetadataBuilder(TOKENS, ratio=ratio, topk_tokens=64, **sizes))
        for ratio in (4, 128)
    ]
    single.append((step.indexers[4], DeepseekV4IndexerMetadataBuilder(TOKENS, ratio=4, **sizes)))
    for group, ratio in (("states_4", 4), ("key_states_4", 4), ("states_128", 128)):
        options = {"indexer": group == "key_states_4", "ratio": ratio}
        single.append((step.states[group], DeepseekV4CompressorMetadataBuilder(TOKENS, **options, **sizes)))
    single.append((step.swa, DeepseekSparseSWAMetadataBuilder(TOKENS, decode_threshold=2)))
    groups = ("entries_4", "entries_128", "keys_4", "states_4", "key_states_4", "states_128", "window")
    for group, (all_at_once, builder) in zip(groups, single, strict=True):
        alone = builder.build(0, common(batch, tables[group]))
        ours, theirs = tensors_of(all_at_once), tensors_of(alone)
        assert set(ours) == set(theirs)
        for name, tensor in theirs.items():
            if (group, name) != ("window", "slot_mapping"):  # the single builder returns the engine's slots
                assert ours[name].tolist() == tensor.tolist(), (group, name)
    assert step.of(1).extra is None and step.of(4).extra is step.extra[4]


def test_addresses_and_strides_of_a_step_never_change(seed: int) -> None:
    buffers, _ = loaded(DECODES, seed)
    builder = DeepseekV4StepBuilder(buffers, decode_threshold=2)
    seen = set()
    for lens in ((129, 4, 260, 0), (2, 600, 9, 0)):
        buffers.load(DECODES.query_start_loc(), lens)
        step = builder.build(DECODES.query_start_loc().tolist(), lens, DECODES.num_tokens)
        parts = (step.swa, *step.extra.values(), *step.indexers.values(), *step.states.values())
        tensors_of_parts = [tensors_of(part_metadata) for part_metadata in parts]
        seen.add(
            tuple(
                (n, t.data_ptr(), t.stride())
                for tensors in tensors_of_parts
                for n, t in tensors.items()
                if "gather" not in n
            )
        )
    assert len(seen) == 1


def test_builders_on_common_buffers_need_equal_capacities() -> None:
    buffers = MetadataBuffers(max_num_batched_tokens=8, max_num_seqs=2, max_model_len=MAX_LEN)
    builder = DeepseekV4FlashMLAMetadataBuilder(8, max_model_len=MAX_LEN, ratio=4, buffers=buffers)
    assert builder.tensors["entries_4_slots"] is buffers.tensors["entries_4_slots"]
    with pytest.raises(InputError, match="E204"):
        DeepseekV4FlashMLAMetadataBuilder(9, max_model_len=MAX_LEN, ratio=4, buffers=buffers)
    with pytest.raises(InputError, match="E205"):
        DeepseekV4FlashMLAMetadataBuilder(8, max_model_len=MAX_LEN, ratio=4, block_size=64)
    assert builder.cudagraph_support is CudaGraphSupport.UNIFORM_BATCH


def test_from_engine_equals_the_constructor(seed: int) -> None:
    engine = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=TOKENS),
        model_config=SimpleNamespace(max_model_len=MAX_LEN, hf_config=SimpleNamespace(index_topk=512)),
        speculative_config=SimpleNamespace(num_speculative_tokens=1),
    )
    group = SimpleNamespace(compress_ratio=128, block_size=256)
    cm = common(MIXED, pages(seed, MIXED))
    metadata = DeepseekV4FlashMLAMetadataBuilder.from_engine(group, ["layers.3.attn"], engine, "cpu").build(0, cm)
    sizes: dict[str, Any] = {"max_model_len": MAX_LEN, "ratio": 128, "topk_tokens": 512, "decode_threshold": 2}
    wanted = DeepseekV4FlashMLAMetadataBuilder(TOKENS, **sizes).build(0, cm)
    for field in fields(wanted):
        a, b = getattr(metadata, field.name), getattr(wanted, field.name)
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b, field.name
    assert metadata.num_decode_tokens == 5
    for kind in (DeepseekV4IndexerMetadataBuilder, DeepseekV4CompressorMetadataBuilder):
        state = kind.from_engine(SimpleNamespace(compress_ratio=4), ["layers.2.attn"], engine, "cpu").build(0, cm)
        assert state.req_id_per_token.tolist() == wanted.req_id_per_token.tolist()
    engine.speculative_config = None
    builder = DeepseekV4FlashMLAMetadataBuilder.from_engine(group, ["layers.3.attn"], engine, "cpu")
    assert builder.reorder_batch_threshold == 1


def test_capture_batch_of_slots_minus_one_is_all_padding() -> None:
    """Engines capture with maximal lengths, slots of -1 and page 0: reads are legal and nothing is written."""
    requests = 6
    cm = CommonAttentionMetadata.of(
        query_start_loc=range(requests + 1),
        seq_lens=[MAX_LEN] * requests,
        block_table=torch.zeros(requests, 3, dtype=torch.int32),
        slot_mapping=torch.full((requests,), -1),
    )
    extra = DeepseekV4FlashMLAMetadataBuilder(TOKENS, max_model_len=MAX_LEN, ratio=128).build(0, cm)
    keys = DeepseekV4IndexerMetadataBuilder(TOKENS, max_model_len=MAX_LEN, ratio=4).build(0, cm)
    assert (extra.slot_mapping == -1).all() and (keys.slot_mapping == -1).all()
    assert not extra.c128a_decode_topk_lens.any() and not keys.context_lens.any()
    assert (extra.c128a_global_decode_topk_indices == -1).all()
    assert extra.c128a_global_decode_topk_indices.stride(0) == WIDTH
