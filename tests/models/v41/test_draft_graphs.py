"""A step with drafts as one graph: compiled once for any number of requests and any acceptance, and captured."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import DSV4Error, InputError
from dsv4_compile.models.v41 import V41Caches, V41Format, V41Model, compile, draft_steps, generate, prefill
from dsv4_compile.models.v41.draft_captured import CapturedDrafts, DraftSteps, DraftTensors
from dsv4_compile.models.v41.draft_steps import verify
from dsv4_compile.models.v41.tiny import tiny_config, tiny_model
from dsv4_compile.runtime.drafting import Verified
from tests.models.v41.test_captured import WithoutHost
from tests.models.v41.test_compiled import KINDS
from tests.models.v41.test_draft_generate import DRAFTS, GREEDY, oracle
from tests.models.v41.worked import token_ids

SIZES: dict[str, Any] = {"max_batch_size": 3, "max_seq_len": 64}


@pytest.fixture(scope="module")
def model() -> V41Model:
    return tiny_model(drafts=DRAFTS, **KINDS)


@pytest.fixture(autouse=True)
def without_inductor() -> Iterator[None]:
    """Inductor calls PyTorch in place of C++ that it would compile."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(fallback_by_default=True):
        yield


def caches_of(model: V41Model) -> V41Caches:
    return model.new_caches(cache_format=V41Format.plain(grids=True), **SIZES)


def begun(model: V41Model, caches: V41Caches, prompts: list[Tensor]) -> tuple[Tensor, ...]:
    """Prompts in the caches; anchors, lengths, numbers and seeds."""
    first = prefill(model, prompts, caches).argmax(1)
    count = len(prompts)
    numbers = torch.tensor([GREEDY, (1.0, 0.0, 1.0, 0.0), GREEDY][:count], dtype=torch.float64)
    return first, torch.tensor([len(prompt) for prompt in prompts]), numbers, torch.arange(count)


def test_any_acceptance_and_any_batch_run_in_one_graph(model: V41Model) -> None:
    """Compiled before the first request, in one graph; a step of padding writes nothing."""
    caches = caches_of(model)
    before = [tensor.clone() for tensor in caches.tensors()]
    steps = compile(model, caches=caches, backend="eager")
    assert all(map(torch.equal, caches.tensors(), before))
    draw = random.Random(5)
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(3):
            prompts = [token_ids(draw.choice((1, 2, 9, 40))).roll(draw.randrange(9)) for _ in range(draw.randint(1, 3))]
            options: dict[str, Any] = {"max_new_tokens": draw.randint(1, 9), "stop": [draw.randrange(64)]}
            options |= draw.choice(({}, {"temperature": 1.0, "seed": 3}))
            got = generate(model, prompts, **options, forward=steps)
            assert model.draft_statistics is not None
            assert got == generate(model, prompts, **options, caches=caches_of(model)), options
            plain = generate(model, prompts, **options, forward=steps, drafts=False)
            assert options.get("temperature") or got == plain


