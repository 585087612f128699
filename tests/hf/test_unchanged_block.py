"""Tests of blocks where a model does not change: results are as outside of them, and the end tells what did."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsv4_compile import hf
from dsv4_compile.hf.model.model_snapshot import Snapshot
from dsv4_compile.hf.model.unchanged_block import has_block
from dsv4_compile.hf.tiny import tiny_model
from dsv4_compile.runtime import counting
from tests.hf.small import LAYERS, close, logits, random_ids

CALLS = {"dsv4.impl": "eager", "fallback_by_default": True}
CAPTURED = CALLS | {"dsv4.cudagraph": "full", "dsv4.cudagraph.graphs": "standin"}


def converted_model() -> Any:
    return hf.convert(tiny_model(**LAYERS), max_batch_size=2, max_seq_len=128)


@pytest.fixture
def model() -> Any:
    return converted_model()


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry for each comparison of a model or of a cache."""
    compared: list[int] = []
    for kind in (Snapshot, hf.PagedCache):

        def counted(self: Any, holds: Callable[[Any], bool] = kind.holds) -> bool:
            compared.append(1)
            return holds(self)

        monkeypatch.setattr(kind, "holds", counted)
    yield compared


def in_turn(model: Any, ids: Tensor, cache: Any) -> Tensor:
    parts = [ids[:, :9], *ids[:, 9:].split(1, dim=1)]
    return torch.cat([logits(model, ids, past_key_values=cache) for ids in parts], dim=1)


@pytest.mark.parametrize("form", ["eager", "captured", "wrapper"])
def test_calls_in_a_block_compare_a_cache_once_and_a_model_never(form: str, comparisons: list[int]) -> None:
    torch.compiler.reset()
    original = tiny_model(num_hidden_layers=1, layer_types=LAYERS["layer_types"][:1])
    model = hf.convert(copy.deepcopy(original), max_batch_size=2, max_seq_len=128)
    called: Any = model
    if form == "captured":
        model.compile(backend="dsv4", fullgraph=True, options=CAPTURED)
    elif form == "wrapper":
        called = torch.compile(model, backend="dsv4", options=CALLS)
    ids = random_ids(2, 16)
    with counting() as counts:
        in_turn(called, ids, hf.new_cache(model))
        with hf.unchanged(called):
            cache, other = hf.new_cache(model), hf.new_cache(model)
            in_turn(called, ids, cache)
            comparisons.clear()
            cache.reset()
            close(in_turn(called, ids, cache), logits(original, ids))
            assert not comparisons
            close(in_turn(called, ids[:1], other), logits(original, ids[:1]))
            assert len(comparisons) <= 3  # of the other cache, and of the model at that time
        assert (counts.replays > 0) is (form == "captured")
    torch.compiler.reset()


def test_generate_in_a_block(model: Any, original: Any, comparisons: list[int]) -> None:
    ids = random_ids(2, 9)
    with hf.unchanged(model):
        comparisons.clear()
        got = model.generate(ids, max_new_tokens=12, do_sample=False)
        assert len(comparisons) <= 3
    assert torch.equal(got, original.generate(ids, max_new_tokens=12, do_sample=False))


def test_weights_written_in_place_are_used(model: Any, original: Any) -> None:
    ids, other = random_ids(2, 9), copy.deepcopy(original)
    with hf.unchanged(model), torch.no_grad():
        logits(model, ids)
        for each in (model, other):
            each.model.layers[1].self_attn.kv_proj.weight.neg_()
            each.model.layers[0].mlp.experts.down_proj.mul_(2)
            each.lm_head.weight.mul_(2)
        close(logits(model, ids), logits(other, ids))


def assigned(model: Any) -> None:
    projection = model.model.layers[1].self_attn.kv_proj
    projection.weight = nn.Parameter(projection.weight.roll(1, 0))


def given_data(model: Any) -> None:
    projection = model.model.layers[1].self_attn.kv_proj
    projection.weight.data = projection.weight.data.roll(1, 0)


def given_data_of_a_norm(model: Any) -> None:
    model.model.norm.weight.data = model.model.norm.weight.data * 2


def loaded(model: Any) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def hooked(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, args, out: out * 2)


def set_another_way(model: Any) -> None:
    model.model.layers[0].mlp.experts.limit = 3.0


def with_another_module(model: Any) -> None:
    model.model.norm = copy.deepcopy(model.model.norm)


def in_float64(model: Any) -> None:
    model.double()


USED = (assigned, given_data, given_data_of_a_norm, hooked)
CHANGES = (*USED, loaded, set_another_way, with_another_module, in_float64)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_told_at_the_end(change: Callable[[Any], None], model: Any) -> None:
    ids = random_ids(1, 7)
    logits(model, ids)
    with pytest.raises(ValueError, match=r"E20[78]"), hf.unchanged(model):
        logits(model, ids)
        change(model)
    # Afterwards a call compares again, and is refused or uses what the model has now.
    if change in USED:
        other = tiny_model(**LAYERS)
        change(other)
        close(logits(model, ids), logits(other, ids))


def test_a_change_names_what_moved(model: Any) -> None:
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.kv_proj\.weight"), hf.unchanged(model):
        assigned(model)


def test_an_error_in_a_block_stays_the_error(model: Any) -> None:
    with pytest.raises(KeyError, match="mine"), hf.unchanged(model):
        assigned(model)
        raise KeyError("mine")
    logits(model, random_ids(1, 4))


