"""One graph without a break for steps of any size: prompts, decode steps, and the tail of a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.models.v41 import V41Caches, V41Format, V41Model, generate, prefill
from dsv4_compile.models.v41.tiny import tiny_model
from tests.models.v41.worked import token_ids

KINDS: dict[str, Any] = {
    "num_layers": 4,
    "compress_ratios": (0, 2, 1, 1),
    "kv_sources": (1, 2),
    "index_sources": (1, 2, 3),
    "candidate_source": 2,
    "engram_layers": (1,),
    "engram_rows": (434,),
}
"""Window only, ratio 2 with an engram, the source of candidates, and a layer that selects in them."""


@pytest.fixture(scope="module")
def model() -> V41Model:
    return tiny_model(**KINDS)


@pytest.fixture(autouse=True)
def without_recompiling() -> Iterator[None]:
    """Inductor calls PyTorch in place of C++ that it would compile; a recompile is an error."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(fallback_by_default=True), torch._dynamo.config.patch(error_on_recompile=True):
        yield


def caches_of(model: V41Model) -> V41Caches:
    return model.new_caches(max_batch_size=2, max_seq_len=64, cache_format=V41Format.plain(grids=True))


@torch.no_grad()
def step(run: Any, caches: V41Caches, first: int, last: int) -> Tensor:
    """Logits of positions `first` to `last` of two requests."""
    positions = [*range(first, last)] * 2
    requests = [request for request in range(2) for _ in range(first, last)]
    ids = torch.cat([row[first:last] for row in token_ids(80).view(2, 40)])
    # Not views: a graph is specialised on the sizes of their bases.
    return run(ids, torch.tensor(positions), torch.tensor(requests), caches)


@pytest.mark.parametrize("dynamic", [True, None])
def test_one_graph_runs_prompts_and_decode_steps(model: V41Model, dynamic: bool | None) -> None:
    """Also with dynamic=True, which makes symbols of sizes that are not constants of modules."""
    compiled = torch.compile(model, backend="dsv4" if dynamic else "eager", fullgraph=True, dynamic=dynamic)
    got, want = caches_of(model), caches_of(model)
    sizes = (20, 27, 28, 29, 35) if dynamic else (20, 20 + 20)
    start = 0
    for end in sizes:
        torch.testing.assert_close(step(compiled, got, start, end), step(model, want, start, end), rtol=0, atol=1e-4)
        start = end
    for a, b in zip(got.tensors(), want.tensors(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_a_compiled_tail_of_a_prompt_is_the_eager_one(model: V41Model) -> None:
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    prompts, options = [token_ids(40), token_ids(33).flip(0)], {"max_new_tokens": 4, "stop": []}
    want = prefill(model, prompts, caches_of(model), chunk=20)
    got = prefill(model, prompts, caches_of(model), chunk=20, forward=compiled)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    tokens = generate(model, prompts, **options, caches=caches_of(model))
    assert generate(model, prompts, **options, caches=caches_of(model), forward=compiled, decode=model) == tokens
