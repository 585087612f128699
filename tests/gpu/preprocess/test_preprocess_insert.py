"""The fused preprocessing kernel on a GPU against the reference on the same GPU, at sizes that models have."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.bench import gate, steps
from dsv4_compile.bench import preprocess_insert as scenario
from dsv4_compile.config import DeepseekV4Config
from dsv4_compile.kernels.preprocess import preprocess_insert as kernel
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.testing import Tolerance, assert_bitwise, assert_cached, assert_close
from dsv4_compile.testing import samples as samples  # registers the ops
from dsv4_compile.testing.generate import to_device
from tests.gpu.far import behind_2_31_bytes, moved
from tests.ops.preprocess.preprocess_layer import CACHES, PADDING, WINDOW_BLOCK, Layer

REFERENCE, LAUNCHER = REFERENCES["preprocess_insert"], launcher("preprocess_insert")
REQUESTS, MAX_LEN = 5, 1024
FLASH: dict[str, Any] = {"dim": 512, "rope_dim": 64, "key_dim": 128, "dtype": torch.bfloat16, "latent": 1024}
ROUNDED: dict[str, Any] = {"dtype": torch.float32, "rounded": torch.bfloat16}
"""Float32 weights, as those of transformers' norms, and a projection that is rounded."""
KINDS: dict[str, dict[str, Any]] = {
    "swa": {**FLASH, "ratio": 0, "fmt": "fp8_ds_mla"},
    "hca": {**FLASH, "ratio": 128, "fmt": "fp8_ds_mla", "latent": 1536},
    "csa": {**FLASH, "ratio": 4, "fmt": "fp8_ds_mla", "key_fmt": "indexer_fp8"},
    "csa mxfp4": {**FLASH, "ratio": 4, "fmt": "fp8_ds_mla", "key_fmt": "indexer_mxfp4", "hadamard": True},
    "csa rounded": {**FLASH, "ratio": 4, "fmt": "fp8_ds_mla", "key_fmt": "indexer_fp8", **ROUNDED},
    "csa plain": {**FLASH, "ratio": 4, "latent": 1536},
    "hca fp8": {**FLASH, "ratio": 128, "fmt": "fp8", "kv_scale": torch.tensor([0.03])},
}
KIND = pytest.mark.parametrize("kind", KINDS)
NEIGHBOURS = Tolerance(abs=1e-5, rel=1.01 / 128, cosine=1e-6)
"""One step of bfloat16."""


