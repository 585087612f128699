from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.layout import overlap_factor, state_block_size, state_width
from dsv4_compile.ops.preprocess.save_partial_states import save_partial_states
from dsv4_compile.reference.preprocess.save_partial_states import save_partial_states as reference
from dsv4_compile.testing import assert_bitwise, check_op, hostile_values, padded, refuse_synchronization, strided

DIM = 8
RATIOS = pytest.mark.parametrize("ratio", [4, 128])


def state_cache(ratio: int, pages: int = 3) -> Tensor:
    """Dirty pages with a gap between them, as a pool hands them out."""
    page = torch.full((pages, state_block_size(ratio) + 1, state_width(ratio, DIM)), torch.nan)
    return page[:, :-1]


def arguments(ratio: int, slots: list[int], positions: list[int]) -> tuple[Tensor, ...]:
    width = state_width(ratio, DIM)
    ape = torch.randn(ratio, width // 2)
    return (
        torch.randn(len(slots), width),
        ape,
        state_cache(ratio),
        torch.tensor(slots, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int64),
    )


def saved_by_hand(kv_score: Tensor, ape: Tensor, cache: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """One element at a time; a float32 sum is the double sum rounded once."""
    expected = cache.clone(memory_format=torch.contiguous_format)
    pages, block_size, width = cache.shape
    half = width // 2
    for token, slot in enumerate(slots.tolist()):
        if not 0 <= slot < pages * block_size:
            continue
        row = expected[slot // block_size, slot % block_size]
        for column in range(half):
            row[column] = kv_score[token, column]
            bias = ape[positions[token].item() % ape.shape[0], column].item()
            row[half + column] = kv_score[token, half + column].item() + bias
    return expected


@RATIOS
def test_every_row_lands_in_its_slot_and_nothing_else_changes(ratio: int) -> None:
    last = 3 * state_block_size(ratio) - 1
    args = arguments(ratio, [0, last, 5, 2], [126, 127, 128, 129])
    expected = saved_by_hand(*args)
    save_partial_states(*args, state_block_size(ratio))
    assert_bitwise(args[2].contiguous(), expected)


def test_the_bias_follows_the_position_in_the_group_across_its_end() -> None:
    """Positions 126, 127, 128 and 256 stand at 126, 127, 0 and 0 of a group of 128; at 2, 3, 0 and 0 of one of 4."""
    for ratio, places in ((128, [126, 127, 0, 0]), (4, [2, 3, 0, 0])):
        _, ape, cache, slots, positions = arguments(ratio, [0, 1, 2, 3], [126, 127, 128, 256])
        save_partial_states(torch.zeros(4, 2 * ape.shape[1]), ape, cache, slots, positions, state_block_size(ratio))
        saved = cache.flatten(0, 1)[:4] if ratio == 128 else cache[0]
        assert torch.equal(saved[:, ape.shape[1] :], ape[places])
        assert not saved[:, : ape.shape[1]].any()


@RATIOS
def test_slots_outside_the_cache_are_padding(ratio: int) -> None:
    slots = list(hostile_values(3 * state_block_size(ratio)))
    args = arguments(ratio, [*slots, 1], [*([-1] * len(slots)), 6])
    args[0][:-1] = torch.nan
    expected = saved_by_hand(*args)
    save_partial_states(*args, state_block_size(ratio))
    assert_bitwise(args[2].contiguous(), expected)
    assert expected[0, 1].isfinite().all()


@RATIOS
def test_rows_past_the_slot_mapping_are_not_read(ratio: int) -> None:
    kv_score, ape, cache, slots, positions = arguments(ratio, [1, 0, -1], [4, 5, 6])
    expected = saved_by_hand(kv_score, ape, cache, slots, positions)
    kv_score = torch.cat((kv_score, torch.full_like(kv_score, torch.nan)))
    positions = torch.cat((positions, torch.full((9,), 2**40)))
    save_partial_states(kv_score, ape, cache, slots, positions, state_block_size(ratio))
    assert_bitwise(cache.contiguous(), expected)


def test_a_row_is_replaced_when_its_position_runs_again() -> None:
    first, second = arguments(4, [2], [6]), arguments(4, [2], [6])
    cache = first[2]
    save_partial_states(*first, 4)
    save_partial_states(*second[:2], cache, *second[3:], 4)
    save_partial_states(*second, 4)
    assert_bitwise(cache.contiguous(), second[2].contiguous())


@RATIOS
def test_layout_of_the_arguments_does_not_matter(ratio: int) -> None:
    args = arguments(ratio, [3, 0, 1], [7, 8, 9])
    expected = saved_by_hand(*args)
    kv_score, ape, cache, slots, positions = args
    save_partial_states(
        padded(kv_score), strided(ape), cache, strided(slots), strided(positions.int()), state_block_size(ratio)
    )
    assert_bitwise(cache.contiguous(), expected)


@RATIOS
def test_op_keeps_its_promises(ratio: int) -> None:
    samples = [
        arguments(ratio, [4, 0, -1, 2], [3, 4, 5, 6]),
        arguments(ratio, [1], [127]),
        arguments(ratio, [], []),
        arguments(ratio, [-1, -1], [0, 0]),
    ]
    views = arguments(ratio, [4, 0], [3, 4])
    samples.append((padded(views[0]), strided(views[1]), *views[2:]))
    check_op(save_partial_states, [(*sample, state_block_size(ratio)) for sample in samples], utilities=ratio == 4)


def test_an_empty_cache_takes_nothing() -> None:
    kv_score, ape, cache, slots, positions = arguments(4, [0, 1], [0, 1])
    save_partial_states(kv_score, ape, cache[:0], slots, positions, 4)


def test_reference_never_synchronises() -> None:
    args = arguments(4, [1, -1], [3, 4])
    with refuse_synchronization():
        reference(*args, 4)


def test_compiles_once_for_every_token_count() -> None:
    ape = torch.randn(4, overlap_factor(4) * DIM)

    def step(kv_score: Tensor, cache: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        save_partial_states(kv_score * 2, ape, cache, slots, positions, 4)
        return cache.sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (3, 5, 11):
            kv_score, positions = torch.randn(tokens, state_width(4, DIM)), torch.arange(tokens)
            slots = torch.randperm(12)[:tokens]
            for x in (kv_score, slots, positions):
                torch._dynamo.mark_dynamic(x, 0)
            one, two = torch.zeros(3, 4, state_width(4, DIM)), torch.zeros(3, 4, state_width(4, DIM))
            assert torch.equal(compiled(kv_score, one, slots, positions), step(kv_score, two, slots, positions))
            assert_bitwise(one, two)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(2, 32, dtype=torch.bfloat16)}, r"kv_score \[T, 2\*w\] is float32"),
        ({1: torch.zeros(4, 15)}, "twice as wide"),
        ({2: torch.zeros(3, 8, 32)}, r"state_cache is \[P, 4, 32\]"),
        ({3: torch.zeros(2, dtype=torch.int32)}, "state_slot_mapping"),
        ({3: torch.zeros(3, dtype=torch.int64)}, "row for every token"),
        ({4: torch.zeros(1, dtype=torch.int64)}, "row for every token"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[int, Tensor], message: str) -> None:
    args = list(arguments(4, [0, 1], [0, 1]))
    for index, value in change.items():
        args[index] = value
    with pytest.raises(InputError, match=message):
        save_partial_states(*args, 4)