def test_backend_dsv4_compiles_the_step(model: V41Model) -> None:
    compiled = torch.compile(verify, backend="dsv4", fullgraph=True, dynamic=True)
    caches = [caches_of(model) for _ in range(2)]
    runs = [DraftSteps(model, caches[0], verify), DraftSteps(model, caches[1], compiled)]
    for steps in runs:
        steps.load(*begun(model, steps.caches, [token_ids(19), token_ids(7), token_ids(1)]))
    for _ in range(4):
        want, got = (steps.step() for steps in runs)
        assert torch.equal(got, want)
        a, b = (steps._loaded.rows.draft_logits for steps in runs)
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_captured_steps_run_without_the_host(model: V41Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Acceptance of 0 to 5 drafts by an oracle on the device; greedy and sampled requests; counters on the device."""
    prompts = [token_ids(19), token_ids(7).flip(0), token_ids(1)]
    texts = generate(model, prompts, max_new_tokens=44, stop=[], drafts=False, cache_format=V41Format.plain(grids=True))
    rows = [torch.cat((prompt, torch.tensor(tokens))) for prompt, tokens in zip(prompts, texts, strict=True)]
    table = torch.stack([torch.nn.functional.pad(row, (0, 80 - len(row))) for row in rows])

    def propose(_: Any, anchors: Tensor, lengths: Tensor, requests: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        column = torch.arange(5)
        drafts = table[requests[:, None].clamp_max(2), lengths[:, None] + 1 + column]
        wrong = column >= (lengths % 6)[:, None]
        return (drafts + wrong) % 64, torch.zeros(len(anchors), 5, 64)

    monkeypatch.setattr(draft_steps, "propose", propose)
    steps = CapturedDrafts(model, caches_of(model), verify, graphs="standin")
    steps.warm_up()
    assert steps.statistics.captures == 2
    steps.load(*begun(model, steps.caches, prompts))
    tokens, counts = (values.clone() for values in steps.run(6))
    for request in (0, 2):
        new = [token for step, n in zip(tokens[:, request], counts[:, request], strict=True) for token in step[:n]]
        assert torch.stack(new).tolist() == texts[request][1 : 1 + len(new)]
    assert counts[:, 0].tolist()[:3] == [1, 3, 6] and (tokens[counts[..., None] <= torch.arange(6)] == -1).all()
    statistics = steps.draft_statistics()
    assert statistics.steps == 18 and statistics.tokens == int(counts.sum())
    more, numbers = steps.run(60)
    assert (more[numbers[..., None] > torch.arange(6)] >= 0).all()
    assert (steps._tensors[3].rows.lengths == 64).all() and more.max() < 64
    assert steps.run(2)[1].sum() == 0
    steps.load(*begun(model, steps.caches, prompts))
    again = steps.run(6)
    assert torch.equal(again[0], tokens) and torch.equal(again[1], counts)


def test_captured_generation_is_that_of_the_model(model: V41Model) -> None:
    steps = compile(model, caches=caches_of(model), backend=None, graphs="standin")
    assert steps.captured_drafts is not None and steps.captured_drafts.statistics.captures == 2
    prompts = [token_ids(19), token_ids(7).flip(0), token_ids(1)]
    for options in ({}, {"temperature": 1.0, "seed": 3}, {"stop": list(range(0, 64, 7))}, {"max_new_tokens": 1}):
        settings: dict[str, Any] = {"max_new_tokens": 9, "stop": []} | options
        for some in (prompts, prompts[:1]):
            want = generate(model, some, **settings, caches=caches_of(model))
            assert generate(model, some, **settings, forward=steps) == want
    assert steps.captured_drafts.statistics.captures == 2 and steps.captured_drafts.statistics.replays > 20


def test_misuses_are_refused(model: V41Model) -> None:
    steps = CapturedDrafts(model, caches_of(model), verify, graphs="standin")
    none = torch.zeros(4, dtype=torch.int64)
    for code, call in (
        ("E427", steps.step),
        ("E204", lambda: steps.load(none, none, torch.zeros(4, 4), none)),
        ("E204", lambda: steps.run(0)),
        ("E204", lambda: steps.run(5000)),
        ("E204", lambda: CapturedDrafts(model, steps.caches, verify, graphs="standin", buckets=[1])),
        ("E204", lambda: compile(model, backend=None, max_batch_size=1, max_seq_len=64, max_step_tokens=4)),
    ):
        with pytest.raises(DSV4Error) as caught:
            call()
        assert caught.value.code == code, caught.value
    plain = compile(model, backend=None, caches=model.new_caches(drafts=False, **SIZES))
    with pytest.raises(InputError, match="caches without drafts"):
        generate(model, [[1]], max_new_tokens=1, forward=plain, drafts=True)
    assert plain.captured_drafts is None


@pytest.mark.parametrize("quantised", [False, True])
def test_no_op_of_a_step_needs_the_host(quantised: bool) -> None:
    """A tensor on the device "meta" has no values: reading one, or a size that depends on them, is an error."""
    model = V41Model(
        tiny_config(**KINDS), torch.bfloat16, quantised=quantised, quantize_input=quantised, drafts=DRAFTS
    ).to("meta")
    caches = model.new_caches(max_batch_size=3, max_seq_len=64)
    tensors = DraftTensors(3, model)
    with WithoutHost() as mode, torch.no_grad():
        done: Verified = verify(model, tensors.rows, caches)
        assert tensors.advance(done).shape == (3, 7)
    assert {"accept_drafts", "markov_drafts", "sparse_mla_mixed"} <= mode.ops


def test_a_function_that_runs_the_model_runs_the_steps(model: V41Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [token_ids(19), token_ids(7).flip(0)]
    options: dict[str, Any] = {"max_new_tokens": 9, "stop": [], "cache_format": V41Format.plain()}
    plain = generate(model, prompts, **options, drafts=False)
    texts = {i: [*prompt.tolist(), *tokens] for i, (prompt, tokens) in enumerate(zip(prompts, plain, strict=True))}
    monkeypatch.setattr(draft_steps, "propose", oracle(model, texts, lambda _: 3))
    calls: list[int] = []

    def forward(ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(len(ids))
        return model(ids, *args, **kwargs)

    assert generate(model, prompts, **options, forward=forward) == plain
    assert set(calls[1:]) == {12} and len(calls) <= 5
