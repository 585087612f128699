"""Persistent metadata: every row of every step equals a fresh build, over poisoned buffers, at fixed addresses."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from dsv4_compile import layout
from dsv4_compile.errors import GraphError, InputError
from dsv4_compile.metadata import (
    BUFFERS,
    AttentionMetadata,
    BlockTables,
    MetadataBuffers,
    build_batch_metadata,
    plan_buffers,
)
from dsv4_compile.testing import assert_bitwise
from dsv4_compile.testing.batch import Batch, random_batch

WINDOW, MAX_LEN, REQUESTS, TOKENS = 9, 700, 8, 1500
SIZES = {"max_num_batched_tokens": TOKENS, "max_num_seqs": REQUESTS, "max_model_len": MAX_LEN, "window": WINDOW}


def made(**options: Any) -> MetadataBuffers:
    return MetadataBuffers(**(SIZES | options))


def random_tables(rng: random.Random, buffers: MetadataBuffers, requests: int = REQUESTS) -> BlockTables:
    def table(group: str) -> Tensor:
        columns = buffers.plan.sizes[f"{group}_blocks"]
        pages = rng.sample(range(requests * columns), requests * columns)
        return torch.tensor(pages, dtype=torch.int32).view(requests, columns)

    return BlockTables.of({group: table(group) for group in buffers.groups})


def poison(buffers: MetadataBuffers) -> None:
    """Fill every buffer that a refresh must rewrite with garbage."""
    for spec in buffers.plan.specs:
        if spec.filled_by == "refresh":
            tensor = buffers.tensors[spec.name]
            tensor.fill_(1 if spec.dtype is torch.bool else torch.iinfo(spec.dtype).max - 3)


def fresh(buffers: MetadataBuffers, num_tokens: int) -> AttentionMetadata:
    """Return the metadata that `build_batch_metadata` builds from the same inputs."""
    slots = buffers.tensors.get("slot_mapping")
    return build_batch_metadata(
        query_start_loc=buffers.tensors["query_start_loc"],
        seq_lens=buffers.tensors["seq_lens"],
        num_tokens=num_tokens,
        block_tables=buffers.block_tables,
        window=WINDOW,
        max_model_len=MAX_LEN,
        slot_mapping=None if slots is None else slots[:num_tokens],
    )


def assert_fresh(buffers: MetadataBuffers, num_tokens: int) -> None:
    ours, theirs = buffers.metadata(num_tokens), fresh(buffers, num_tokens)
    for (path, a), (_, b) in zip(*map(pytree.tree_leaves_with_path, (ours, theirs)), strict=True):
        assert_bitwise(a, b, label=pytree.keystr(path))


def addresses(tree: object) -> list[tuple[int, tuple[int, ...]]]:
    return [(t.data_ptr(), t.stride()) for t in pytree.tree_leaves(tree)]


@pytest.mark.parametrize("engine_slots", [False, True])
def test_random_batches_over_poisoned_buffers_equal_fresh_builds(engine_slots: bool, seed: int) -> None:
    rng = random.Random(seed)
    buffers = made(engine_slots=engine_slots)
    buffers.load([0], [], slot_mapping=torch.zeros(0, dtype=torch.int64) if engine_slots else None)
    for _ in range(6):
        batch = random_batch(rng, max_seq_len=200)
        slots = batch.slot_mapping() if engine_slots else None
        tables = random_tables(rng, buffers)
        buffers.load(batch.query_start_loc(), batch.seq_lens_tensor(), block_tables=tables, slot_mapping=slots)
        poison(buffers)
        buffers.refresh()
        assert_fresh(buffers, batch.num_tokens)
        assert_fresh(buffers, TOKENS)


class Requests:
    """Requests that join, grow by any number of tokens, and leave the rows of one batch."""

    def __init__(self) -> None:
        self.lens = [0] * REQUESTS

    def step(self, moves: list[tuple[str, int]]) -> Batch:
        query = [0] * REQUESTS
        for row, (what, tokens) in enumerate(moves):
            if what == "leave":
                self.lens[row] = 0
            elif what == "join" or (what == "grow" and self.lens[row]):
                before = 0 if what == "join" else self.lens[row]
                query[row] = min(tokens, MAX_LEN - before)
                self.lens[row] = before + query[row]
        # A request without a query in this step is padding: it keeps its row and has length 0 in the batch.
        return Batch(tuple(query), tuple(n if q else 0 for n, q in zip(self.lens, query, strict=True)))


MOVE = st.tuples(
    st.sampled_from(["grow", "grow", "grow", "join", "leave", "stay"]), st.sampled_from([1, 1, 2, 4, 5, 127, 150])
)


@settings(max_examples=15)
@given(
    steps=st.lists(st.lists(MOVE, min_size=REQUESTS, max_size=REQUESTS), min_size=2, max_size=5), pads=st.integers(0, 9)
)
def test_any_sequence_of_steps_equals_fresh_builds(steps: list[list[tuple[str, int]]], pads: int) -> None:
    buffers, requests = made(), Requests()
    buffers.load([0], [], block_tables=random_tables(random.Random(0), buffers))
    seen: dict[int, list[Any]] = {}
    for moves in steps:
        batch = requests.step(moves)
        buffers.load(batch.query_start_loc(), batch.seq_lens_tensor())
        poison(buffers)
        bucket = min(-(-(batch.num_tokens + pads) // 64) * 64, TOKENS)
        buffers.refresh(bucket)
        assert_fresh(buffers, bucket)
        assert_fresh(buffers, batch.num_tokens)
        assert seen.setdefault(bucket, addresses(buffers.metadata(bucket))) == addresses(buffers.metadata(bucket))


def test_1000_steps_of_advance_and_load_equal_fresh_builds(seed: int) -> None:
    """Mix `advance` for decodes of one and three tokens with batches that the host loads."""
    rng, rows, stopped = random.Random(seed), REQUESTS * 3, 0
    buffers = made(max_num_batched_tokens=rows)
    buffers.load([0], [], block_tables=random_tables(rng, buffers))
    ones = torch.ones(REQUESTS, 2, dtype=torch.int64)
    for step in range(1000):
        if step % 25 == 0:
            stopped += int((buffers.tensors["overflow"] > 0).sum())
            lens = [rng.choice((0, 1, 2, 126, 250, rng.randint(1, MAX_LEN))) for _ in range(REQUESTS)]
            starts = [sum(min(n, 1) for n in lens[:r]) for r in range(REQUESTS + 1)]
            reserved = [rng.randint(n, min(n + 60, MAX_LEN)) for n in lens]
            buffers.load(starts, lens, input_ids=[1] * starts[-1], reserved=reserved)
        else:
            drafts = rng.choice((None, ones))
            accepted = torch.tensor([rng.randint(0, 4) for _ in range(REQUESTS)])
            buffers.advance(accepted, ones, drafts, query_len=1 if drafts is None else 3)
        poison(buffers)
        buffers.refresh(rows)
        assert_fresh(buffers, rows)
        live = buffers.metadata(rows).is_valid_token
        assert torch.equal(buffers.tensors["input_ids"], live.long())
        assert bool((buffers.tensors["seq_lens"] <= buffers.tensors["reserved"]).all())
    assert stopped > 100


def test_buffers_match_the_table_and_start_with_their_pad_values() -> None:
    buffers = made(engine_slots=True)
    assert set(buffers.tensors) == {spec.name for spec in BUFFERS} == {spec.name for spec in buffers.plan.specs}
    for spec in buffers.plan.specs:
        tensor = buffers.tensors[spec.name]
        assert (tensor.dtype, tuple(tensor.shape)) == (spec.dtype, buffers.plan.shape(spec)), spec.name
        assert bool((tensor == buffers.plan.pad(spec)).all()), spec.name
    buffers.load([0], [], slot_mapping=torch.zeros(0, dtype=torch.int64))
    poison(buffers)
    buffers.refresh()
    for spec in buffers.plan.specs:
        assert bool((buffers.tensors[spec.name] == buffers.plan.pad(spec)).all()), spec.name


def test_plan_predicts_the_allocated_bytes() -> None:
    for options in ({}, {"ratios": (1,)}, {"ratios": (4,)}, {"ratios": (128,)}, {"engine_slots": True}):
        plan, buffers = plan_buffers(**SIZES, **options), made(**options)
        assert plan.nbytes == buffers.nbytes == sum(t.untyped_storage().nbytes() for t in buffers.tensors.values())
        assert f"{plan.nbytes:,}" in str(plan)


def test_metadata_consists_of_declared_buffers_only() -> None:
    buffers = made()
    buffers.refresh()
    starts = {tensor.data_ptr(): name for name, tensor in buffers.tensors.items()}
    names = {starts[leaf.data_ptr()] for leaf in pytree.tree_leaves(buffers.metadata(5))}
    inputs = {"query_start_loc", "seq_lens", "input_ids", "reserved", "overflow", "window_block_table"}
    assert names == set(buffers.tensors) - inputs


def test_engine_block_tables_are_used_in_place() -> None:
    buffers = made()
    tables = random_tables(random.Random(0), buffers, REQUESTS + 2)
    adopted = made(block_tables=tables)
    for group, theirs in tables.tensors().items():
        ours = adopted.block_tables.tensors()[group]
        assert ours.data_ptr() == theirs.data_ptr()
        assert ours.shape == (REQUESTS, theirs.shape[1])
    adopted.load([0, 300], [300], block_tables=tables)
    adopted.refresh(300)
    assert_fresh(adopted, 300)


@pytest.mark.parametrize("ratios", [(1,), (4,), (1, 128)])
def test_a_model_has_the_buffers_of_its_ratios(ratios: tuple[int, ...]) -> None:
    buffers = made(ratios=ratios)
    buffers.refresh()
    metadata = buffers.metadata(3)
    assert set(metadata.sources) == {*ratios} - {1}
    assert any("keys" in name for name in buffers.tensors) == (4 in ratios)


def test_load_overwrites_everything_of_the_previous_batch() -> None:
    buffers = made()
    full = random_tables(random.Random(0), buffers)
    buffers.load([0, 2, 4, 6], [2, 2, 2], block_tables=full, input_ids=range(6), reserved=[4, 5, 6])
    narrow = BlockTables.of({group: table[:1, :40] for group, table in full.tensors().items()})
    buffers.load([0, 1], [5], block_tables=narrow, input_ids=[7])
    assert buffers.tensors["query_start_loc"].tolist() == [0] + [1] * REQUESTS
    assert buffers.tensors["seq_lens"].tolist() == [5] + [0] * (REQUESTS - 1)
    assert buffers.tensors["input_ids"].tolist() == [7] + [0] * (TOKENS - 1)
    assert buffers.tensors["reserved"].tolist() == [MAX_LEN] * REQUESTS
    for group in buffers.groups:
        table = buffers.tensors[f"{group}_block_table"]
        assert bool((table[1:] == -1).all()) and bool((table[0, 40:] == -1).all())


@pytest.mark.parametrize(
    ("code", "starts", "lens"),
    [
        ("E401", [0, TOKENS + 1], [3]),
        ("E401", list(range(REQUESTS + 2)), [1] * (REQUESTS + 1)),
        ("E402", [0, 1, 2], [1, MAX_LEN + 1]),
        ("E201", [0, 1], [1, 1]),
        ("E201", [0, 2, 1], [2, 1]),
        ("E201", [0, 1], [-1]),
        ("query of 3 tokens in a sequence of 2", [0, 1, 4], [1, 2]),
        ("float32", torch.tensor([0.0, 1.0]), [1]),
        ("query_start_loc is int", [0, 1.5], [2]),
        ("query_start_loc is int", torch.zeros(2, 2, dtype=torch.int32), [1]),
    ],
)
def test_batch_that_does_not_fit_raises_and_writes_nothing(code: str, starts: list, lens: list) -> None:
    buffers = made()
    buffers.load([0, 2], [2])
    with pytest.raises((GraphError, InputError), match=code):
        buffers.load(starts, lens)
    assert buffers.tensors["query_start_loc"].tolist() == [0] + [2] * REQUESTS
    assert buffers.tensors["seq_lens"][0] == 2


def test_reserved_above_max_model_len_raises() -> None:
    with pytest.raises(GraphError, match=r"(?s)E402.*request 1 has pages for 701 tokens"):
        made().load([0, 1, 2], [1, 1], reserved=[5, MAX_LEN + 1])


def test_more_elements_than_a_buffer_has_raise() -> None:
    with pytest.raises(GraphError, match=r"(?s)E401.*elements of input_ids"):
        made().load([0, 1], [1], input_ids=[7] * (TOKENS + 1))


def test_block_table_of_wrong_size_raises() -> None:
    buffers = made()
    tables = random_tables(random.Random(0), buffers)
    for group in buffers.groups:
        full = tables.tensors()
        short = BlockTables.of(full | {group: full[group][:, :1]})
        with pytest.raises(GraphError, match=f"(?s)E403.*{group} block table"):
            buffers.load([0, 1], [600], block_tables=short)
        assert not buffers.tensors["seq_lens"].any()
        with pytest.raises(GraphError, match="E403"):
            made(block_tables=short)
        wide = BlockTables.of(full | {group: full[group].repeat(1, 2)})
        with pytest.raises(GraphError, match=r"(?s)E403.*columns up to max_model_len"):
            buffers.load([0, 1], [600], block_tables=wide)
    with pytest.raises(InputError, match=r"(?s)E201.*no block table of entries_4"):
        buffers.load([0, 1], [600], block_tables=BlockTables(window=tables.window))


def test_metadata_of_rows_that_were_not_refreshed_raises() -> None:
    buffers = made()
    with pytest.raises(GraphError, match=r"(?s)E404.*before refresh"):
        buffers.metadata(1)
    buffers.refresh(8)
    buffers.metadata(8)
    with pytest.raises(GraphError, match=r"(?s)E404.*metadata\(9\) after refresh\(8\)"):
        buffers.metadata(9)
    buffers.load([0, 1], [1])
    with pytest.raises(GraphError, match="E404"):
        buffers.metadata(1)
    for call in (buffers.refresh, buffers.metadata):
        with pytest.raises(GraphError, match="E401"):
            call(TOKENS + 1)
        with pytest.raises(GraphError, match="E401"):
            call(-1)


def test_unknown_ratio_raises() -> None:
    with pytest.raises(InputError, match=r"(?s)E205.*ratios \[64\]"):
        made(ratios=(1, 4, 64))


def test_tokens_of_a_padded_request_are_padding() -> None:
    buffers = made()
    buffers.load([0, 1, 2], [1, 0])
    buffers.refresh(2)
    assert buffers.metadata(2).is_valid_token.tolist() == [True, False]


def test_slot_mapping_is_required_exactly_with_engine_slots() -> None:
    with pytest.raises(InputError, match="E201"):
        made(engine_slots=True).load([0, 1], [1])
    with pytest.raises(InputError, match="E201"):
        made().load([0, 1], [1], slot_mapping=torch.zeros(1, dtype=torch.int64))
    with pytest.raises(InputError, match="E204"):
        made(max_num_seqs=0)
    assert layout.listed_width(128, MAX_LEN) == made().tensors["entries_128_indices"].shape[1]


def test_a_new_batch_has_no_overflow_of_the_last_one() -> None:
    buffers = made()
    buffers.tensors["overflow"].fill_(5)
    buffers.load([0, 2, 3], [7, 9], block_tables=random_tables(random.Random(0), buffers))
    assert not buffers.tensors["overflow"].any()
