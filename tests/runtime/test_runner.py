"""Tests of the captures, replays and errors of a runner."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import progress
from dsv4_compile.errors import DSV4Error, DSV4Warning, GraphError
from dsv4_compile.metadata import MetadataBuffers, build_batch_metadata
from dsv4_compile.runtime import DecodeRunner, MemoryPlan, padded_buckets
from dsv4_compile.runtime.step import Buckets, token_tensors
from dsv4_compile.testing import assert_bitwise
from tests.runtime.engine import CAPACITY, CONFIG, MAX_SEQ_LEN, REQUESTS, World, make_runner, make_world, starts_of

VOCAB = 40


@pytest.mark.parametrize(
    ("max_tokens", "each", "expected"),
    [(1, 1, (1,)), (6, 1, (1, 2, 4, 6)), (8, 1, (1, 2, 4, 8)), (24, 3, (3, 6, 12, 24)), (9, 4, (4, 8, 9))],
)
def test_buckets_double(max_tokens: int, each: int, expected: tuple[int, ...]) -> None:
    assert padded_buckets(max_tokens, each) == expected


def test_the_smallest_bucket_that_holds_a_batch_is_chosen_and_the_largest_captured_first() -> None:
    buckets = Buckets((8, 1, 4, 4), 8)
    assert [buckets.fit(n) for n in (1, 2, 4, 5, 8, 9)] == [1, 4, 4, 8, 8, None]
    assert list(buckets) == [8, 4, 1]


def test_repr_of_runners_and_buffers() -> None:
    world = make_world()
    runner = make_runner(world, buckets=(1, 2))
    assert repr(runner) == "DecodeRunner(1, 2 tokens on standin, not warmed up)"
    runner.warm_up()
    assert repr(runner) == "DecodeRunner(1, 2 tokens on standin, captured)"
    begin = "MetadataBuffers(24 tokens of 6 requests of up to 512 tokens, window, entries_4,"
    assert repr(world.buffers).startswith(begin)


def test_captures_report_their_progress() -> None:
    events: list[progress.Event] = []
    with progress.listen(events.append):
        make_runner(make_world()).warm_up()
    captured = [e for e in events if e.stage == "capture"]
    assert [e.note for e in captured if e.note] != []
    assert (captured[-1].done, captured[-1].total, captured[-1].finished) == (4, 4, True)
    assert captured[1].note == "6 tokens"


def test_the_plan_predicts_the_memory_of_captures() -> None:
    world = make_world()
    runner = make_runner(world)
    plan = runner.plan()
    assert not runner.sealed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runner.warm_up() is plan
    assert runner.graphs.memory() <= plan.graphs <= 1.2 * runner.graphs.memory()
    assert plan.persistent > world.caches.nbytes
    assert f"{plan.graphs:,}" in str(plan)
    with pytest.warns(DSV4Warning, match="W602"):
        MemoryPlan(plan.persistent, plan.footprints, 100).check(4 << 20)


def test_a_batch_above_the_largest_bucket_runs_and_is_reported_once() -> None:
    world = make_world()
    runner = make_runner(world, buckets=(1, 2))
    runner.warm_up()
    for step in range(3):
        query_lens, seq_lens = [1] * 4, [n + step for n in (4, 12, 127, 250)]
        hidden = world.load(query_lens, seq_lens)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = runner.step(4, hidden=hidden)
        titles = [(str(w.message).split("\n")[0], w.filename) for w in caught]
        assert titles == ([("[W601] ran without a graph", __file__)] if step == 0 else [])
        assert_bitwise(out, world.eager(hidden, query_lens, seq_lens, 4))
    assert (runner.statistics.uncaptured, runner.statistics.replays) == (3, 0)


def test_outputs_keep_their_address() -> None:
    world = make_world()
    runner = make_runner(world)
    runner.warm_up()
    addresses = set()
    for length in range(3, 60):
        hidden = world.load([1] * 3, [length, length + 64, length + 100])
        addresses.add(runner.step(3, hidden=hidden).data_ptr())
    assert len(addresses) == 1
    assert runner.statistics.captures == 4


# Runs of several steps.


class Model:
    """Embedding, the world's stack, and a head that returns logits."""

    def __init__(self, world: World) -> None:
        self.stack = world.stack
        self.embed = torch.randn(VOCAB, CONFIG.hidden_size)
        self.head = torch.randn(CONFIG.hidden_size, VOCAB)

    def __call__(self, ids: Tensor, metadata: Any, caches: Any) -> Tensor:
        return self.stack(self.embed[ids], metadata, caches) @ self.head


