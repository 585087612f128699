"""DeepSeek-V4.1 on a GPU: one CUDA graph a decode step, with eager's tokens, and a host that waits for nothing.

python -m pytest -q -s tests/gpu/models/test_v41_step.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dsv4_compile import hf
from dsv4_compile.errors import GraphError
from dsv4_compile.models.v41 import V41Caches, V41Format, V41Model, compile, generate, load, prefill, save_folder
from dsv4_compile.models.v41.captured import CapturedSteps
from dsv4_compile.models.v41.tiny import tiny_model
from dsv4_compile.testing import assert_bitwise
from tests.models.v41.test_compiled import KINDS
from tests.models.v41.worked import token_ids

CUDA = torch.device("cuda")
FORMATS = {"plain": V41Format.plain(grids=True), "bytes": V41Format()}
PROMPTS = (range(19), range(5, 12), range(1))
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


class Case(NamedTuple):
    """A model on the GPU, and the format of its caches."""

    model: V41Model
    cache_format: V41Format

    def caches(self, **sizes: int) -> V41Caches:
        return self.model.new_caches(
            cache_format=self.cache_format, **{"max_batch_size": 5, "max_seq_len": 128, **sizes}
        )


@pytest.fixture(scope="module", params=["float32, plain", "float32, bytes", "quantised, bytes"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """All kinds of layers: floating weights, or the bytes of a published folder."""
    weights, cache_format = request.param.split(", ")
    model = tiny_model()
    if weights == "quantised":
        folder: Path = tmp_path_factory.mktemp("v41")
        save_folder(model, folder)
        model = load(folder, device=CUDA, token_map=model.token_map)
    return Case(model.to(CUDA), FORMATS[cache_format])


def prompts() -> list[Tensor]:
    ids = token_ids()
    return [ids[some.start : some.stop] for some in PROMPTS]


def captured_of(case: Case, caches: V41Caches | None = None) -> CapturedSteps:
    """Steps that replay the plain model."""
    steps = CapturedSteps(case.model, case.caches() if caches is None else caches, case.model.logits)
    steps.warm_up()
    return steps


def begin(steps: CapturedSteps, requests: int) -> tuple[Tensor, Tensor, Tensor]:
    """Load the first step of requests without a prompt."""
    positions, rows = torch.zeros(requests, dtype=torch.int64, device=CUDA), torch.arange(requests, device=CUDA)
    inputs = token_ids()[:requests].to(CUDA), positions, rows
    steps.load(*inputs)
    return inputs


@pytest.mark.parametrize("requests", [2, 3, 5])
def test_replays_are_eager_steps_bit_by_bit(case: Case, requests: int) -> None:
    """At equal sizes libraries choose equal GEMMs."""
    steps, caches = captured_of(case), case.caches()
    inputs = begin(steps, requests)
    for position in range(40):
        with torch.no_grad():
            want = case.model(*inputs, caches)
        got, likeliest = steps.step()
        assert got.isfinite().all()
        assert_bitwise(got, want)
        inputs = likeliest.clone(), torch.full_like(inputs[1], position + 1), inputs[2]
    for got, want in zip(steps.caches.tensors(), caches.tensors(), strict=True):
        assert_bitwise(got, want)


def test_a_padded_step_is_close_to_eagers(case: Case) -> None:
    """One request in a graph of two rows."""
    steps, caches = captured_of(case), case.caches()
    inputs = begin(steps, 1)
    for position in range(24):
        with torch.no_grad():
            want = case.model(*inputs, caches)
        got, likeliest = steps.step()
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[case.model.dtype])
        inputs = likeliest.clone(), torch.full_like(inputs[1], position + 1), inputs[2]


@pytest.mark.parametrize("changes", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "top_k": 5}])
def test_generated_tokens_are_eagers(case: Case, changes: dict[str, Any]) -> None:
    """Eager prompts; steps of three requests are bitwise equal, so samples are."""
    options: dict[str, Any] = {"max_new_tokens": 20, "stop": []} | changes
    greedy = generate(case.model, prompts(), **options, caches=case.caches())
    steps = compile(case.model, caches=case.caches(), backend=None, buckets=[2, 3, 5])
    for stop in ([], [greedy[0][4], greedy[1][9]]):
        want = generate(case.model, prompts(), **options | {"stop": stop}, caches=case.caches())
        assert generate(case.model, prompts(), **options | {"stop": stop}, forward=steps) == want
    assert steps.captured is not None and steps.captured.statistics.captures == 3


def test_a_compiled_step_is_captured() -> None:
    """By backend="dsv4", with logits close to eager's; four layers, one of each kind."""
    case = Case(tiny_model(**KINDS).to(CUDA), FORMATS["bytes"])
    steps, caches = compile(case.model, caches=case.caches(), buckets=[3, 5]), case.caches()
    assert steps.captured is not None and steps.captured.statistics.captures == 2
    inputs = begin(steps.captured, 3)
    for position in range(30):
        with torch.no_grad():
            want = case.model(*inputs, caches)
        got, likeliest = steps.captured.step()
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[torch.float32])
        inputs = likeliest.clone(), torch.full_like(inputs[1], position + 1), inputs[2]
    tokens = generate(case.model, prompts(), max_new_tokens=8, stop=[], forward=steps)
    assert [len(new) for new in tokens] == [8, 8, 8]
    assert generate(case.model, prompts(), max_new_tokens=8, stop=[], forward=steps) == tokens


