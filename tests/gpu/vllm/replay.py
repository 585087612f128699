"""Compare every replay of a CUDA graph with the compiled step that was captured, on the same caches, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Replays:
    """Counts, over steps, of rows and bytes that differ between replays and compiled steps.

    rows: of tokens. padded: rows that were no tokens. other_rows: rows of tokens with other output bits than the
    compiled step. other_caches: steps that left any byte of any cache different. strays: blocks that were written and
    belong to no request of the step; vLLM's block 0, where padding points, belongs to none. writes: blocks that were
    written.
    """

    steps: int = 0
    rows: int = 0
    padded: int = 0
    other_rows: int = 0
    other_caches: int = 0
    writes: int = 0
    strays: int = 0
    sizes: set[int] = field(default_factory=set)

    def compare(self, step: Any, memory: list[Tensor], blocks: Tensor, live: int) -> Tensor:
        """Run `step(graph)` with and without its graph from the same caches `memory`, `[P, bytes]` each.

        blocks: numbers of the blocks of all requests. live: rows that are tokens. Returns the replay's rows.
        """
        before = [cache.clone() for cache in memory]
        got = step(True).clone()
        after = [cache.clone() for cache in memory]
        for cache, saved in zip(memory, before, strict=True):
            cache.copy_(saved)
        want = step(False)
        written = torch.stack([(a != b).any(1) for a, b in zip(after, before, strict=True)]).any(0).nonzero()[:, 0]
        self.steps += 1
        self.rows += live
        self.padded += got.shape[0] - live
        self.other_rows += int((got[:live].view(torch.int16) != want[:live].view(torch.int16)).any(1).sum())
        self.other_caches += int(any(not torch.equal(a, b) for a, b in zip(after, memory, strict=True)))
        self.writes += written.numel()
        self.strays += int((~torch.isin(written, blocks[blocks > 0])).sum())
        self.sizes.add(got.shape[0])
        return got


def memory_of(model: Any) -> list[Tensor]:
    """Return the storages of all caches, as `[P, bytes of a block]`."""
    views = [owner.kv_cache for attention in model.attention.values() for owner in attention.owners]
    storages = {view.untyped_storage().data_ptr(): (view.untyped_storage(), view.shape[0]) for view in views}
    return [torch.empty(0, dtype=torch.uint8, device=views[0].device).set_(s).view(p, -1) for s, p in storages.values()]


@contextmanager
def replays(runner: Any, model: Any) -> Iterator[Replays]:
    """Compare every replay of a model runner; steps without a graph run as they are."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context

    counts, plain, memory, buffers = Replays(), runner._model_forward, memory_of(model), model.step_buffers

    def forward(**kwargs: Any) -> Any:
        context = get_forward_context()
        mode = context.cudagraph_runtime_mode
        if mode != CUDAGraphMode.FULL:
            return plain(**kwargs)

        def step(graph: bool) -> Tensor:
            context.cudagraph_runtime_mode = mode if graph else CUDAGraphMode.NONE
            rows: Tensor = plain(**kwargs)
            context.cudagraph_runtime_mode = mode
            return rows

        requests = runner.input_batch.num_reqs
        numbers = {n for attention in model.attention.values() for n in attention.tables().values()}
        blocks = torch.cat([buffers.table(n)[:requests].flatten() for n in sorted(numbers)])
        return counts.compare(step, memory, blocks, int(buffers.query_start_loc[requests]))

    runner._model_forward = forward
    try:
        yield counts
    finally:
        runner._model_forward = plain
