"""`witness`: stale buffers are named before the replay that would read them, and correct steps raise nothing."""

from __future__ import annotations

import contextlib
import random
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4_compile
from dsv4_compile.debug import Witness, witness
from dsv4_compile.errors import GraphError
from dsv4_compile.metadata import AttentionMetadata, BlockTables, MetadataBuffers
from dsv4_compile.runtime import DecodeRunner, counting
from dsv4_compile.runtime.compiled import CapturedGraph, Policy
from dsv4_compile.runtime.standin import StandInGraphs
from dsv4_compile.runtime.step import StepInputs
from tests.runtime.engine import Engine, make_runner, make_world

SIZES = {"max_num_batched_tokens": 8, "max_num_seqs": 4, "max_model_len": 256, "window_block_size": 64}


@dataclass
class Served:
    """A runner of a small step with an engine's own block table, and its batch."""

    runner: DecodeRunner
    hidden: Tensor
    table: Tensor
    lengths: list[int]

    @property
    def buffers(self) -> MetadataBuffers:
        return self.runner.buffers

    def load(self, **given: Any) -> None:
        """Advance the lengths by one and load the batch."""
        self.lengths = [length + 1 for length in self.lengths]
        slots = {"slot_mapping": torch.arange(self.count)} if "slot_mapping" in self.buffers.tensors else {}
        self.buffers.load(list(range(self.count + 1)), self.lengths, **slots, **given)

    @property
    def count(self) -> int:
        return len(self.lengths)

    @property
    def tables(self) -> BlockTables:
        return BlockTables(window=self.table)

    def step(self) -> None:
        """Make a correct step."""
        self.load(block_tables=self.tables)
        self.runner.step(self.count, hidden=torch.randn(self.count, 4))


def scaled(hidden: Tensor, metadata: AttentionMetadata, caches: Any) -> Tensor:
    """Stand for a model: reads its input and metadata, writes a cache."""
    for cache in caches:
        cache.index_fill_(0, metadata.window.slot_mapping.clamp(0, 63), 1.0)
    return hidden * 2 + metadata.positions[:, None]


def serve(engine_slots: bool = False, warm: bool = True, device: str = "cpu") -> Served:
    buffers = MetadataBuffers(**SIZES, ratios=(), engine_slots=engine_slots, device=device)
    hidden, caches = torch.zeros(8, 4, device=device), [torch.zeros(64, 2, device=device)]
    graphs = "standin" if device == "cpu" else "cuda"
    runner = DecodeRunner(scaled, buffers, inputs={"hidden": hidden}, caches=caches, graphs=graphs)
    if warm:
        runner.warm_up()
    table = torch.arange(16, dtype=torch.int32, device=device).view(4, 4).clone()
    return Served(runner, hidden, table, [5, 40, 63])


def input_forgotten(served: Served) -> None:
    served.load()
    served.runner.step(3)


def lengths_not_advanced(served: Served) -> None:
    served.runner.step(3, hidden=torch.randn(3, 4))


def table_not_copied(served: Served) -> None:
    served.table[1, 0] = 9
    served.load()
    served.runner.step(3, hidden=torch.randn(3, 4))


def slots_of_an_earlier_step(served: Served) -> None:
    served.buffers.tensors["seq_lens"][:3] += 1
    served.runner.step(3, hidden=torch.randn(3, 4))


def padding_not_zeroed(served: Served) -> None:
    served.hidden.fill_(1.0)
    served.load()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepInputs, "pad", lambda self, tokens, bucket: None)
        served.runner.step(3)


def rows_forgotten(served: Served) -> None:
    served.load()
    served.hidden[:2].copy_(torch.randn(2, 4))
    served.runner.step(3)


def too_few_tokens(served: Served) -> None:
    served.load()
    served.runner.step(2, hidden=torch.randn(2, 4))


def page_missing(served: Served) -> None:
    served.table[2, 1] = -1
    served.load(block_tables=served.tables)  # request 2 has 65 tokens
    served.runner.step(3, hidden=torch.randn(3, 4))


FAULTS: dict[str, tuple[Callable[[Served], None], str, str, str]] = {
    "an input": (input_forgotten, "input hidden rows 0 to 2 of an earlier step", "between two replays", "Served.step"),
    "lengths": (lengths_not_advanced, "metadata seq_lens of an earlier step", "between two replays", "load at"),
    "a block table": (
        table_not_copied,
        "metadata window_block_table has page 4 for request 1, column 0, and its source has 9",
        "copied again",
        "load at",
    ),
    "slots": (slots_of_an_earlier_step, "metadata slot_mapping of an earlier step", "between two replays", "load at"),
    "padding": (padding_not_zeroed, "input hidden row 3, padding, is not zero", "after the batch are zero", "fill_"),
    "some rows": (rows_forgotten, "input hidden rows 2 to 2 of an earlier step", "between two replays", "step at"),
    "too few tokens": (too_few_tokens, "metadata query_start_loc counts 3 tokens, and the step has 2", "a row", "load"),
    "a page": (page_missing, "metadata window_block_table has no page for request 2, column 1", "has a page", "load"),
}
"""Faults, each with the buffer as it is named, its rule, and who wrote it last."""


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_stale_buffer_is_named_before_the_replay(fault: str) -> None:
    plant, named, rule, writer = FAULTS[fault]
    served = serve(engine_slots=fault == "slots")
    with witness(served.runner) as seen:
        served.step()
        assert seen.stale == []
        replays = served.runner.statistics.replays
        with pytest.raises(GraphError) as caught:
            plant(served)
    assert caught.value.code == "E431" and served.runner.statistics.replays == replays
    assert named in caught.value.got and "in step 2, the step of" in caught.value.got
    assert rule in caught.value.rule
    assert "written for step " in str(caught.value) and writer.split(".")[-1] in str(caught.value)
    assert "test_witness.py:" in str(caught.value), str(caught.value)
    assert str(seen.stale[0].write) in str(seen.stale[0])


