"""Tests of RunningBatch: each request gets the tokens that it gets alone, whatever happens to the others."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

from dsv4_compile import hf
from dsv4_compile._compat import counters
from dsv4_compile.hf.serving.requests import Request
from dsv4_compile.hf.tiny import tiny_model
from dsv4_compile.runtime import repeated_layers
from dsv4_compile.runtime.addresses import AddressCheck
from tests.hf.serving import SAMPLED, alone, prompt
from tests.hf.small import LAYERS

SIZES: dict[str, Any] = {"slots": 8, "prefill_chunk": 48}
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
"""Layers that are quick to compile."""
CALLS = {"fallback_by_default": True}
"""Options with which Inductor calls PyTorch: a third of the time, where the generated code is not the question."""


@pytest.fixture(scope="module")
def original() -> Any:
    return tiny_model(**LAYERS)


@pytest.fixture(scope="module", params=[True, False], ids=["attention-only", "whole"])
def either(request: pytest.FixtureRequest) -> Any:
    return hf.convert(tiny_model(**LAYERS), max_batch_size=1, max_seq_len=256, attention_only=request.param)


@pytest.fixture(scope="module")
def converted() -> Any:
    return hf.convert(tiny_model(**LAYERS), max_batch_size=1, max_seq_len=256, attention_only=False)


@torch.no_grad()
def assert_greedy(original: Any, request: Request) -> None:
    """Each token is eager transformers' first choice after the tokens before it."""
    ids = torch.tensor([request.prompt + request.tokens[:-1]])
    want = original(ids, use_cache=False).logits[0, len(request.prompt) - 1 :].argmax(-1)
    assert want.tolist() == request.tokens


def test_forty_requests_through_eight_slots_get_the_tokens_that_each_gets_alone(original: Any, either: Any) -> None:
    rng = random.Random(5)
    batch, requests = hf.RunningBatch(either, **SIZES), []
    dropped: list[Request] = []
    for i in range(40):
        length = rng.choice([1, 3, rng.randint(4, 40), rng.randint(4, 40), rng.randint(50, 100)])
        options: dict[str, Any] = {"max_new_tokens": rng.randint(1, 9)}
        if i % 8 == 0:
            options |= SAMPLED | {"seed": i}
        requests.append((batch.submit(prompt(length, i), **options), options))
        if i % 7 == 3:
            dropped.append(batch.submit(prompt(100, i), max_new_tokens=50))
        for refused in ([], [512], prompt(250)):
            with pytest.raises(ValueError, match=r"E20[14]"):
                batch.submit(refused, max_new_tokens=10)
        if i % 3 == 0:
            batch.step()
    most = 0
    while not batch.idle:
        batch.step()
        most = max(most, len(batch.running))
        victim = next((request for request in dropped if not request.ended and request.state != "waiting"), None)
        if victim is not None and rng.random() < 0.4:
            victim.cancel()
    assert most == 8 and {request.state for request in dropped} == {"cancelled"}
    for request, options in requests:
        assert len(request.tokens) == request.max_new_tokens and request.state == "length"
        if request.sampling.greedy:
            assert_greedy(original, request)
        else:
            assert request.tokens == alone(either, request.prompt, **options)


def poison(batch: Any) -> None:
    for layer in batch.caches:
        for tensor in layer.tensors().values():
            tensor.fill_(torch.nan)


def test_a_slot_shows_nothing_of_the_request_before(original: Any, converted: Any) -> None:
    batch = hf.RunningBatch(converted, slots=1, prefill_chunk=48)
    poison(batch)
    long = batch.submit(prompt(140), max_new_tokens=6)
    batch.run()
    poison(batch)
    short = batch.submit(prompt(5), max_new_tokens=6)
    batch.run()
    assert_greedy(original, long)
    assert_greedy(original, short)


@pytest.mark.parametrize(
    ("max_seq_len", "prefill_chunk"), [(1, 16), (8, 256), (40, 64), (40, 1000), (64, 256), (100, 129), (255, 300)]
)
def test_slots_shorter_than_a_chunk_of_prefill(
    max_seq_len: int, prefill_chunk: int, original: Any, converted: Any
) -> None:
    """A slot holds whole pages, and a step may fill it."""
    batch = hf.RunningBatch(converted, slots=2, prefill_chunk=prefill_chunk, max_seq_len=max_seq_len)
    assert batch.max_seq_len == 256
    requests = [batch.submit(prompt(n), max_new_tokens=3) for n in (100, 60, 20, 253)]
    batch.run()
    for request in requests:
        assert_greedy(original, request)


