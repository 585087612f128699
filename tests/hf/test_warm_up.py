"""Tests of warm-up: after it no size of prompt or batch compiles or captures anything."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dsv4_compile import hf, progress
from dsv4_compile._compat import counters
from dsv4_compile.debug import strict
from dsv4_compile.hf.tiny import tiny_model
from dsv4_compile.runtime import counting
from dsv4_compile.runtime.structured_log import TRACE
from dsv4_compile.runtime.warmup import is_late
from tests.hf.small import LAYERS, close, logits, random_ids

LONG = bool(os.environ.get("DSV4_LONG_STORM"))
"""Prompts of 1 to 4,096 tokens and batches of 1 to 8, which take minutes: set the variable."""
SIZES: dict[str, Any] = (
    {"max_batch_size": 8, "max_seq_len": 4352} if LONG else {"max_batch_size": 3, "max_seq_len": 256}
)
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": LAYERS["layer_types"][:1]}
CAPTURED = {"dsv4.cudagraph": "full", "dsv4.cudagraph.graphs": "standin", "dsv4.impl": "eager"}
MOST = 4096 if LONG else 200


@pytest.fixture(scope="module", autouse=True)
def traced() -> Iterator[None]:
    """This package's backend without Inductor, which takes a minute; Dynamo, captures and rules are the real ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dsv4_compile._compat.compile_fx", lambda gm, inputs, **_: gm.forward, raising=False)
        yield
    torch.compiler.reset()
    logging.getLogger(TRACE).removeHandler(strict._causes)


def compiled(options: dict[str, Any]) -> Any:
    torch.compiler.reset()
    model = hf.convert(tiny_model(**ONE_LAYER), **SIZES, max_step_tokens=64)
    model.compile(fullgraph=True, backend="dsv4", options={"dsv4.strict": "after_warmup", **options})
    return model


@pytest.fixture(scope="module")
def warmed() -> tuple[Any, hf.WarmUp, dict[str, progress.Event]]:
    """A captured model, what its warm-up did, and the last event of each stage of that."""
    model, events = compiled(CAPTURED), list[progress.Event]()
    counters["stats"].clear()
    with progress.listen(events.append):
        done = hf.warm_up(model)
    return model, done, {event.stage: event for event in events}


def test_warm_up_has_one_graph_for_all_prompts_and_two_for_decodes(
    warmed: tuple[Any, hf.WarmUp, dict[str, progress.Event]],
) -> None:
    model, done, stages = warmed
    assert counters["stats"]["unique_graphs"] == done.graphs == 3
    assert is_late() and model.model.dsv4_cache.seq_lens.sum() == 0
    assert done.captures >= len(done.prompts) + len(done.batches) and done.capture_bytes > 0
    assert stages["warm up"].done == stages["warm up"].total
    assert all(done.seconds[kind] > 0 for kind in ("trace", "compile", "capture", "run"))
    for word in ("trace", "capture", "3 graphs", "prompts of 64, 128"):
        assert word in str(done)


def test_a_storm_of_sizes_after_warm_up_compiles_and_captures_nothing(warmed: tuple[Any, Any, Any]) -> None:
    original, model, rng = tiny_model(**ONE_LAYER), warmed[0], random.Random(5)
    with counting() as counts:
        for _ in range(60 if LONG else 10):
            rows, columns = rng.randint(1, SIZES["max_batch_size"]), rng.randint(1, MOST)
            ids, mask = random_ids(rows, columns), torch.ones(rows, columns, dtype=torch.long)
            for row in range(1, rows):
                mask[row, : rng.randint(0, columns - 1)] = 0
            got = model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
            want = original.generate(ids[:1], attention_mask=mask[:1], max_new_tokens=3, do_sample=False)
            assert torch.equal(got[:1], want)
        ids = random_ids(2, 31)
        want = logits(original, ids)
        close(logits(model, ids), want)
        with torch.inference_mode():
            close(logits(model, ids.clone(), attention_mask=torch.ones_like(ids, dtype=torch.bool)), want)
        cache = model(ids[:, :-1].int(), logits_to_keep=5).past_key_values
        close(logits(model, ids[:, -1:], past_key_values=cache), want[:, -1:])
    assert counts.captures == counts.compiled == 0 and counts.replays > 25


def test_warm_up_of_a_cache_captures_its_calls(warmed: tuple[Any, Any, Any]) -> None:
    model = warmed[0]
    cache = hf.new_cache(model)
    hf.warm_up(model, cache=cache)
    with counting() as counts:
        logits(model, random_ids(2, 30), past_key_values=cache)
        logits(model, random_ids(2, 1), past_key_values=cache)
    assert counts.replays == 2
    with pytest.raises(ValueError, match="E208"):
        hf.warm_up(model, cache=cache)
    assert cache.get_seq_length() == 31


def test_without_captures_warm_up_compiles_what_generate_uses() -> None:
    model = compiled({})
    done = hf.warm_up(model)
    assert (done.graphs, done.captures, done.prompts) == (4, 0, ())
    for rows in (1, 2, 3):
        model.generate(random_ids(rows, 9 * rows), max_new_tokens=3, do_sample=False)
    with pytest.raises(Exception, match="E430"):
        logits(model, random_ids(2, 30))


@torch.no_grad()
def test_calls_that_leave_defaults_out_run_the_graphs_of_generate() -> None:
    original, model = tiny_model(**ONE_LAYER), compiled({"dsv4.impl": "eager"})
    hf.warm_up(model)
    graphs = counters["stats"]["unique_graphs"]
    cache, one, two = hf.new_cache(model), random_ids(1, 9), random_ids(2, 7)
    model(one, logits_to_keep=1)
    model(one, torch.ones_like(one).bool(), logits_to_keep=1, use_cache=True)
    model(two, attention_mask=torch.ones_like(two).int(), logits_to_keep=1, position_ids=None)
    step = model(one, past_key_values=cache, logits_to_keep=1)
    again = model(one[:, :1], past_key_values=step.past_key_values, logits_to_keep=1)
    without = model(two, use_cache=False, logits_to_keep=1)
    pair = model(two, use_cache=False, logits_to_keep=1, return_dict=None)
    assert counters["stats"]["unique_graphs"] == graphs
    assert without.past_key_values is None and pair.past_key_values is None and again.past_key_values is not None
    wanted = original(torch.cat((one, one[:, :1]), 1), logits_to_keep=1).logits
    close(again.logits, wanted)
    close(without.logits, original(two, logits_to_keep=1).logits)


@pytest.mark.parametrize("kind", ["original", "uncompiled"])
def test_a_model_that_is_not_compiled_is_refused(kind: str) -> None:
    model = tiny_model(**ONE_LAYER)
    if kind == "uncompiled":
        hf.convert(model, **SIZES)
    with pytest.raises(ValueError, match="E208"):
        hf.warm_up(model)