def test_findings_are_listed_without_an_error() -> None:
    served, reported = serve(), list[Any]()
    with witness(served.runner, strict=False, report=reported.append) as seen:
        served.step()
        lengths_not_advanced(served)
        served.step()
        input_forgotten(served)
    assert [(stale.buffer, stale.step) for stale in seen.stale] == [("metadata seq_lens", 2), ("input hidden", 4)]
    assert reported == seen.stale and served.runner.statistics.replays == 4
    assert seen.stale[1].write.step == 3
    assert "stale: step 4, the step of 4 tokens, replayed: input hidden rows 0 to 2" in str(seen)


def test_buffers_have_the_step_and_the_line_that_wrote_them_last() -> None:
    served = serve()
    with witness(served.runner) as seen:
        served.step()
        served.step()
        with contextlib.ExitStack() as stack:  # its line is not the user's
            stack.callback(served.buffers.tensors["reserved"].fill_, 7)
        shown = str(seen)
    lines = {line.split("  ")[0]: line for line in shown.splitlines()}
    assert "for step 2 by MetadataBuffers.load at tests/debug/test_witness.py:" in lines["metadata seq_lens"]
    assert "for step 2 by DecodeRunner.step at " in lines["input hidden"]
    assert "for step 2 by the step of 4 tokens, replayed" in lines["caches[0]"]
    assert "for step 2 by the step of 4 tokens, replayed" in lines["metadata window_slots"]
    assert "for step 3 by aten.fill_ at tests/debug/test_witness.py:" in lines["metadata reserved"]
    assert seen.last_write("input hidden").step == 2
    with pytest.raises(dsv4_compile.DSV4Error, match="E201"):
        seen.last_write("hidden")


def test_step_without_a_graph_is_checked_and_counted() -> None:
    served = serve()
    with witness(served.runner) as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # W601
        served.buffers.load([0, 5], [9], block_tables=served.tables)
        served.runner.step(5, hidden=torch.randn(5, 4))
        for name in ("caches[0]", "metadata window_slots"):
            assert seen.last_write(name).writer == "a step of 5 tokens without a graph"
        with pytest.raises(GraphError, match=r"E431[\s\S]*seq_lens"):
            served.runner.step(5, hidden=torch.randn(5, 4))


def test_warm_up_and_captures_are_no_writes() -> None:
    served = serve(warm=False)
    with witness(served.runner) as seen:
        served.load(block_tables=served.tables)
        before = str(seen)
        served.runner.warm_up()
        served.runner.graphs.capture(lambda: served.buffers.tensors["seq_lens"].add_(1), "a step")
        assert str(seen) == before and "by MetadataBuffers.load at " in before
        served.runner.step(3, hidden=torch.randn(3, 4))
    assert seen.mode.step == 2


def in_place(served: Served, seen: Witness) -> None:
    served.buffers.tensors["seq_lens"][:3].add_(1)
    served.hidden[:3] = 1.0


def of_another_thread(served: Served, seen: Witness) -> None:
    thread = threading.Thread(target=in_place, args=(served, seen))
    thread.start()
    thread.join()


def in_inference_mode(served: Served, seen: Witness) -> None:
    with torch.inference_mode():
        in_place(served, seen)


def past_torch(served: Served, seen: Witness) -> None:
    for tensor, rows in ((served.buffers.tensors["seq_lens"], 1), (served.hidden, torch.randn(3, 4))):
        tensor.numpy()[:3] += rows.numpy() if isinstance(rows, Tensor) else rows
        seen.wrote(tensor[:3], "the engine")


def by_compiled_code(served: Served, seen: Witness) -> None:
    advance = torch.compile(lambda lens, hidden: (lens[:3].add_(1), hidden[:3].mul_(2)), backend="eager")
    advance(served.buffers.tensors["seq_lens"], served.hidden)


@pytest.mark.parametrize("write", [in_place, of_another_thread, in_inference_mode, past_torch, by_compiled_code])
def test_writes_of_other_code_count(write: Callable[[Served, Witness], None]) -> None:
    served = serve()
    with witness(served.runner) as seen:
        for _ in range(3):
            served.step()
            write(served, seen)
            served.runner.step(3)
    assert seen.stale == []