def runner_of(model: Model, world: World, **options: Any) -> DecodeRunner:
    inputs = {"input_ids": world.buffers.tensors["input_ids"]}
    runner = DecodeRunner(model, world.buffers, inputs=inputs, caches=world.caches.layers, graphs="standin", **options)
    runner.warm_up()
    return runner


def decode_eagerly(model: Model, world: World, ids: list[int], seq_lens: list[int], steps: int, padded: int) -> Tensor:
    """Return greedy tokens `[steps, R]`, chosen on the host at every step."""
    chosen = []
    for step in range(steps):
        metadata = build_batch_metadata(
            query_start_loc=torch.tensor(starts_of([1] * len(ids)), dtype=torch.int32),
            seq_lens=torch.tensor([n + step for n in seq_lens], dtype=torch.int32),
            num_tokens=padded,
            block_tables=world.eager_caches.block_tables,
            window=CONFIG.sliding_window,
            max_model_len=MAX_SEQ_LEN,
        )
        rows = torch.tensor(ids + [0] * (padded - len(ids)))
        with torch.no_grad():
            ids = model(rows, metadata, world.eager_caches.layers)[: len(ids)].argmax(-1).tolist()
        chosen.append(ids)
    return torch.tensor(chosen)


@pytest.mark.parametrize("sampler", ["greedy", lambda logits: logits.argmax(-1)], ids=["captured", "between-steps"])
def test_a_run_decodes_the_tokens_of_a_host_loop(sampler: str | Callable[[Tensor], Tensor]) -> None:
    """Requests cross the ends of groups of 4 and 128 in a padded bucket; a second run continues the first."""
    world = make_world()
    model = Model(world)
    runner = runner_of(model, world, sampler=sampler, debug=True)
    ids, seq_lens = [3, 1, 4], [5, 120, 250]
    expected = decode_eagerly(model, world, ids, seq_lens, 24, padded=4)
    assert len(expected.unique()) > 5
    world.buffers.load([0, 1, 2, 3], seq_lens, input_ids=ids)
    first, counts = runner.run(14, num_reqs=3)
    first = first.clone()
    assert counts.tolist() == [[1, 1, 1]] * 14
    second, _ = runner.run(10, num_reqs=3)
    assert torch.equal(torch.cat((first, second))[:, :, 0], expected)
    assert world.buffers.tensors["seq_lens"].tolist() == [29, 144, 274, 0, 0, 0]
    for name, tensor in world.named_caches(world.caches).items():
        assert_bitwise(tensor, world.named_caches(world.eager_caches)[name], label=name)
    assert runner.statistics.replays == 24
    assert runner.statistics.captures == (8 if sampler == "greedy" else 4)


@pytest.mark.parametrize("sampler", ["greedy", lambda logits: logits.argmax(-1)], ids=["captured", "between-steps"])
def test_a_run_zeroes_the_rows_of_inputs_after_its_requests(sampler: str | Callable[[Tensor], Tensor]) -> None:
    world = make_world()
    noise = torch.randn(CAPACITY, 8)
    runner = DecodeRunner(
        lambda noise, metadata, caches: noise[:, :1] + metadata.positions[:, None],
        world.buffers,
        inputs={"noise": noise},
        graphs="standin",
        sampler=sampler,
    )
    runner.warm_up()
    noise.fill_(torch.nan)
    world.buffers.load([0, 1, 2, 3], [5, 120, 250], input_ids=[3, 1, 4])
    runner.run(2, num_reqs=3)
    assert noise[:3].isnan().all() and not noise[3].any()


