from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from dsv4_compile import layout
from dsv4_compile.errors import InputError
from dsv4_compile.metadata import AttentionMetadata, build_batch_metadata, build_metadata
from dsv4_compile.testing import hostile_indices, refuse_synchronization, strided
from dsv4_compile.testing.batch import Batch, random_batch

MAX_LEN = 700


def of_batch(model: Any, batch: Batch, **options: object) -> AttentionMetadata:
    return build_batch_metadata(
        query_start_loc=batch.query_start_loc(),
        seq_lens=batch.seq_lens_tensor(),
        num_tokens=batch.num_tokens,
        block_tables=model.tables,
        window=model.window,
        max_model_len=model.max_model_len,
        **options,
    )


def of_tokens(model: Any, tokens: list[tuple[int, int]]) -> AttentionMetadata:
    requests, positions = zip(*tokens, strict=True) if tokens else ((), ())
    return build_metadata(
        positions=torch.tensor(positions, dtype=torch.int64),
        token_to_req=torch.tensor(requests, dtype=torch.int32),
        is_valid_token=torch.tensor([position >= 0 for position in positions], dtype=torch.bool),
        block_tables=model.tables,
        window=model.window,
        max_model_len=model.max_model_len,
    )


def test_mixed_batch_is_exact(batch_model: type, assert_describes: Callable) -> None:
    """Cover two decodes, decodes across a group of 4 and of 128, a prefill chunk that begins inside both kinds of
    group, a whole prefill, a padded request and padding tokens."""
    batch = Batch((1, 1, 2, 3, 200, 300, 0), (1, 640, 129, 257, 490, 300, 0), padding=5)
    model = batch_model(random.Random(0), 7, MAX_LEN, 128)
    metadata = of_batch(model, batch)
    assert_describes(metadata, model, batch.tokens())
    assert metadata.is_valid_token.tolist() == [True] * 507 + [False] * 5
    assert metadata.sources[128].indices.shape == (512, 128)


@pytest.mark.parametrize("hostile", [False, True])
def test_random_batches_are_exact(batch_model: type, assert_describes: Callable, hostile: bool, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        batch = random_batch(rng, max_seq_len=MAX_LEN)
        model = batch_model(rng, len(batch.seq_lens), MAX_LEN, rng.choice((5, 128)), hostile)
        assert_describes(of_batch(model, batch), model, batch.tokens())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_tokens_in_any_order_are_exact(batch_model: type, assert_describes: Callable, data: st.DataObject) -> None:
    model = batch_model(data.draw(st.randoms(use_true_random=False)), 3, 300, 8)
    token = st.tuples(st.integers(0, 2), st.integers(-1, 299))
    tokens = data.draw(st.lists(token, max_size=12))
    assert_describes(of_tokens(model, tokens), model, tokens)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lens=st.lists(st.integers(0, 9), min_size=1, max_size=4), width=st.integers(9, 11), past=st.integers(0, 280))
def test_left_padded_batches_are_exact(
    batch_model: type, assert_describes: Callable, lens: list[int], width: int, past: int
) -> None:
    """In Hugging Face's batches row b, column s is token b * S + s, and each row begins with its padding."""
    rows = len(lens)
    model = batch_model(random.Random(0), rows, 300, 16)
    column = torch.arange(width).repeat(rows, 1)
    first = width - torch.tensor(lens)[:, None]
    valid = column >= first
    metadata = build_metadata(
        positions=torch.where(valid, column - first + past, 1).flatten(),  # generate() gives padding position 1
        token_to_req=torch.arange(rows).repeat_interleave(width),
        is_valid_token=valid.flatten(),
        block_tables=model.tables,
        window=16,
        max_model_len=300,
    )
    tokens = [
        (b, past + s - (width - length) if s >= width - length else -1)
        for b, length in enumerate(lens)
        for s in range(width)
    ]
    assert_describes(metadata, model, tokens)


def test_both_builders_agree(batch_model: type, seed: int) -> None:
    rng = random.Random(seed)
    batch = Batch((1, 4, 150), (77, 130, 300), padding=2)
    model = batch_model(rng, 3, MAX_LEN, 128)
    one, other = of_batch(model, batch), of_tokens(model, batch.tokens())
    assert all(map(torch.equal, pytree.tree_leaves(one), pytree.tree_leaves(other)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    queries=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 290)), min_size=1, max_size=3),
    requests=st.integers(0, 2),
    padding=st.integers(0, 4),
)
def test_padding_never_changes_a_token(
    batch_model: type, queries: list[tuple[int, int]], requests: int, padding: int
) -> None:
    query_lens = tuple(query_len for query_len, _ in queries)
    seq_lens = tuple(query_len + context for query_len, context in queries)
    model = batch_model(random.Random(0), len(queries) + requests, 300, 8)
    bare = of_batch(model, Batch(query_lens, seq_lens))
    full = of_batch(model, Batch(query_lens + (0,) * requests, seq_lens + (0,) * requests, padding))
    tables = {id(table) for table in pytree.tree_leaves(model.tables)}
    for a, b in zip(pytree.tree_leaves(bare), pytree.tree_leaves(full), strict=True):
        assert a is b if id(a) in tables else torch.equal(a, b[: sum(query_lens)])


