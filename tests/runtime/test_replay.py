"""Tests that replays equal eager bit by bit at the same padded shape, and that faults which break this are found."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.errors import GraphError
from dsv4_compile.metadata import MetadataBuffers
from dsv4_compile.testing import assert_bitwise
from tests.runtime.engine import CAPACITY, CONFIG, Engine, World, make_runner, make_world

STEPS = 150


def poison(world: World) -> None:
    """Overwrite what a replay must not read, refreshed metadata and input rows, with hostile values."""
    world.hidden.fill_(torch.nan)
    for spec in world.buffers.plan.specs:
        if spec.filled_by == "refresh":
            tensor = world.buffers.tensors[spec.name]
            tensor.random_(0, 2 if tensor.dtype is torch.bool else 5)


def slots_of(world: World, tokens: int) -> dict[str, list[int]]:
    """Return the slots that the last step was allowed to write, by kind of cache."""
    groups = ("window", "entries_4", "entries_128", "keys_4")
    return {group: world.buffers.tensors[f"{group}_slots"][:tokens].tolist() for group in groups}


def assert_rest_untouched(world: World, before: dict[str, Tensor], tokens: int) -> None:
    """Assert that only rows of the step's own slots have changed in the caches."""
    slots = slots_of(world, tokens)
    for name, tensor in world.named_caches(world.caches).items():
        index, kind = name.split(".")
        if "state" in kind:
            continue
        kind = kind if kind == "window" else f"{kind}_{CONFIG.ratio(int(index))}"
        expected, got = before[name].flatten(0, 1).clone(), tensor.flatten(0, 1)
        written = [slot for slot in slots[kind] if slot >= 0]
        expected[written] = got[written]
        assert_bitwise(got, expected, label=name)