class Step:
    """Chunks of several requests, from anywhere in a group, over caches with all older states."""

    def __init__(self, kind: str, tokens: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        rng = random.Random(seed)
        self.model = Layer(**KINDS[kind], requests=REQUESTS, max_len=MAX_LEN)
        for engine in (self.model.main, self.model.keys):
            if engine is not None:
                engine.state.normal_()
        rows, share = [], layout.cdiv(tokens, REQUESTS)
        for request in rng.sample(range(REQUESTS), REQUESTS):
            count = max(1, share - 1)
            end = rng.randrange(count, MAX_LEN)
            # Half of the chunks end where a group does.
            end = layout.align_up(end, layout.HCA_RATIO) if request % 2 else end
            rows += [(request, p) for p in range(end - count, end)] + [PADDING]
        self.tokens = rows[:tokens]
        arguments = self.model.arguments(self.tokens, self.model.projection(tokens))
        self.arguments = {n: to_device(x, "cuda") if isinstance(x, Tensor) else x for n, x in arguments.items()}

    def run(self, implementation: Any, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The result, and the caches that it wrote, which are copies."""
        copies = {
            name: storage_of(self.arguments[name])
            .clone()
            .view(x.dtype)
            .as_strided(x.shape, x.stride(), x.storage_offset())
            for name in CACHES
            if (x := self.arguments.get(name)) is not None
        }
        return implementation(**{**self.arguments, **copies}, **options), copies


def storage_of(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(x.untyped_storage())


def assert_agree(step: Step, **options: Any) -> None:
    """States are equal, latents neighbours at most, and caches equal but for ties."""
    (ours, mine), (want, theirs) = step.run(LAUNCHER, **options), step.run(REFERENCE)
    assert_close(ours, want, NEIGHBOURS)
    for name, cache in theirs.items():
        got, expected = storage_of(mine[name]), storage_of(cache)
        fmt = step.arguments["indexer_cache_format" if name == "indexer_cache" else "cache_format"]
        if "state" in name:
            assert_bitwise(got, expected, label=name)
        elif fmt == "plain":
            assert_close(got.view(cache.dtype), expected.view(cache.dtype), NEIGHBOURS, label=name)
        else:
            block = WINDOW_BLOCK if name == "window_cache" else layout.storage_block_size(step.model.ratio)
            transformed = name == "indexer_cache" and step.arguments["hadamard"]
            pooled = 1 if name == "window_cache" else step.model.ratio
            ties = assert_cached(mine[name], cache, fmt, block, transformed=transformed, pooled=pooled, label=name)
            assert (got != expected).sum() <= 2 * ties, name


@KIND
@pytest.mark.parametrize("tokens", [1, 2, 7, 130, 1023, 1025, 5000])
def test_a_step_is_the_reference(kind: str, tokens: int) -> None:
    assert_agree(Step(kind, tokens))


SAVES = [{"tokens": 8, "warps": 8}, {"tokens": 16}, {"splits": 1}, {"tokens": 2, "splits": 2}]
POOLS = [{"pooled": 4}, {"pooled": 64}, {"registers": 255}]
SHARED = [{"pooled": 1}, {"parts": 8}, {"parts": 32}]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [*(("swa", x) for x in SAVES), *(("csa", x) for x in SAVES + POOLS), *(("hca", x) for x in SAVES + POOLS + SHARED)],
    ids=str,
)
def test_every_tiling(kind: str, changes: dict[str, int]) -> None:
    step = Step(kind, 400)
    tiling = kernel.tiling_of(400, step.model.ratio, 512)
    assert_agree(step, tiling=tiling._replace(**changes))


@KIND
def test_results_do_not_depend_on_the_rest_of_the_step(kind: str) -> None:
    """The first tokens of a long step, in the order and the launch of a long one, give what they give alone."""
    step, few = Step(kind, 2500), 300
    out, caches = step.run(LAUNCHER)
    alone = dict(step.arguments)
    for name, x in alone.items():
        if isinstance(x, Tensor) and len(x) == 2500 and name not in CACHES:
            step.arguments[name] = x[:few]
    got, mine = step.run(LAUNCHER)
    assert_bitwise(got, out[:few])
    for name in ("window_cache", "compressed_cache", "indexer_cache"):
        if name in mine:
            written = storage_of(mine[name]) != storage_of(alone[name])
            assert torch.equal(storage_of(mine[name])[written], storage_of(caches[name])[written]), name


@pytest.mark.parametrize("kind", ["swa", "hca", "csa"])
def test_a_captured_launch_follows_its_inputs(kind: str) -> None:
    step = Step(kind, 40)
    LAUNCHER(**step.arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = LAUNCHER(**step.arguments)
    for seed in (5, 6):
        fresh = Step(kind, 40, seed)
        want, caches = fresh.run(LAUNCHER)
        for name, x in fresh.arguments.items():
            if isinstance(x, Tensor):
                target = step.arguments[name]
                (storage_of(target) if name in CACHES else target).copy_(storage_of(x) if name in CACHES else x)
        graph.replay()
        assert_bitwise(out, want)
        for name, cache in caches.items():
            assert_bitwise(storage_of(step.arguments[name]), storage_of(cache), label=name)


@pytest.mark.parametrize("kind", ["hca", "csa"])
def test_a_hundred_runs_are_equal_bit_for_bit(kind: str) -> None:
    """A pool that read words while a second program writes them, or partial sums too early, would differ at times."""
    step = Step(kind, 3000)
    want, caches = step.run(LAUNCHER)
    for _ in range(100):
        got, mine = step.run(LAUNCHER)
        assert torch.equal(got, want)
        assert all(torch.equal(storage_of(mine[name]), storage_of(cache)) for name, cache in caches.items())


def far_away(kind: str, tokens: int, context: int) -> list[Any]:
    """The arguments of a step of the benchmark, with caches of more than 2^31 bytes each."""
    step = steps.StepInputs(DeepseekV4Config.flash(), tokens, context, torch.device("cuda"), 0)
    ratio = scenario.KINDS[kind]
    args = list(scenario.build(step, ratio))
    caches = [(9, 10, args[11])]
    for first in (12, 21)[: len(scenario.WRITTEN[kind]) // 2]:
        state, slots, table, cache, entry_slots = range(first + 3, first + 8)
        args[state], added = behind_2_31_bytes(args[state])
        args[slots] = args[slots] + added * layout.state_block_size(ratio)
        args[table] = moved(args[table], added)
        caches.append((cache, entry_slots, layout.storage_block_size(ratio)))
    for cache, slots, block in caches:
        args[cache], added = behind_2_31_bytes(args[cache])
        args[slots] = moved(args[slots], added * block)
    return args


@pytest.mark.parametrize("kind", scenario.KINDS)
def test_70_000_tokens_over_caches_of_more_than_2_31_bytes(kind: str) -> None:
    written = scenario.WRITTEN[kind]
    want = gate.outputs(REFERENCE, far_away(kind, 70_000, 80_000), written)
    got = gate.outputs(LAUNCHER, far_away(kind, 70_000, 80_000), written)
    assert all(x.nbytes > 2**31 for x in got[1:])
    assert scenario.differs(got, want) == ""


def test_a_step_of_nothing_changes_nothing() -> None:
    args = list(scenario.build(steps.StepInputs(DeepseekV4Config.flash(), 4, 1024, torch.device("cuda"), 0), 0))
    before = args[9].clone()
    for i in (0, 1, 10):
        args[i] = args[i][:0]
    assert LAUNCHER(*args).shape == args[0].shape
    assert torch.equal(args[9], before)
