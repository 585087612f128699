"""Drafts of DeepSeek-V4.1 on a GPU: a step with drafts as one CUDA graph, and a host that waits for nothing.

python -m pytest -q -s tests/gpu/models/test_v41_drafts.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.models.v41 import V41Caches, V41Model, compile, generate, load, prefill, save_folder
from dsv4_compile.models.v41.draft_captured import CapturedDrafts, DraftSteps
from dsv4_compile.models.v41.draft_steps import verify
from dsv4_compile.models.v41.tiny import TINY_DRAFTS, tiny_model
from dsv4_compile.testing import assert_bitwise
from tests.gpu.models.test_v41_step import CUDA, FORMATS, Case, prompts
from tests.models.v41.test_compiled import KINDS
from tests.models.v41.test_draft_generate import DRAFTS

GREEDY, SAMPLED = (0.0, 0.0, 1.0, 0.0), (1.0, 0.0, 1.0, 0.0)


@pytest.fixture(scope="module", params=["float32, plain", "float32, bytes", "quantised, bytes"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """All kinds of layers and three draft layers: floating weights, or the bytes of a published folder."""
    weights, cache_format = request.param.split(", ")
    model = tiny_model(drafts=TINY_DRAFTS)
    if weights == "quantised":
        folder: Path = tmp_path_factory.mktemp("v41")
        save_folder(model, folder)
        model = load(folder, device=CUDA, token_map=model.token_map)
    return Case(model.to(CUDA), FORMATS[cache_format])


def begun(model: V41Model, caches: V41Caches) -> tuple[Tensor, ...]:
    """Prompts of three requests in the caches; anchors, lengths, numbers and seeds."""
    some = prompts()
    numbers = torch.tensor([GREEDY, SAMPLED, GREEDY], dtype=torch.float64, device=CUDA)
    first = prefill(model, some, caches).argmax(1)
    return first, torch.tensor([len(ids) for ids in some], device=CUDA), numbers, torch.arange(3, device=CUDA)


def captured_of(case: Case, *buckets: int, **sizes: int) -> CapturedDrafts:
    steps = CapturedDrafts(case.model, case.caches(**sizes), verify, buckets=buckets)
    steps.warm_up()
    return steps


def test_replays_are_eager_steps_bit_by_bit(case: Case) -> None:
    """At equal sizes libraries choose equal GEMMs."""
    captured, eager = captured_of(case, 3), DraftSteps(case.model, case.caches(), verify)
    for steps in (captured, eager):
        steps.load(*begun(case.model, steps.caches))
    for _ in range(12):
        want, got = eager.step().clone(), captured.step().clone()
        assert torch.equal(got, want) and (got[:, 0] > 0).all()
        assert_bitwise(captured._tensors[3].rows.draft_logits, eager._loaded.rows.draft_logits)
    for got, want in zip(captured.caches.tensors(), eager.caches.tensors(), strict=True):
        assert_bitwise(got, want)


def test_any_drafts_give_one_text(case: Case) -> None:
    """Steps of the same rows: with drafts, without any, and with the text itself as drafts."""
    steps = captured_of(case, 3)
    rows = steps._tensors[3].rows
    texts: list[list[list[int]]] = []
    accepted = []
    for wrong in (None, "none", 0, 2, 5):
        inputs = begun(case.model, steps.caches)
        steps.load(inputs[0], inputs[1], torch.zeros_like(inputs[2]), inputs[3])
        tokens: list[list[int]] = [[], [], []]
        while min(map(len, tokens)) < 20:
            if wrong == "none":
                rows.drafts.fill_(-1)
            elif wrong is not None:
                following = [(texts[0][i][len(tokens[i]) : len(tokens[i]) + 5] + [0] * 5)[:5] for i in range(3)]
                drafts = torch.tensor(following, device=CUDA)
                rows.drafts.copy_((drafts + (torch.arange(5, device=CUDA) >= wrong)) % 64)
            for i, (count, *new) in enumerate(steps.step().tolist()):
                tokens[i] += new[:count]
        texts.append(tokens)
        accepted.append(steps.draft_statistics().tokens_per_step)
    for i in range(3):
        assert len({tuple(tokens[i][:20]) for tokens in texts}) == 1, i
    assert accepted[1] == accepted[2] == 1 and accepted[3] > 2 and accepted[4] > 3


def test_a_compiled_step_is_captured() -> None:
    """By backend="dsv4": prompts and steps; the text of a call is that of the same call again."""
    case = Case(tiny_model(drafts=DRAFTS, **KINDS).to(CUDA), FORMATS["bytes"])
    steps = compile(case.model, caches=case.caches(), buckets=[3, 5])
    assert steps.captured_drafts is not None and steps.captured_drafts.statistics.captures == 2
    for options in ({}, {"temperature": 1.0, "seed": 3}):
        settings: dict[str, Any] = {"max_new_tokens": 20, "stop": []} | options
        tokens = generate(case.model, prompts(), **settings, forward=steps)
        assert [len(new) for new in tokens] == [20, 20, 20] and case.model.draft_statistics is not None
        assert generate(case.model, prompts(), **settings, forward=steps) == tokens
    assert steps.captured_drafts.statistics.replays > 20


def test_steps_allocate_nothing_copy_nothing_and_wait_for_nothing(case: Case) -> None:
    steps = captured_of(case, 3, max_seq_len=1024)
    inputs = begun(case.model, steps.caches)
    steps.load(*inputs)
    steps.run(2)
    torch.cuda.synchronize()
    before, held = torch.cuda.memory_stats(), steps.graphs.memory()
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps.load(*inputs)
        for _ in range(10):
            steps.run(15)
        steps.stop(1)
        steps.run(5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()
    for name in ("reserved_bytes.all.current", "num_alloc_retries"):
        assert after[name] == before[name], name
    assert steps.graphs.memory() == held and steps.draft_statistics().steps > 300
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        steps.step()
        torch.cuda.synchronize()
    events = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    assert len(events) > 1
    assert [name for name in events if "HtoD" in name or "DtoH" in name] == []


def test_times(case: Case, record_property: Callable[..., None]) -> None:
    """A replay is faster than the launches of eager's ops; prints both."""
    steps = captured_of(case, 3, max_seq_len=2048)
    eager = DraftSteps(case.model, case.caches(max_seq_len=2048), verify)

    def seconds(run: Any, count: int) -> float:
        run.load(*begun(case.model, run.caches))
        run.step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            run.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    times = seconds(eager, 3), seconds(steps, 100)
    record_property("us", 1e6 * times[1])
    print(f"\n{case.model.dtype}: a step with drafts {1e6 * times[1]:.0f} us, eager {1e6 * times[0]:.0f} us")
    assert times[1] < times[0]