@pytest.mark.parametrize("tokens_each", [1, 3], ids=["decode", "two-speculated"])
def test_random_decode_steps_over_poisoned_tails(tokens_each: int, seed: int) -> None:
    """Batches grow and shrink, requests join and leave, contexts cross every group boundary, block 0 is live."""
    world = make_world()
    runner = make_runner(world, tokens_each=tokens_each)
    runner.warm_up()
    engine = Engine(random.Random(seed), tokens_each)
    for step in range(STEPS if tokens_each == 1 else STEPS // 3):
        query_lens, seq_lens = engine.advance()
        poison(world)
        hidden = world.load(query_lens, seq_lens)
        tokens = sum(query_lens)
        before = {n: t.clone() for n, t in world.named_caches(world.caches).items()} if step % 10 == 0 else {}
        out = runner.step(tokens, hidden=hidden)
        bucket = runner.buckets.fit(tokens)
        assert_bitwise(out, world.eager(hidden, query_lens, seq_lens, bucket), label=f"step {step}")
        if before:
            assert_rest_untouched(world, before, bucket)
    for name, tensor in world.named_caches(world.caches).items():
        assert_bitwise(tensor, world.named_caches(world.eager_caches)[name], label=name)
    assert runner.statistics.captures == len(runner.buckets)
    assert runner.statistics.uncaptured == 0


def test_prefills_and_mixed_batches_replay_the_same_captures(seed: int) -> None:
    """Captures depend on the number of tokens alone, so a prompt chunk with decodes replays the same ones."""
    world = make_world()
    runner = make_runner(world, buckets=(8, CAPACITY))
    runner.warm_up()
    rng = random.Random(seed)
    for _ in range(40):
        query_lens = [rng.choice((1, 1, 2, 5, 9)) for _ in range(rng.randint(1, 4))]
        while sum(query_lens) > CAPACITY:
            query_lens.pop()
        seq_lens = [n + rng.choice((0, 1, 3, 11, 124, 127, 130, 250)) for n in query_lens]
        poison(world)
        hidden = world.load(query_lens, seq_lens)
        out = runner.step(sum(query_lens), hidden=hidden)
        assert_bitwise(out, world.eager(hidden, query_lens, seq_lens, runner.buckets.fit(sum(query_lens))))


def test_warm_up_and_capture_change_no_byte() -> None:
    """A batch that was loaded before is still there after it."""
    world = make_world()
    world.load([1, 1], [100, 128])
    watched = {
        **world.named_caches(world.caches),
        **{n: world.buffers.tensors[n] for n in ("query_start_loc", "seq_lens")},
    }
    before = {name: tensor.clone() for name, tensor in watched.items()}
    make_runner(world).warm_up()
    for name, tensor in watched.items():
        assert_bitwise(tensor, before[name], label=name)


# Planted faults; other systems have shipped each of them.


class LeavesTails(MetadataBuffers):
    """Refreshes the rows of the batch only and leaves old rows after it, as a builder on the CPU does."""

    def refresh(self, num_tokens: int | None = None) -> None:
        saved = {n: self.tensors[n].clone() for n in ("window_slots", "window_indices", "window_lens")}
        super().refresh(num_tokens)
        rows = torch.arange(self.max_num_batched_tokens)
        is_token = rows < self.tensors["query_start_loc"][-1]
        for name, old in saved.items():
            tensor = self.tensors[name]
            tensor.copy_(torch.where(is_token if tensor.dim() == 1 else is_token[:, None], tensor, old))


class PadsWithZero(MetadataBuffers):
    """Pads slots with 0, so that padding tokens overwrite block 0 at every step."""

    def refresh(self, num_tokens: int | None = None) -> None:
        super().refresh(num_tokens)
        self.tensors["window_slots"].clamp_(min=0)


def run_until_wrong(world: World, runner: Any, seed: int, compare: bool = True) -> str:
    """Return what the comparison with eager finds, or "" after 30 steps."""
    engine = Engine(random.Random(seed))
    for _ in range(30):
        query_lens, seq_lens = engine.advance()
        hidden = world.load(query_lens, seq_lens)
        out = runner.step(sum(query_lens), hidden=hidden)
        if not compare:
            continue
        expected = world.eager(hidden, query_lens, seq_lens, runner.buckets.fit(sum(query_lens)))
        try:
            assert_bitwise(out, expected, label="output")
            for name, tensor in world.named_caches(world.caches).items():
                assert_bitwise(tensor, world.named_caches(world.eager_caches)[name], label=name)
        except AssertionError as found:
            return str(found)
    return ""


FAULTS = {"none": MetadataBuffers, "stale-tail": LeavesTails, "wrong-pad": PadsWithZero}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_padding_is_found_by_comparison_and_by_debug(fault: str, seed: int) -> None:
    faulty = FAULTS[fault]
    fine = fault == "none"
    world = make_world(faulty)
    runner = make_runner(world)
    runner.warm_up()
    assert (run_until_wrong(world, runner, seed) == "") is fine
    world = make_world(faulty)
    runner = make_runner(world, debug=True)
    runner.warm_up()
    if fine:
        assert run_until_wrong(world, runner, seed) == ""
    else:
        with pytest.raises(GraphError, match=r"E429.*\n.*\n.*metadata window_"):
            run_until_wrong(world, runner, seed, compare=False)


def move_input(world: World, runner: Any) -> None:
    runner.inputs["hidden"] = torch.zeros_like(world.hidden)


def move_cache(world: World, runner: Any) -> None:
    (source,) = world.caches.layers[1].sources
    source.states = source.states.clone()


def move_weight(world: World, runner: Any) -> None:
    layer = world.stack.layers[0]
    layer.attn_sink = torch.nn.Parameter(layer.attn_sink.detach().clone(), requires_grad=False)


def stride_metadata(world: World, runner: Any) -> None:
    old = world.buffers.tensors["window_indices"]
    world.buffers.tensors["window_indices"] = torch.as_strided(old, (CAPACITY - 1, old.shape[1]), (old.shape[1], 1))


def drop_cache(world: World, runner: Any) -> None:
    world.caches.layers[2].sources = ()


@pytest.mark.parametrize(
    ("move", "named"),
    [
        (move_input, "input hidden, captured in the step of 2 tokens: address"),
        (move_cache, r"caches\[1\].sources\[0\].states, captured in the step of 2 tokens: address"),
        (move_weight, "step.layers.0.attn_sink, captured in the step of 2 tokens: address"),
        (stride_metadata, r"metadata window_indices, captured in the step of 2 tokens: shape"),
        (drop_cache, r"caches\[2\].sources\[0\].entries, captured in the step of 2 tokens, is gone"),
    ],
)
@pytest.mark.parametrize("debug", [False, True])
def test_a_moved_buffer_is_named_at_the_first_replay_and_in_debug_at_each(move: Any, named: str, debug: bool) -> None:
    world = make_world()
    runner = make_runner(world, buckets=(2,), debug=debug)
    runner.warm_up()
    hidden = world.load([1, 1], [5, 9])
    if debug:
        runner.step(2, hidden=hidden)
    move(world, runner)
    with pytest.raises(GraphError, match=named) as caught:
        runner.step(2)
    assert caught.value.code == "E421"


def test_a_cache_that_grows_in_place_is_noticed() -> None:
    """The tensor object stays the same; only its address changes."""
    world = make_world()
    runner = make_runner(world, buckets=(2,))
    runner.warm_up()
    hidden = world.load([1, 1], [5, 9])
    runner.step(2, hidden=hidden)
    cache = world.caches.layers[0].window
    cache.resize_(cache.shape[0] * 64, *cache.shape[1:])
    with pytest.raises(GraphError, match="E421"):
        runner.step(2)
    assert cache.shape[1] == layout.WINDOW_BLOCK