@pytest.mark.parametrize("backend", [None, "dsv4"])
def test_prompts_are_captured_with_eagers_tokens(backend: str | None) -> None:
    """In steps before, on and inside a tail, of several buckets and modes; a replay allocates nothing."""
    case = Case(tiny_model(**KINDS).to(CUDA), FORMATS["plain"])
    ids = torch.cat([token_ids(), token_ids()])
    long, short = ids[:57], ids[3:12]
    steps = compile(case.model, caches=case.caches(max_step_tokens=16), backend=backend, prompt_buckets=[8, 24, 32])
    assert steps.statistics.captures == 6 + 4
    print(f"\n{backend}: captures of {steps.statistics.capture_bytes / 2**20:.1f} MiB")
    for mode in ("tail", "full", "replay"):
        for some in ([long], [long, short], [short, long, ids[:1]]):
            caches, before = case.caches(max_step_tokens=16), steps.statistics.replays
            options: dict[str, Any] = {"chunk": 16, "mode": mode}
            want = prefill(case.model, some, caches, **options)
            reserved = torch.cuda.memory_stats()["reserved_bytes.all.current"]
            got = prefill(case.model, some, steps.caches, forward=steps, **options)
            assert torch.cuda.memory_stats()["reserved_bytes.all.current"] <= reserved + (2 << 20)
            assert steps.statistics.replays == before + max(-(-len(prompt) // 16) for prompt in some)
            torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[torch.float32])
            options |= {"max_new_tokens": 12, "stop": []}
            tokens = generate(case.model, some, caches=case.caches(max_step_tokens=16), **options)
            assert generate(case.model, some, forward=steps, **options) == tokens


def test_requests_of_a_batch_get_tokens_of_their_prompts(case: Case) -> None:
    """Decode steps are captured; batches of other sizes sum in other orders, so a batch is compared with itself."""
    answers = []
    for _ in range(2):
        batch = hf.RunningBatch(case.model, slots=3, max_seq_len=128, prefill_chunk=16)
        requests = [batch.submit(prompt, max_new_tokens=12, stop_tokens=[]) for prompt in (*prompts(), [3], [4, 5])]
        requests.append(batch.submit([6, 7, 8], max_new_tokens=12, stop_tokens=[], temperature=1.0, seed=4))
        batch.run()
        assert batch.statistics.captures >= 2 and batch.statistics.replays > 10
        answers.append([request.tokens for request in requests])
    assert answers[0] == answers[1] and [len(tokens) for tokens in answers[0]] == [12] * 6


@pytest.fixture(scope="module")
def warm(case: Case) -> Iterator[CapturedSteps]:
    yield captured_of(case, case.caches(max_seq_len=1024))


def test_a_step_allocates_nothing_copies_nothing_and_waits_for_nothing(warm: CapturedSteps) -> None:
    inputs = begin(warm, 5)
    warm.run(2)
    torch.cuda.synchronize()
    before, held = torch.cuda.memory_stats(), warm.graphs.memory()
    torch.cuda.set_sync_debug_mode("error")
    try:
        warm.load(*inputs)
        for _ in range(10):
            warm.run(20)
        warm.stop(3)
        warm.run(5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()
    for name in ("reserved_bytes.all.current", "num_alloc_retries"):
        assert after[name] == before[name], name
    assert warm.graphs.memory() == held
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        warm.step()
        torch.cuda.synchronize()
    events = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    assert len(events) > 1
    assert [name for name in events if "HtoD" in name or "DtoH" in name] == []


def test_times(warm: CapturedSteps, record_property: Callable[..., None]) -> None:
    """A replay is faster than the launches of eager's ops; prints both."""
    inputs = begin(warm, 5)

    def seconds(call: Callable[[], Any], count: int) -> float:
        call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    with torch.no_grad():
        eager = seconds(lambda: warm.model(*inputs, warm.caches), 3)
    replay = seconds(warm.step, 100)
    record_property("us", 1e6 * replay)
    stored = warm.caches.cache_format.entries
    print(f"\n{warm.model.dtype}, {stored}: a step {1e6 * replay:.0f} us, eager {1e6 * eager:.0f} us")
    assert replay < eager


def test_tensors_that_moved_are_named() -> None:
    case = Case(tiny_model(**KINDS).to(CUDA), FORMATS["plain"])
    steps = captured_of(case)
    case.model.to(torch.float64)
    with pytest.raises(GraphError, match="E421"):
        begin(steps, 2)


def test_a_step_that_reads_the_device_is_refused_and_leaves_the_device_usable() -> None:
    case = Case(tiny_model(**KINDS).to(CUDA), FORMATS["plain"])

    def reads(ids: Tensor, *step: Any, **options: Any) -> Tensor:
        return case.model.logits(ids, *step, **options) * int(ids.max() >= -1)

    with pytest.raises(GraphError, match="E422"):
        CapturedSteps(case.model, case.caches(), reads).warm_up()
    torch.cuda.synchronize()
    assert captured_of(case).sealed
