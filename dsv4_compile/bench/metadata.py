"""Scenario `metadata`: the metadata of a step for all cache groups of a model with all three kinds of layer.

`batch_metadata` fills every buffer of a decode step of `tokens` tokens, `query` of each request, or, as the last size,
of a prompt of 8192 tokens; `advance` moves the batch to its next step. Requests have random lengths and pages.
`max_len` fixes the width of the rows of ratio 128, which are written to their ends. Stock torch.compile, which
recompiles for every size, runs at one size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from .. import layout
from ..metadata import BlockTables, MetadataBuffers
from ..metadata.fill import arguments_of
from ..ops.common.define import REFERENCES
from ..ops.common.kernels import launcher
from ..ops.metadata.batch_metadata import ARGUMENTS, WRITTEN
from ..selection import costs
from .problem import Args, Only, Prepare, Problem, compiled, keep, on_gpu

COLUMNS = ("op", "query", "max_len", "tokens", "impl")
SIZES = {
    "cuda": ((1, 1), (8, 1), (32, 1), (128, 1), (512, 1), (32, 4), (128, 4), (1, 8192)),
    "cpu": ((1, 1), (8, 4)),
}
STOCK = (32, 1)
MAX_LENS = {"cuda": (16_384, 131_072, 1_048_576), "cpu": (16_384,)}
OUTPUTS = tuple(ARGUMENTS.index(name) for name in WRITTEN)


def buffers(requests: int, query: int, max_len: int, device: torch.device, seed: int) -> MetadataBuffers:
    """Return the buffers of one step, loaded."""
    generator = torch.Generator().manual_seed(seed)
    loaded = MetadataBuffers(
        max_num_batched_tokens=requests * query, max_num_seqs=requests, max_model_len=max_len, device=device
    )

    on_device = torch.Generator(device).manual_seed(seed)

    def pages(group: str) -> torch.Tensor:
        shape = requests, loaded.plan.sizes[f"{group}_blocks"]
        return torch.randint(math.prod(shape), shape, generator=on_device, device=device, dtype=torch.int32)

    lens = torch.randint(min(query, max_len), max_len + 1, (requests,), generator=generator)
    tables = BlockTables.of({group: pages(group) for group in loaded.groups})
    loaded.load(torch.arange(requests + 1) * query, lens, block_tables=tables)
    return loaded


def metadata_args(own: MetadataBuffers) -> Args:
    """Return the arguments of `batch_metadata`."""
    tables = {group: own.tensors[f"{group.name}_block_table"] for group in own.plan.groups}
    batch = own.tensors["query_start_loc"], own.tensors["seq_lens"], None
    return arguments_of(*batch, tables, [*own.block_tables.sources], own.tensors)


def advance_args(own: MetadataBuffers, query: int, seed: int) -> Args:
    """Return the arguments of `advance`; every request keeps some of its tokens."""
    device, requests = own.tensors["seq_lens"].device, own.max_num_seqs
    generator = torch.Generator().manual_seed(seed)
    num_new = torch.randint(1, query + 1, (requests,), generator=generator).int().to(device)
    chosen = torch.randint(1, 9999, (requests, query), generator=generator).to(device)
    state = (own.tensors[name] for name in ("query_start_loc", "seq_lens", "input_ids", "overflow"))
    return (num_new, chosen, chosen[:, 1:] if query > 1 else None, own.tensors["reserved"], query, *state)


def _ways(op: str, args: Callable[[], Args], stock: bool) -> dict[str, Prepare]:
    ways: dict[str, Prepare] = {"eager": lambda: REFERENCES[op], "triton": lambda: on_gpu(launcher(op))}
    if stock:
        ways["inductor"] = lambda: compiled(REFERENCES[op], "inductor", args, ())
    return ways


def problems(
    device: torch.device,
    only: Only,
    sizes: tuple[tuple[int, int], ...] | None = None,
    max_lens: tuple[int, ...] | None = None,
) -> Iterator[Problem]:
    """Yield both ops at every size; `advance` depends neither on `max_len` nor on prompts."""
    lens = max_lens or MAX_LENS[device.type]
    for max_len in lens:
        for requests, query in sizes or SIZES[device.type]:
            params: dict[str, int | str] = {"query": query, "max_len": max_len, "tokens": requests * query}
            decode = query <= layout.WINDOW_BLOCK
            for op in ("batch_metadata", *(("advance",) if decode and max_len == lens[0] else ())):
                if not keep(only, op=op, **params):
                    continue

                def make(seed: int, of: tuple[Any, ...] = (requests, query, max_len), op: str = op) -> Args:
                    loaded = buffers(of[0], of[1], of[2], device, seed)
                    return metadata_args(loaded) if op == "batch_metadata" else advance_args(loaded, of[1], seed)

                width = layout.c128a_width(max_len)
                moved = {"T": requests * query, "W": layout.SLIDING_WINDOW, "K": width}
                yield Problem(
                    op=op,
                    params=params,
                    make=make,
                    written=OUTPUTS if op == "batch_metadata" else (5, 6, 7, 8),
                    cost=costs.of(op, **(moved if op == "batch_metadata" else {"R": requests})),
                    reference=REFERENCES[op],
                    implementations=_ways(op, partial(make, 0), (requests, query) == STOCK and max_len == lens[0]),
                    published={},
                    cold=False,
                )
