"""The kernel that saves compressor states against the reference, to the bit, every access checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.preprocess import save_partial_states as kernel
from dsv4_compile.reference.preprocess.save_partial_states import save_partial_states as reference
from dsv4_compile.testing import assert_bitwise, hostile_values, padded, poison_, strided
from dsv4_compile.testing.samples import op_samples
from tests.kernels.gpus import begins_early, sees
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
STATE = 2


def storage(cache: Tensor) -> Tensor:
    """All of the memory behind a cache, between its pages too."""
    return torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())


def copied(cache: Tensor) -> Tensor:
    """A copy with the same strides and the same memory between its elements."""
    return storage(cache).clone().view(cache.dtype).as_strided(cache.shape, cache.stride(), cache.storage_offset())


def compare(*args: Any) -> Tensor:
    """Run both; all memory behind the caches must be equal. Returns the cache."""
    ours, theirs = copied(args[STATE]), copied(args[STATE])
    with checked(mutated=("tensors[0]",)):
        kernel.save_partial_states(*args[:STATE], ours, *args[STATE + 1 :])
    reference(*args[:STATE], theirs, *args[STATE + 1 :])
    assert_bitwise(storage(ours), storage(theirs))
    return ours


def arguments(tokens: int, ratio: int = 4, width: int = 16, pages: int = 5) -> tuple[Any, ...]:
    block = layout.state_block_size(ratio)
    kv_score, ape = torch.randn(tokens, 2 * width), torch.randn(ratio, width)
    state = poison_(torch.empty(pages, block + 1, 2 * width))[:, :block]
    return kv_score, ape, state, torch.randperm(pages * block)[:tokens], torch.randint(500, (tokens,)), block


@interpreted
@pytest.mark.parametrize("number", range(len(op_samples("save_partial_states"))))
def test_samples(number: int) -> None:
    compare(*op_samples("save_partial_states")[number])


@interpreted
@pytest.mark.parametrize(("ratio", "width"), [(4, 1024), (128, 512), (4, 256), (4, 24), (3, 1), (128, 700)])
def test_every_width_and_ratio(ratio: int, width: int) -> None:
    compare(*arguments(7, ratio, width))


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bias_of_a_narrow_dtype_is_added_in_float32(dtype: torch.dtype) -> None:
    kv_score, ape, *rest = arguments(9)
    compare(kv_score, ape.to(dtype), *rest)


@interpreted
def test_values_keep_their_bits() -> None:
    kv_score, *rest = arguments(4)
    kv_score[0], kv_score[1], kv_score[2] = -0.0, torch.nan, -torch.inf
    rest[0][:, 3] = torch.nan  # of the bias of one score
    compare(kv_score, *rest)


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
def test_any_strides(spread: Callable[[Tensor], Tensor]) -> None:
    *tensors, block = arguments(6)
    compare(*(spread(t) for t in tensors), block)


@interpreted
def test_illegal_slots_are_skipped() -> None:
    kv_score, ape, state, slots, positions, block = arguments(12)
    hostile = torch.tensor([*hostile_values(len(state) * block), 2**40, -(2**40)])
    slots[1 : 1 + len(hostile)] = hostile[:11]
    compare(kv_score, ape, state, slots, positions, block)
    after = compare(kv_score, ape, state, torch.full_like(slots, -1), positions, block)
    assert after.isnan().all()


@interpreted
def test_negative_positions_of_padding_take_a_bias_too() -> None:
    kv_score, ape, state, slots, _, block = arguments(8)
    compare(kv_score, ape, state, slots, torch.arange(-9, -1), block)


@interpreted
def test_fewer_slots_than_tokens_none_and_one() -> None:
    kv_score, ape, state, slots, positions, block = arguments(8)
    for count in (5, 1, 0):
        compare(kv_score, ape, state, slots[:count], positions.int(), block)
    compare(kv_score, ape, state[:0], slots, positions, block)


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    early = sees(monkeypatch, target)
    with compiled_for(target) as compiled:
        for ratio, width in ((4, 1024), (128, 512), (4, 256)):
            kernel.save_partial_states(*arguments(3, ratio, width))
    assert len(compiled) == 3
    assert all(binary.assembled for binary in compiled)
    assert all(begins_early(binary) == early for binary in compiled)
