"""The kernel that fills a step's metadata on a GPU against the reference on the same GPU, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.metadata import BlockTables, MetadataBuffers
from dsv4_compile.metadata.fill import arguments_of
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.testing import samples  # noqa: F401  (importing the package registers the ops)

REFERENCE = REFERENCES["batch_metadata"]


class Buffers(MetadataBuffers):
    """Buffers on the GPU; `fill` runs a kernel or the reference."""

    def poison(self) -> list[str]:
        """Garbage in all that is to be written; its names."""
        names = [spec.name for spec in self.plan.specs if spec.filled_by == "refresh"]
        for name in names:
            self.tensors[name].fill_(True if self.tensors[name].dtype is torch.bool else 12345)
        return names

    def call(self, run: Any, rows: int) -> None:
        """One launch, as a capture sees it."""
        batch = (self.tensors.get(name) for name in ("query_start_loc", "seq_lens", "slot_mapping"))
        tables = {group: self.tensors[f"{group.name}_block_table"] for group in self.plan.groups}
        run(*arguments_of(*batch, tables, [*self.block_tables.sources], self.tensors, rows))

    def fill(self, run: Any, rows: int) -> dict[str, Tensor]:
        """What a call makes of garbage."""
        names = self.poison()
        self.call(run, rows)
        return {name: self.tensors[name].clone() for name in names}


def buffers(tokens: int, requests: int, max_len: int, **options: Any) -> Buffers:
    return Buffers(
        max_num_batched_tokens=tokens, max_num_seqs=requests, max_model_len=max_len, device="cuda", **options
    )


def random_batch(own: Buffers, queries: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.tensor([0, *queries]).cumsum(0)
    context = torch.randint(0, own.max_model_len - max(queries), (len(queries),), generator=generator)
    lens = torch.where(torch.tensor(queries) > 0, context + torch.tensor(queries), 0)

    def table(group: str) -> Tensor:
        columns = own.plan.sizes[f"{group}_blocks"]
        pages = torch.randint(-1, 2**24, (len(queries), columns), generator=generator)
        return pages.int().cuda()

    own.load(starts, lens, block_tables=BlockTables.of({group: table(group) for group in own.groups}))


def assert_equal(own: Buffers, rows: int) -> None:
    ours, theirs = own.fill(launcher("batch_metadata"), rows), own.fill(REFERENCE, rows)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("query", [1, 4])
@pytest.mark.parametrize("requests", [1, 2, 7, 128, 512])
def test_decodes(requests: int, query: int) -> None:
    batch = buffers(requests * query + 3, requests + 2, 16_384)
    for seed in range(3):
        random_batch(batch, [query] * requests, seed)
        assert_equal(batch, requests * query + 3)
        assert_equal(batch, requests * query)


def test_a_mixed_batch_of_sequences_of_a_million_tokens() -> None:
    batch = buffers(1600, 100, 2**20)
    assert batch.tensors["entries_128_indices"].shape[1] == layout.c128a_width(2**20) == 8192
    random_batch(batch, [1] * 60 + [3] * 20 + [0] * 5 + [700, 600], 0)
    assert_equal(batch, 1600)


def test_three_thousand_requests() -> None:
    batch = buffers(4000, 3100, 4096)
    random_batch(batch, [1] * 3000, 0)
    assert_equal(batch, 4000)


def test_prefill_of_eight_thousand_tokens() -> None:
    batch = buffers(8192, 8, 131_072)
    random_batch(batch, [1, 1, 8000], 0)
    assert_equal(batch, 8192)


@pytest.mark.parametrize("ratios", [(1,), (4,), (128,)])
def test_models_of_one_ratio(ratios: tuple[int, ...]) -> None:
    batch = buffers(70, 64, 16_384, ratios=ratios)
    random_batch(batch, [1] * 64, 0)
    assert_equal(batch, 70)


def test_a_captured_launch_follows_lengths_and_tables() -> None:
    batch = buffers(130, 128, 16_384)
    random_batch(batch, [1] * 128, 0)
    batch.fill(launcher("batch_metadata"), 130)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.call(launcher("batch_metadata"), 130)
    for seed, requests in enumerate((128, 3, 77, 0, 128)):
        random_batch(batch, [1] * requests or [0], seed + 1)
        theirs = batch.fill(REFERENCE, 130)
        batch.poison()
        graph.replay()
        for name, tensor in theirs.items():
            assert torch.equal(batch.tensors[name], tensor), (name, requests)