def test_captures_may_hold_a_fifth_and_a_segment_more_than_was_predicted() -> None:
    plan, most = MemoryPlan(persistent=0, footprints={}, graphs=1000 << 20), (1200 << 20) + (2 << 20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan.check(most)
    with pytest.warns(DSV4Warning, match="W602"):
        plan.check(most + 1)


def test_a_run_with_drafts_keeps_what_the_sampler_accepts() -> None:
    """Drafts that are always, never or sometimes right give the tokens of plain decode."""
    world = make_world()
    model = Model(world)
    ids, seq_lens, steps = [3, 1, 4], [5, 120, 250], 12
    truth = decode_eagerly(model, world, ids, seq_lens, 2 * steps + 2, padded=3).t().tolist()
    got: list[list[int]] = [[], [], []]
    positions = [0, 0, 0]

    def verify(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chosen = logits.argmax(-1).view(3, 2)
        fed = world.buffers.tensors["input_ids"][:6].view(3, 2)
        accepted = (chosen[:, 0] == fed[:, 1]).int() + 1
        for row, count in enumerate(accepted.tolist()):
            got[row] += chosen[row, :count].tolist()
            positions[row] += count
        good = [truth[row][positions[row]] for row in range(3)]
        drafts = [good[0], (good[1] + 1) % VOCAB, good[2] if positions[2] % 3 else (good[2] + 1) % VOCAB]
        return accepted, chosen, torch.tensor(drafts)[:, None]

    runner = runner_of(model, world, sampler=verify, tokens_each=2, buckets=(6, 12))
    drafts = [truth[0][0], (truth[1][0] + 1) % VOCAB, truth[2][0]]
    fed = [token for pair in zip(ids, drafts, strict=True) for token in pair]
    world.buffers.load([0, 2, 4, 6], [n + 1 for n in seq_lens], input_ids=fed)
    tokens, counts = runner.run(steps, num_reqs=3)
    assert [row[: len(want)] for row, want in zip(got, truth, strict=True)] == [
        t[: len(g)] for t, g in zip(truth, got, strict=True)
    ]
    assert (positions[0], positions[1]) == (2 * steps, steps)
    assert tokens.shape == (steps, 3, 2)
    assert counts.sum(0).tolist() == positions


def test_a_request_without_reserved_tokens_stops_and_records_its_length() -> None:
    world = make_world()
    runner = runner_of(Model(world), world, sampler="greedy")
    world.buffers.load([0, 1, 2], [7, 9], input_ids=[1, 2], reserved=[10, 100])
    runner.run(8, num_reqs=2)
    assert world.buffers.tensors["overflow"].tolist()[:2] == [10, 0]
    assert world.buffers.tensors["seq_lens"].tolist()[:2] == [0, 17]


# Misuse.


def fresh() -> DecodeRunner:
    return make_runner(make_world())


def warm(**options: Any) -> DecodeRunner:
    runner = make_runner(make_world(), **options)
    runner.warm_up()
    return runner


def nested() -> None:
    inner = make_runner(make_world(), buckets=(1,))
    world = make_world()
    step = lambda hidden, metadata, caches: (inner.graphs.capture(lambda: hidden * 2, "a graph").outputs, hidden)[1]  # noqa: E731
    DecodeRunner(step, world.buffers, inputs={"hidden": world.hidden}, buckets=(1,), graphs="standin").warm_up()


def returning(result: Callable[[Tensor], Any]) -> None:
    world = make_world()
    step = lambda hidden, metadata, caches: result(hidden)  # noqa: E731
    DecodeRunner(step, world.buffers, inputs={"hidden": world.hidden}, graphs="standin").warm_up()


def with_inputs(inputs: Callable[[World], dict[str, Tensor]], **options: Any) -> DecodeRunner:
    world = make_world()
    step = lambda *args: args[0] * 2  # noqa: E731
    return DecodeRunner(step, world.buffers, inputs=inputs(world), graphs="standin", **options)


def input_in_a_cache() -> None:
    memory = torch.zeros(CAPACITY + 8, 4)
    with_inputs(lambda world: {"x": memory[:CAPACITY]}, caches=[memory[CAPACITY - 1 :]])


def inputs_a_row_apart(world: World) -> dict[str, Tensor]:
    ids = torch.zeros(CAPACITY + 1, dtype=torch.int64)
    return {"ids": ids[:-1], "next": ids[1:]}


def starts_as_input() -> None:
    buffers = MetadataBuffers(max_num_batched_tokens=4, max_num_seqs=4, max_model_len=128, ratios=())
    DecodeRunner(print, buffers, inputs={"starts": buffers.tensors["query_start_loc"]}, graphs="standin")


MISUSE: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "step before warm_up": ("E427", "captured nothing", lambda: fresh().step(1)),
    "run before warm_up": ("E427", "captured nothing", lambda: fresh().run(1, 1)),
    "warm_up twice": ("E425", "has captured", lambda: warm().warm_up()),
    "over capacity": ("E204", f"{CAPACITY + 1} tokens", lambda: warm().step(CAPACITY + 1)),
    "no tokens": ("E204", "0 tokens", lambda: warm().step(0)),
    "fewer than none": ("E204", "-1 tokens", lambda: warm().step(-1)),
    "both sizes": ("E201", "num_reqs=1", lambda: warm().step(1, num_reqs=1)),
    "run without a sampler": ("E201", "without a sampler", lambda: warm().run(1, 1)),
    "a longer run": ("E204", "max_run_steps=2", lambda: warm(sampler="greedy", max_run_steps=2).run(3, 1)),
    "greedy drafts": ("E201", "tokens_each=2", lambda: make_runner(make_world(), sampler="greedy", tokens_each=2)),
    "unknown sampler": ("E201", "sampler='top'", lambda: make_runner(make_world(), sampler="top")),
    "a bucket too large": ("E204", "buckets", lambda: make_runner(make_world(), buckets=(CAPACITY + 1,))),
    "no bucket": ("E204", "buckets", lambda: make_runner(make_world(), buckets=())),
    "unknown input": ("E201", "'hiddens'", lambda: warm().step(1, hiddens=torch.zeros(1, 1))),
    "input of another shape": ("E201", "hidden torch.float32", lambda: warm().step(1, hidden=torch.zeros(2, 3))),
    "an input in a cache": ("E201", "input x in memory of caches[0]", input_in_a_cache),
    "inputs a row apart": ("E201", "next in memory of input ids", lambda: with_inputs(inputs_a_row_apart)),
    "metadata of requests as an input": ("E201", "input starts in memory of metadata query_start_loc", starts_as_input),
    "on a CPU": ("E420", "CUDA graphs on cpu", lambda: DecodeRunner(print, make_world().buffers, inputs={})),
    "a capture within": ("E424", "the step of 1 tokens", nested),
    "returns a number": ("E426", "returns int", lambda: returning(lambda hidden: (hidden * 2, 3))),
    "returns a sum": ("E426", "shape []", lambda: returning(lambda hidden: hidden.sum())),
    "runs nothing new": ("E426", "returns nothing", lambda: returning(lambda hidden: ())),
    "reads the device": ("E422", "_local_scalar_dense", lambda: returning(lambda hidden: hidden * hidden.sum().item())),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_raises_a_code_with_what_was_got(case: str) -> None:
    code, got, call = MISUSE[case]
    with pytest.raises(DSV4Error) as caught:
        call()
    assert caught.value.code == code
    assert got in caught.value.got
    assert caught.value.fix


def test_inputs_may_be_columns_of_one_tensor_equal_rows_or_token_metadata() -> None:
    packed = torch.arange(6.0 * CAPACITY).view(CAPACITY, 6)
    runner = with_inputs(
        lambda world: {
            "a": packed[:, :2],
            "b": packed[:, 2:],
            "all": packed,
            "bits": packed.view(torch.int32),
            "ids": world.buffers.tensors["input_ids"],
            "positions": world.buffers.tensors["positions"],
        }
    )
    runner.warm_up()
    assert_bitwise(runner.step(3, b=torch.ones(3, 4)), packed[:3, :2] * 2)
    assert packed[3].tolist() == [0.0] * 6


def test_a_captured_tensor_on_another_device_is_named() -> None:
    world = make_world()
    caches = [{"window": torch.zeros(4, device="meta")}]
    with pytest.raises(GraphError, match=r"caches\[0\]\['window'\] on meta") as caught:
        DecodeRunner(print, world.buffers, inputs={}, caches=caches, graphs="standin")
    assert caught.value.code == "E428"


def test_debug_finds_captures_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world()
    runner = make_runner(world, debug=True)
    runner.warm_up()
    runner.step(1, hidden=world.load([1], [5]))
    held = runner.graphs.memory()
    monkeypatch.setattr(runner.graphs, "memory", lambda: held + 1)
    with pytest.raises(GraphError, match=f"captures of {held + 1:,} bytes, {held:,} when they were sealed") as caught:
        runner.step(1)
    assert caught.value.code == "E425"


def test_a_step_on_random_batches_never_captures_again(seed: int) -> None:
    world = make_world()
    runner = make_runner(world)
    runner.warm_up()
    held, rng = runner.graphs.memory(), random.Random(seed)
    for _ in range(60):
        count = rng.randint(1, REQUESTS)
        runner.step(count, hidden=world.load([1] * count, [rng.randint(1, MAX_SEQ_LEN) for _ in range(count)]))
    assert (runner.statistics.captures, runner.statistics.replays) == (len(runner.buckets), 60)
    assert runner.graphs.memory() == held


@pytest.mark.parametrize("ratios", [(), (4,), (4, 128)])
def test_every_tensor_with_a_row_for_each_token_is_found_and_no_block_table(ratios: tuple[int, ...]) -> None:
    sizes = {"max_num_batched_tokens": 8, "max_num_seqs": 4, "max_model_len": 256}
    buffers = MetadataBuffers(**sizes, ratios=ratios)
    buffers.load([0, 3], [9])
    buffers.refresh(5)
    metadata = buffers.metadata(5)
    addresses = {tensor.data_ptr() for tensor in token_tensors(metadata)}
    parts = [metadata.window, *metadata.sources.values()]
    assert len(parts) == 1 + len(ratios)
    for group in parts:
        assert group.slot_mapping.data_ptr() in addresses
        table = getattr(group, "block_table", None)
        assert table is None or table.data_ptr() not in addresses
    assert metadata.positions.data_ptr() in addresses
    assert all(len(tensor) == 5 for tensor in token_tensors(metadata))
