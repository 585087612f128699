from __future__ import annotations

import random

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dsv4_compile.metadata import AttentionMetadata, BlockTables, build_batch_metadata, build_metadata
from dsv4_compile.testing.batch import random_batch

MAX_LEN = 700


def assert_same(got: AttentionMetadata, want: AttentionMetadata) -> None:
    got_leaves, got_spec = pytree.tree_flatten(got)
    want_leaves, want_spec = pytree.tree_flatten(want)
    assert got_spec == want_spec
    for a, b in zip(got_leaves, want_leaves, strict=True):
        assert a.dtype is b.dtype
        assert torch.equal(a, b)


def per_token(positions: Tensor, token_to_req: Tensor, valid: Tensor, tables: BlockTables) -> AttentionMetadata:
    return build_metadata(
        positions=positions,
        token_to_req=token_to_req,
        is_valid_token=valid,
        block_tables=tables,
        window=128,
        max_model_len=MAX_LEN,
    )


def token_arguments(rng: random.Random, tokens: int) -> tuple[Tensor, ...]:
    arguments = (
        torch.randint(-1, MAX_LEN, (tokens,)),
        torch.randint(4, (tokens,), dtype=torch.int32),
        torch.rand(tokens) < 0.9,
    )
    for x in arguments:
        torch._dynamo.mark_dynamic(x, 0)
    return arguments


def test_build_metadata_compiles_once_for_every_size(batch_model: type, seed: int) -> None:
    rng = random.Random(seed)
    tables = batch_model(rng, 4, MAX_LEN, 128).tables
    compiled = torch.compile(per_token, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in [rng.randint(2, 600) for _ in range(20)]:
            arguments = token_arguments(rng, tokens)
            assert_same(compiled(*arguments, tables), per_token(*arguments, tables))


def test_build_batch_metadata_compiles_once_for_every_batch(batch_model: type, seed: int) -> None:
    """Only num_tokens is dynamic: an engine pads its requests to a fixed number of rows."""
    rng = random.Random(seed)
    tables = batch_model(rng, 8, MAX_LEN, 128).tables

    def step(starts: Tensor, seq_lens: Tensor, slots: Tensor, tables: BlockTables) -> AttentionMetadata:
        return build_batch_metadata(
            query_start_loc=starts,
            seq_lens=seq_lens,
            num_tokens=slots.shape[0],
            block_tables=tables,
            window=128,
            max_model_len=MAX_LEN,
            slot_mapping=slots,
        )

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(20):
            batch = random_batch(rng, max_seq_len=MAX_LEN)
            starts, seq_lens = batch.query_start_loc(), batch.seq_lens_tensor()
            rows = 8 - seq_lens.shape[0]
            starts = torch.cat((starts, starts[-1:].expand(rows)))
            seq_lens = torch.nn.functional.pad(seq_lens, (0, rows))
            slots = torch.nn.functional.pad(batch.slot_mapping(), (0, 3), value=-1)
            torch._dynamo.mark_dynamic(slots, 0)
            assert_same(compiled(starts, seq_lens, slots, tables), step(starts, seq_lens, slots, tables))


def test_metadata_can_be_an_intermediate_of_a_graph(batch_model: type, seed: int) -> None:
    """A graph that builds and uses metadata returns tensors only."""
    rng = random.Random(seed)
    tables = batch_model(rng, 4, MAX_LEN, 128).tables

    def step(*arguments: Tensor) -> Tensor:
        metadata = per_token(*arguments, tables)
        return metadata.window.indices.sum(1) + metadata.sources[128].lens + metadata.sources[4].context_lens

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    arguments = token_arguments(rng, 30)
    assert torch.equal(compiled(*arguments), step(*arguments))