def test_table_that_changed_where_the_batch_does_not_read_is_no_fault() -> None:
    served = serve()
    with witness(served.runner):
        served.step()
        served.table[0, 2] = 99  # of 256 tokens, and the request has 7
        served.table[3] = 99
        served.load()
        served.runner.step(3, hidden=torch.randn(3, 4))


def test_random_batches_of_a_correct_engine_raise_nothing(seed: int) -> None:
    world = make_world()
    runner, engine = make_runner(world, buckets=(1, 2, 4)), Engine(random.Random(seed))
    runner.warm_up()
    with witness(runner) as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # W601
        for _ in range(50):
            query_lens, seq_lens = engine.advance()
            runner.step(len(query_lens), hidden=world.load(query_lens, seq_lens))
    assert seen.stale == []
    assert runner.statistics.replays + runner.statistics.uncaptured == 50


def test_token_that_no_step_wrote_is_named() -> None:
    served = serve()
    with witness(served.runner, contexts=True) as seen:
        for _ in range(3):
            served.step()
        served.load()  # and no step
        with pytest.raises(GraphError, match=r"E431[\s\S]*lack tokens 8 to 8 of request 0, which no step wrote"):
            served.step()
        served.runner.caches[0][3:5].fill_(1.0)  # filled by other code
        served.step()
        served.step()
        seen.wrote(served.runner.caches[0], "a transfer")
        served.lengths = [100, 7, 64]
        served.step()
    assert len(seen.stale) == 1


@pytest.mark.parametrize("sampler", ["greedy", lambda logits: logits.argmax(-1)], ids=["captured", "between-steps"])
def test_runs_that_advance_on_the_device_raise_nothing(sampler: Any) -> None:
    buffers = MetadataBuffers(**SIZES, ratios=())
    noise = torch.randn(8, 5)
    inputs = {"ids": buffers.tensors["input_ids"], "positions": buffers.tensors["positions"], "noise": noise}
    runner = DecodeRunner(
        lambda ids, positions, noise, metadata, caches: noise + ids[:, None] + positions[:, None],
        buffers,
        inputs=inputs,
        graphs="standin",
        sampler=sampler,
    )
    runner.warm_up()
    tables = BlockTables(window=torch.arange(16, dtype=torch.int32).view(4, 4))
    with witness(runner) as seen:
        buffers.load([0, 1, 2, 3], [5, 40, 63], block_tables=tables, input_ids=[1, 2, 3], reserved=[9, 99, 99])
        runner.run(6, num_reqs=3)
        runner.run(2, num_reqs=3)
        assert seen.last_write("metadata seq_lens").step == 9
        with pytest.raises(GraphError, match=r"E431[\s\S]*input noise"):
            runner.step(3)


def test_graphs_of_compiled_functions_are_checked_too() -> None:
    buffers, bias = MetadataBuffers(**SIZES, ratios=()), torch.zeros(4, dtype=torch.int64)
    table = BlockTables(window=torch.arange(16, dtype=torch.int32).view(4, 4))
    names, in_place = ("positions", "bias"), frozenset({1})
    graph = CapturedGraph(lambda positions, bias: [positions + bias], names, in_place, StandInGraphs(), Policy())

    def step(length: int, given: bool = True, refresh: bool = True) -> None:
        buffers.load([0, 1], [length], block_tables=table)
        if refresh:
            buffers.refresh(4)
        if given:
            bias.fill_(length)
        assert int(graph(metadata.positions, bias)[0][0]) == 2 * length - 1

    buffers.load([0, 1], [1], block_tables=table)
    buffers.refresh(4)
    metadata = buffers.metadata(4)
    with counting() as counts, witness(buffers, {"bias": bias}) as seen:
        for length in range(1, 7):
            step(length)
        assert seen.stale == [] and seen.last_write("input bias").step == 4
        with pytest.raises(GraphError, match=r"E431[\s\S]*input bias rows 0 to 3 of an earlier step"):
            step(7, given=False)
        with pytest.raises(GraphError, match=r"E431[\s\S]*metadata positions older than its inputs"):
            step(8, refresh=False)
    assert counts.replays == 4


def test_nothing_is_watched_outside_the_block() -> None:
    methods = ("_replay", "_uncaptured", "run", "plan", "warm_up")
    names = [(DecodeRunner, name) for name in methods] + [(CapturedGraph, "_replay"), (StandInGraphs, "capture")]
    before = [getattr(kind, name) for kind, name in names]
    served = serve()
    with witness(served.runner):
        assert all(getattr(kind, name) is not original for (kind, name), original in zip(names, before, strict=True))
    assert [getattr(kind, name) for kind, name in names] == before
    served.step()
    lengths_not_advanced(served)


def test_other_objects_are_an_error() -> None:
    other: Any = torch.ones(3)
    with pytest.raises(dsv4_compile.DSV4Error, match=r"E201[\s\S]*Tensor"), witness(other):
        pass