def test_a_short_cache_takes_as_many_tokens_in_a_step_as_it_holds(original: Any, converted: Any) -> None:
    ids = torch.tensor([prompt(100)])
    cache = hf.new_cache(converted, max_batch_size=1, max_seq_len=40)
    got = converted(ids, past_key_values=cache).logits
    torch.testing.assert_close(got, original(ids, use_cache=False).logits, atol=2e-4, rtol=0)


@pytest.mark.parametrize("backend", [None, "dsv4"])
def test_a_chunk_of_more_tokens_than_a_sequence_may_have(backend: str | None) -> None:
    """It takes several prompts at once, up to the longest that fit their slots."""
    original = tiny_model(num_hidden_layers=1, layer_types=LAYERS["layer_types"][:1])
    converted = hf.convert(copy.deepcopy(original), max_batch_size=1, max_seq_len=256)
    batch = hf.RunningBatch(converted, slots=3, prefill_chunk=100_000, backend=backend, options=backend and CALLS)
    assert batch.prefill_chunk == 3 * 256
    poison(batch)
    requests = [batch.submit(prompt(n), max_new_tokens=256 - n) for n in (255, 250, 253)]
    batch.step()
    assert all(request.tokens for request in requests)
    batch.run()
    for request in requests:
        assert_greedy(original, request)


@pytest.fixture(scope="module")
def captured() -> Any:
    """Compiled steps of one layer, replayed by the stand-in of CUDA graphs."""
    model = hf.convert(tiny_model(**ONE_LAYER), max_batch_size=1, max_seq_len=256, attention_only=False)
    counters["graph_break"].clear()
    return hf.RunningBatch(model, slots=2, prefill_chunk=48, backend="dsv4", options=CALLS, graphs="standin")


def test_compiled_and_captured_steps_choose_the_tokens_of_eager_transformers(captured: Any) -> None:
    requests = [captured.submit(prompt(n), max_new_tokens=8) for n in (1, 47, 60, 5)]
    sampled = captured.submit(prompt(20), max_new_tokens=8, **SAMPLED)
    captured.step()
    before = counters["stats"]["unique_graphs"]
    captured.run()
    assert counters["stats"]["unique_graphs"] == before and not counters["graph_break"]
    assert (captured.statistics.captures, captured.statistics.uncaptured) == (3, 0)
    assert captured.statistics.replays > 15
    original = tiny_model(**ONE_LAYER)
    for request in requests:
        assert_greedy(original, request)
    assert sampled.tokens == alone(captured.model, sampled.prompt, max_new_tokens=8, **SAMPLED)


def test_captured_steps_isolate_logits_of_nan(captured: Any) -> None:
    ids, weight = [token % 511 for token in prompt(20)], captured.model.model.embed_tokens.weight.data
    want = list(captured.submit(ids, max_new_tokens=8))
    before = weight[511].clone()
    weight[511] = torch.nan  # in place, where the graphs read it
    good, bad = captured.submit(ids, max_new_tokens=8), captured.submit([1, 511], max_new_tokens=8, temperature=1e-39)
    captured.run()
    weight[511] = before
    assert (good.tokens, bad.tokens, bad.state) == (want, [], "failed")
    assert list(captured.submit([1, 511], max_new_tokens=8)) == alone(captured.model, [1, 511], max_new_tokens=8)


def test_a_weight_that_a_capture_reads_elsewhere_is_an_error(captured: Any) -> None:
    request, head = captured.submit(prompt(3), max_new_tokens=3), captured.model.lm_head
    weight = head.weight
    head.weight = torch.nn.Parameter(2 * weight)
    with pytest.raises(RuntimeError, match=r"E421[\s\S]*lm_head.weight"):
        captured.step()
    assert request.state == "waiting"
    head.weight = weight
    captured.run()
    assert request.state == "length"