def test_what_changes_without_effect(model: Any) -> None:
    with hf.unchanged(model):
        model.note = "mine"
        model.compile(backend="eager")
        logits(model, random_ids(1, 4))
        model.model.rotary_emb.requires_grad_(False)


def test_checks_of_a_call_stay(model: Any) -> None:
    ids = random_ids(1, 7)
    with hf.unchanged(model):
        cache = hf.new_cache(model)
        logits(model, ids, past_key_values=cache)
        for wrong in ({"position_ids": ids}, {"attention_mask": torch.ones(1, 3)}, {"output_attentions": True}):
            with pytest.raises(ValueError, match="E208"):
                logits(model, ids, past_key_values=cache, **wrong)
        with pytest.raises(ValueError, match="E204"):
            logits(model, random_ids(1, 512), past_key_values=cache)
        model.train()
        with pytest.raises(ValueError, match="training"):
            logits(model, ids, past_key_values=cache)
        model.eval()


def test_other_models_other_threads_and_the_time_after_compare(original: Any) -> None:
    ids, (one, two) = random_ids(1, 7), (converted_model(), converted_model())
    moved = copy.deepcopy(original)
    assigned(moved)
    moved_twice = copy.deepcopy(moved)
    assigned(moved_twice)
    with hf.unchanged(one), hf.unchanged(one):
        logits(one, ids)
        for _ in range(2):
            logits(two, ids)
        assigned(two)
        close(logits(two, ids), logits(moved, ids))
        results: list[Tensor] = []
        with pytest.raises(ValueError, match="E208"), hf.unchanged(two):
            assigned(two)
            thread = threading.Thread(target=lambda: results.append(logits(two, ids)))
            thread.start()
            thread.join()
    close(results[0], logits(moved_twice, ids))
    assigned(one)
    close(logits(one, ids), logits(moved, ids))


def test_what_is_not_converted_is_refused(original: Any, model: Any) -> None:
    for other in (original, nn.Linear(2, 2), None, hf.revert(model)):
        with pytest.raises(ValueError, match="E208"), hf.unchanged(other):
            pass


def test_a_model_that_is_reverted_in_a_block(model: Any) -> None:
    with pytest.raises(ValueError, match="E208"), hf.unchanged(model):
        hf.revert(model)


def serve(model: Any, requests: list[Tensor]) -> Iterator[Tensor]:
    with hf.unchanged(model):
        for ids in requests:
            yield logits(model, ids)


def change(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.q_b_proj.weight = nn.Parameter(-attention.q_b_proj.weight.detach())


def in_a_new_context(call: Callable[[], Any]) -> Any:
    return contextvars.Context().run(call)


def in_a_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@pytest.mark.parametrize("elsewhere", [in_a_new_context, in_a_thread, lambda call: call()])
@pytest.mark.parametrize("early", [True, False])
def test_a_block_in_a_generator_ends_in_any_context(elsewhere: Callable[..., Any], early: bool, model: Any) -> None:
    ids, other = random_ids(1, 9), copy.deepcopy(model)
    change(other)
    served = serve(model, [ids, ids])
    first = next(served)
    if early:
        elsewhere(served.close)
    else:
        assert torch.equal(elsewhere(lambda: list(served))[0], first)
    assert not has_block(model.model)
    change(model)
    close(logits(model, ids), logits(other, ids))


@pytest.mark.parametrize("elsewhere", [in_a_new_context, in_a_thread])
def test_a_change_is_told_where_a_generator_is_closed_early(elsewhere: Callable[..., Any], model: Any) -> None:
    served = serve(model, [random_ids(1, 9)] * 3)
    next(served)
    change(model)
    with pytest.raises(ValueError, match=r"E208[\s\S]*changed in a block"):
        elsewhere(served.close)
    assert not has_block(model.model)


def test_blocks_that_end_in_another_order(model: Any) -> None:
    first, second, stack = (serve(model, [random_ids(1, 9)] * 2) for _ in range(3))
    for served in (first, second, stack):
        next(served)
    first.close()
    assert has_block(model.model)
    with ExitStack() as exits:
        exits.enter_context(hf.unchanged(model))
        exits.callback(second.close)
    stack.close()
    assert not has_block(model.model)
    change(model)
    logits(model, random_ids(1, 9))


def test_a_task_that_outlives_a_block_compares(model: Any) -> None:
    ids, other = random_ids(1, 9), copy.deepcopy(model)
    change(other)

    async def late(ended: asyncio.Event) -> Tensor:
        await ended.wait()
        return logits(model, ids)

    async def run() -> Tensor:
        ended = asyncio.Event()
        with hf.unchanged(model):
            task = asyncio.create_task(late(ended))  # has a copy of the context of the block
            await asyncio.sleep(0)
            logits(model, ids)
        change(model)
        ended.set()
        return await task

    close(asyncio.run(run()), logits(other, ids))


def test_a_block_in_an_async_generator_that_another_task_closes(model: Any) -> None:
    async def serve_async() -> AsyncIterator[Tensor]:
        with hf.unchanged(model):
            while True:
                yield logits(model, random_ids(1, 9))

    async def run() -> None:
        served: Any = serve_async()
        await asyncio.create_task(anext(served))
        await asyncio.create_task(served.aclose())
        assert not has_block(model.model)

    asyncio.run(run())