def test_negative_engine_slots_mark_padding(batch_model: type, assert_describes: Callable) -> None:
    batch = Batch((2, 3), (20, 3))
    model = batch_model(random.Random(0), 2, MAX_LEN, 8)
    metadata = of_batch(model, batch, slot_mapping=torch.tensor([5, -1, 9, 0, -1]))
    assert_describes(metadata, model, [(0, 18), (0, -1), (1, 0), (1, 1), (1, -1)])


def test_empty_batch_gives_empty_metadata(batch_model: type, assert_describes: Callable) -> None:
    model = batch_model(random.Random(0), 2, MAX_LEN, 8)
    assert_describes(of_batch(model, Batch((0, 0), (0, 0))), model, [])
    assert_describes(of_batch(model, Batch((), (), padding=3)), model, [(-1, -1)] * 3)
    assert_describes(of_tokens(model, []), model, [])


def test_strided_inputs_are_exact(batch_model: type, assert_describes: Callable) -> None:
    batch = Batch((1, 30), (200, 90), padding=1)
    model = batch_model(random.Random(0), 2, MAX_LEN, 8)
    spread = pytree.tree_map(strided, model.tables)
    metadata = build_batch_metadata(
        query_start_loc=strided(batch.query_start_loc()),
        seq_lens=strided(batch.seq_lens_tensor()),
        num_tokens=batch.num_tokens,
        block_tables=spread,
        window=8,
        max_model_len=MAX_LEN,
    )
    model.tables = spread
    assert_describes(metadata, model, batch.tokens())


def test_hostile_tokens_and_tables_become_padding(batch_model: type) -> None:
    model = batch_model(random.Random(0), 3, MAX_LEN, 16, hostile=True)
    metadata = build_metadata(
        positions=hostile_indices((200,), MAX_LEN, dtype=torch.int64),
        token_to_req=hostile_indices((200,), 3),
        is_valid_token=torch.rand(200) < 0.9,
        block_tables=model.tables,
        window=16,
        max_model_len=MAX_LEN,
    )
    assert ((metadata.token_to_req >= 0) & (metadata.token_to_req < 3)).all()
    assert (metadata.positions >= 0).all()
    assert (metadata.window.indices >= -1).all()
    assert (metadata.sources[128].indices >= -1).all()
    padding = ~metadata.is_valid_token
    assert (metadata.window.slot_mapping[padding] == -1).all()
    assert not metadata.window.lens[padding].any()
    assert not metadata.sources[4].context_lens[padding].any()
    assert not metadata.sources[128].lens[padding].any()


def test_building_does_not_synchronise(batch_model: type) -> None:
    batch = Batch((1, 5), (9, 5), padding=2)
    model = batch_model(random.Random(0), 2, MAX_LEN, 8)
    inputs = batch.query_start_loc(), batch.seq_lens_tensor()
    with refuse_synchronization():
        build_batch_metadata(
            query_start_loc=inputs[0],
            seq_lens=inputs[1],
            num_tokens=8,
            block_tables=model.tables,
            window=8,
            max_model_len=MAX_LEN,
        )


@pytest.mark.parametrize("ratios", [(), (0, 1), (4,), (128,), [0, 128, 4, 128]])
def test_only_the_ratios_of_the_model_are_built(batch_model: type, ratios: tuple[int, ...]) -> None:
    model = batch_model(random.Random(0), 1, MAX_LEN, 8)
    model.tables = model.tables.of_ratios(ratios)
    metadata = of_batch(model, Batch((2,), (9,)), ratios=ratios)
    assert set(metadata.sources) == {*ratios} - {0, 1}


@pytest.mark.parametrize("missing", ["entries_4", "states_4", "keys_4", "key_states_4", "entries_128", "states_128"])
def test_missing_block_table_raises_with_its_name(batch_model: type, missing: str) -> None:
    model = batch_model(random.Random(0), 1, MAX_LEN, 8)
    role, _, ratio = missing.rpartition("_")
    sources = dict(model.tables.sources)
    sources[int(ratio)] = replace(sources[int(ratio)], **{role: None})
    model.tables = replace(model.tables, sources=sources)
    with pytest.raises(InputError, match=f"no block table of {missing}"):
        of_batch(model, Batch((2,), (9,)))


def test_window_block_size_is_respected(batch_model: type) -> None:
    model = batch_model(random.Random(0), 1, MAX_LEN, 4)
    model.tables = replace(model.tables, window=torch.tensor([[3, 1]], dtype=torch.int32))
    metadata = of_batch(model, Batch((1,), (34,)), window_block_size=32, ratios=())
    assert metadata.window.indices.tolist() == [[126, 127, 32, 33]]
    assert metadata.window.slot_mapping.tolist() == [33]


@pytest.mark.parametrize(("max_model_len", "width"), [(1, 128), (16384, 128), (16385, 256), (131072, 1024)])
def test_lists_of_entries_have_the_width_from_layout(batch_model: type, max_model_len: int, width: int) -> None:
    model = batch_model(random.Random(0), 1, MAX_LEN, 8)
    model.max_model_len = max_model_len
    assert of_batch(model, Batch((1,), (1,))).sources[128].indices.shape == (1, width)
    assert layout.listed_width(128, max_model_len) == layout.c128a_width(max_model_len) == width