def test_weights_are_looked_at_again_after_a_change_alone(captured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each request that joins would wait for a look at every tensor of the model."""
    looks: list[str] = []
    check = AddressCheck.check

    def counted(self: AddressCheck, where: str) -> None:
        looks.append(where)
        check(self, where)

    def serve(requests: int = 1) -> int:
        looks.clear()
        for _ in range(requests):
            captured.submit(prompt(3), max_new_tokens=2)
        captured.run()
        return sum("RunningBatch" in where for where in looks)

    serve()
    monkeypatch.setattr(AddressCheck, "check", counted)
    norm = captured.model.model.norm
    assert serve() == 0
    weight = norm.weight.data
    norm.weight.data = weight.clone()
    with pytest.raises(RuntimeError, match=r"E421[\s\S]*norm.weight"), hf.unchanged(captured.model):
        serve()
    norm.weight.data = weight
    assert serve(requests=0) == 1  # of the request that has waited
    with hf.unchanged(captured.model), monkeypatch.context() as patch:
        patch.setattr(type(captured.model.model), "adopt", None)
        assert serve() == 0


def test_requests_that_join_after_a_change_of_weights_use_the_new_ones(converted: Any) -> None:
    model = hf.convert(tiny_model(**LAYERS), max_batch_size=1, max_seq_len=256, attention_only=False)
    batch = hf.RunningBatch(model, slots=2, prefill_chunk=48)
    before = list(batch.submit(prompt(9), max_new_tokens=6))
    other = tiny_model(7, **LAYERS)
    model.load_state_dict(other.state_dict(), assign=True)
    request = batch.submit(prompt(9), max_new_tokens=6)
    batch.run()
    assert request.tokens != before
    assert_greedy(other, request)


ALIKE: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": LAYERS["layer_types"][:1] * 2, "num_hash_layers": 0}
"""Two layers of one kind."""


@pytest.mark.parametrize("graphs", ["off", "standin"])
def test_steps_trace_one_layer_of_each_kind(graphs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[tuple[int, int]] = []
    write_all = repeated_layers.write_out

    def write_out(gm: torch.fx.GraphModule, inputs: Any) -> repeated_layers.Written:
        whole = write_all(gm, inputs)
        counts.append((len(gm.graph.nodes), len(whole.gm.graph.nodes)))
        return whole

    monkeypatch.setattr(repeated_layers, "write_out", write_out)
    torch.compiler.reset()
    original = tiny_model(**ALIKE)
    model = hf.convert(copy.deepcopy(original), max_batch_size=1, max_seq_len=256)
    batch = hf.RunningBatch(model, slots=2, prefill_chunk=48, backend="dsv4", options=CALLS, graphs=graphs)
    requests = [batch.submit(prompt(length), max_new_tokens=6) for length in (9, 70)]
    batch.run()
    for request in requests:
        assert_greedy(original, request)
    assert counts and all(before < 0.8 * after for before, after in counts)


def test_a_weight_of_a_repeated_layer_that_changes_between_steps() -> None:
    torch.compiler.reset()
    model = hf.convert(tiny_model(**ALIKE), max_batch_size=1, max_seq_len=256)
    found = []
    for backend in ("dsv4", None):
        batch = hf.RunningBatch(
            copy.deepcopy(model), slots=1, prefill_chunk=48, backend=backend, options=backend and CALLS
        )
        request = batch.submit(prompt(9), max_new_tokens=8)
        for _ in range(3):
            batch.step()
        experts = batch.model.model.layers[1].mlp.experts
        experts.down_proj = torch.nn.Parameter(-2 * experts.down_proj)
        batch.run()
        found.append(request.tokens)
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def batch(converted: Any) -> Any:
    return hf.RunningBatch(converted, slots=2, prefill_chunk=48)


class TestRequests:
    """Results of one request as a caller sees them."""

    def test_a_stop_token_is_the_last(self, batch: Any) -> None:
        tokens = list(batch.submit(prompt(12), max_new_tokens=10))
        stop = tokens[4]
        request = batch.submit(prompt(12), max_new_tokens=10, stop_tokens=[stop, 511])
        assert list(request) == tokens[: tokens.index(stop) + 1]
        assert request.state == "stop" and batch.idle

    @pytest.mark.parametrize("listed", [False, True])
    def test_without_stop_tokens_the_eos_of_the_generation_config_is_the_last(
        self, batch: Any, listed: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokens = list(batch.submit(prompt(12), max_new_tokens=10))
        eos = [tokens[4], 511] if listed else tokens[4]
        monkeypatch.setattr(batch.model.generation_config, "eos_token_id", eos)
        assert list(batch.submit(prompt(12), max_new_tokens=10)) == tokens[: tokens.index(tokens[4]) + 1]
        assert list(batch.submit(prompt(12), max_new_tokens=10, stop_tokens=[])) == tokens

    def test_tokens_stream_as_they_come(self, batch: Any) -> None:
        seen: list[int] = []
        called = batch.submit(torch.tensor(prompt(12)), max_new_tokens=9, on_token=seen.append)
        iterated = iter(batch.submit(prompt(60), max_new_tokens=5))
        next(iterated)
        assert seen == called.tokens and 0 < len(seen) < 9
        assert len([*iterated]) == 4 and list(called) == seen and len(seen) == 9

    def test_waiting_requests_join_in_the_order_they_came(self, batch: Any) -> None:
        requests = [batch.submit(prompt(40, i), max_new_tokens=2) for i in range(5)]
        ended: list[int] = []
        while not batch.idle:
            batch.step()
            ended += [i for i, request in enumerate(requests) if request.ended and i not in ended]
        assert ended == [0, 1, 2, 3, 4]

    def test_a_callback_that_raises_ends_its_request_alone(self, batch: Any) -> None:
        def fail(token: int) -> None:
            raise KeyError(token)

        good, bad = batch.submit(prompt(9), max_new_tokens=4), batch.submit(prompt(9), max_new_tokens=4, on_token=fail)
        with pytest.raises(KeyError):
            batch.run()
        batch.run()
        assert (good.state, len(good.tokens), bad.state, len(bad.tokens)) == ("length", 4, "cancelled", 1)

    def test_a_step_inside_a_callback_is_refused(self, batch: Any) -> None:
        batch.submit(prompt(9), max_new_tokens=2, on_token=lambda token: batch.step())
        with pytest.raises(ValueError, match=r"E208[\s\S]*callback"):
            batch.run()
        assert batch.idle

    def test_a_step_that_fails_ends_what_ran_and_leaves_what_waits(
        self, original: Any, batch: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        running = [batch.submit(prompt(9, i), max_new_tokens=4) for i in range(2)]
        waiting = batch.submit(prompt(30), max_new_tokens=4)
        batch.step()
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="device"):
            patch.setattr(batch._steps, "decode", lambda *args: (_ for _ in ()).throw(RuntimeError("device")))
            batch.step()
        assert [request.state for request in running] == ["failed", "failed"] and waiting.state == "waiting"
        batch.run()
        assert_greedy(original, waiting)

    def test_a_cancelled_request_gets_nothing_more(self, batch: Any) -> None:
        first, second, third = (batch.submit(prompt(9, i), max_new_tokens=4) for i in range(3))
        third.cancel()
        batch.step()
        first.cancel()
        first.cancel()
        batch.run()
        assert [len(request.tokens) for request in (first, second, third)] == [1, 4, 0]

    @pytest.mark.parametrize(
        ("ids", "options", "code"),
        [
            ([], {}, "E201"),
            ([1, 512], {}, "E201"),
            ([1, -1], {}, "E201"),
            ([1.0], {}, "E201"),
            ([True], {}, "E201"),
            (torch.ones(1, 3, dtype=torch.long), {}, "E201"),
            ([1], {"max_new_tokens": 0}, "E201"),
            ([1], {"temperature": -1.0}, "E201"),
            ([1], {"top_k": -1}, "E201"),
            ([1], {"top_p": 0.0}, "E201"),
            ([1] * 200, {"max_new_tokens": 57}, "E204"),
        ],
    )
    def test_bad_requests_are_refused(self, batch: Any, ids: Any, options: dict[str, Any], code: str) -> None:
        with pytest.raises(ValueError, match=code):
            batch.submit(ids, **{"max_new_tokens": 1, **options})
        assert batch.idle


def test_models_and_sizes_that_cannot_run_are_refused(original: Any, converted: Any) -> None:
    with pytest.raises(RuntimeError, match="E420"):
        hf.RunningBatch(converted, **SIZES, graphs="cuda")
    for model, options, code in (
        (original, {}, "E208"),
        (converted, {"slots": 0}, "E204"),
        (converted, {"prefill_chunk": 1}, "E204"),
        (converted, {"max_seq_len": 1024}, "E204"),
    ):
        with pytest.raises(ValueError, match=code):
            hf.RunningBatch(model, **SIZES | options)
