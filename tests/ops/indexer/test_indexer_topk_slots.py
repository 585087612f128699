"""Slots of the selected entries: the map of the selection, by hand and for hostile tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.ops.indexer.indexer_logits import indexer_logits_topk
from dsv4_compile.ops.indexer.indexer_topk_slots import indexer_topk_slots
from dsv4_compile.ops.metadata.global_topk import global_topk
from dsv4_compile.testing import assert_bitwise, check_op, hostile_indices, padded, strided
from dsv4_compile.testing.samples import op_samples

BLOCK, NAN = 4, float("nan")


def arguments(values: list[list[float]], requests: list[int], lens: list[int], topk: int) -> list[Any]:
    """One request for each list of logits: one head of weight 1, and keys of one element, the logit."""
    columns = -(-max(map(len, values)) // BLOCK)
    cache = torch.full((len(values) * columns, BLOCK, 16), NAN)
    for row, logits in zip(cache.view(len(values), columns * BLOCK, 16), values, strict=True):
        row[: len(logits)] = 0.0
        row[: len(logits), 0] = torch.tensor(logits)
    table = torch.arange(len(cache), dtype=torch.int32).view(len(values), columns)
    q = torch.zeros(len(requests), 1, 16)
    q[..., 0] = 1.0
    owner, length = torch.tensor(requests, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32)
    return [q, q[..., :0], torch.ones(len(requests), 1), cache, table, owner, length, BLOCK, "plain", topk]


def test_slots_of_the_best_entries_in_the_order_of_entries() -> None:
    scores = arguments([[1.0, 9.0, 3.0, 7.0, 5.0], [2.0, 4.0]], [0, 1, 0, 1], [5, 2, 5, 1], 3)
    table = torch.tensor([[7, 1, 5], [3, 2, 0]], dtype=torch.int32)
    valid = torch.tensor([True, True, False, True])
    slots, lens = indexer_topk_slots(*scores, table, valid, 2)
    # Entries 1, 3, 4 and 0, 1 in blocks of two.
    assert slots.tolist() == [[15, 3, 10], [6, 7, -1], [15, 3, 10], [6, -1, -1]]
    assert lens.tolist() == [3, 2, 0, 1]


def test_entries_that_the_extra_table_does_not_reach_leave_their_columns_empty() -> None:
    scores = arguments([[1.0, 9.0, 3.0, 7.0, 5.0]], [0], [5], 3)
    for table, want in (([[7, -1, 5]], [15, -1, 10]), ([[7, 2**31 - 1, 5]], [15, -1, 10]), ([[7, 1]], [15, 3, -1])):
        slots, lens = indexer_topk_slots(*scores, torch.tensor(table, dtype=torch.int32), torch.ones(1) > 0, 2)
        assert slots.tolist() == [want]
        assert lens.tolist() == [2]


@pytest.mark.parametrize("number", range(len(op_samples("indexer_topk_slots"))))
def test_it_is_the_map_of_the_selection_for_hostile_requests_and_tables(number: int) -> None:
    args = list(op_samples("indexer_topk_slots")[number])
    args[5] = hostile_indices(args[5].shape, len(args[4]), fraction=0.3)
    for kind in (torch.int32, torch.int64):
        args[10] = hostile_indices(args[10].shape, 60, fraction=0.3).to(kind)[:2]
        want = global_topk(indexer_logits_topk(*args[:10]), args[5], *args[10:])
        for got, expected in zip(indexer_topk_slots(*args), want, strict=True):
            assert_bitwise(got, expected, strides=True)


def test_it_keeps_its_promises_for_strided_padded_and_empty_inputs() -> None:
    args = op_samples("indexer_topk_slots")[0]
    rows = (0, 1, 2, 5, 6, 11)

    def spread(how: Any) -> tuple[Any, ...]:
        def one(index: int, x: Any) -> Any:
            return how(x) if isinstance(x, Tensor) and x.numel() and index != 3 else x

        return tuple(one(index, x) for index, x in enumerate(args))

    none = tuple(x[:0] if index in rows else x for index, x in enumerate(args))
    single = tuple(x[:1] if index in rows else x for index, x in enumerate(args))
    check_op(indexer_topk_slots, [spread(padded), spread(strided), none, single])
    slots, lens = indexer_topk_slots(*none)
    assert slots.shape == (0, args[9])
    assert lens.shape == (0,)


def test_compiled_is_eager_for_any_number_of_tokens() -> None:
    args = op_samples("indexer_topk_slots")[2]

    def run(q: Tensor, q_scale: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        slots, lens = indexer_topk_slots(q, q_scale, weights, *args[3:])
        return slots * 2, lens

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (len(args[0]), 2):
        some = tuple(x[:tokens] for x in args[:3])
        for got, want in zip(compiled(*some), run(*some), strict=True):
            assert_bitwise(got, want)


def test_wrong_arguments_are_refused() -> None:
    args = list(op_samples("indexer_topk_slots")[0])
    wrong = {10: args[10].float(), 11: args[11].int(), 12: 0, 9: 0, 4: args[4].long(), 6: args[6][:1]}
    for index, value in wrong.items():
        with pytest.raises(InputError, match="indexer_topk_slots"):
            indexer_topk_slots(*args[:index], value, *args[index + 1 :])
    with pytest.raises(InputError, match="is_valid_token"):
        indexer_topk_slots(*args[:11], args[11][:1], args[12])
