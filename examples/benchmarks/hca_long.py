"""Check and time HCA attention of long contexts at decode: python examples/benchmarks/hca_long.py --out FOLDER

A token attends its window and all HCA entries of its request, 8,192 at a million tokens, in pages of two that lie in
any order. Compared are plans of the decode kernels for sm_90: the kernel and its tiling, into how many splits a row
goes, and how these are combined. Every plan is checked against the reference within the tolerances of attention, and a
second run bit by bit. Times are cold: CUDA graphs of as many argument sets in turn as exceed the L2 cache, with the
floor of bytes and GEMMs and, if it is installed, FlashMLA; and kernel by kernel under the profiler.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.bench import flash_mla, timing
from dsv4_compile.bench import sparse_mla_decode as scenario
from dsv4_compile.bench.nodes import kernels_us
from dsv4_compile.bench.record import environment, write_json
from dsv4_compile.kernels.attention import sparse_mla_decode_sm90 as many
from dsv4_compile.kernels.attention import sparse_mla_decode_sm90_few_tokens as few
from dsv4_compile.kernels.attention.common import decode_call
from dsv4_compile.kernels.attention.sparse_mla_decode import launch_best
from dsv4_compile.kernels.attention.split_combine import CHUNK
from dsv4_compile.kernels.host.gpu import gpu_of
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.reference.attention.sparse_mla_decode import DecodeArguments
from dsv4_compile.selection import costs

HEADS, BLOCK = 64, layout.storage_block_size(layout.HCA_RATIO)
SIZES = {
    f"{entries} x {batch}": (batch, entries)
    for batch, entries in ((8, 8192), (1, 8192), (8, 1024), (1, 1024), (32, 8192), (4, 8192), (32, 1024))
}
"""Requests, and entries of each."""
H200_SMS = 132
Arguments = tuple[Any, ...]


class Plan(NamedTuple):
    """A way to run a call.

    Attributes:
        block_h, block_n, warps: tiling of the kernel for few tokens; without them the kernel for many tokens runs.
        splits: of a row; 0 leaves all to the launcher.
        wide: warps of the kernel that combines all splits at once, 0 for the one that combines 16 at a time.
    """

    block_h: int = 0
    block_n: int = 0
    warps: int = 8
    splits: int = 0
    wide: int = 0

    def __str__(self) -> str:
        if self == Plan():
            return "launcher"
        tile = f"{self.block_h} x {self.block_n}, {self.warps} warps" if self.block_h else "many"
        return f"{tile}, {self.splits} splits" + (f", combined by {self.wide} warps" if self.wide else "")


def plans(batch: int, entries: int) -> list[Plan]:
    """Return the plans that a size is timed with, today's first."""
    blocks, halves = (scenario.WINDOW // n + layout.cdiv(entries, n) for n in (128, 64))
    room = max(1, H200_SMS // batch)
    near = layout.cdiv(halves, layout.cdiv(halves, room))
    if batch == 1:
        tile = Plan(16, 64, 8, halves) if entries <= 1024 else Plan(32, 128, 8, blocks)
        tiles = [tile._replace(wide=wide) for wide in (0, 8)]
        tiles += [Plan(block_h, 128, 8, blocks) for block_h in (16, 32) if entries <= 1024]
    else:
        tiles = [Plan(splits=near, wide=wide) for wide in ((0, 8) if near > CHUNK else (4, 8))]
        tiles += [Plan(64, 128, 8, layout.cdiv(blocks, layout.cdiv(blocks, room)))]
        if batch == 8:
            tiles += [Plan(32, 64, 8, layout.cdiv(near, 2)), Plan(64, 64, 16, near), Plan(splits=layout.cdiv(near, 2))]
        if batch == 8 and entries <= 1024:
            tiles += [Plan(32, 128, 8, blocks), Plan(64, 128, 8, blocks)]
    return [Plan(), *dict.fromkeys(tiles)]


def run(plan: Plan, *args: Any) -> tuple[Tensor, Tensor]:
    """Run attention by a plan."""
    call, gpu = decode_call(DecodeArguments(*args)), gpu_of(args[0].device)
    if plan == Plan():
        return launch_best(call)
    with mock.patch.object(many, "warps_at_once", lambda _: plan.wide):
        if not plan.block_h:
            return many.launch(call, gpu, plan.splits)
        blocks = sum(layout.cdiv(keys.indices.shape[1], plan.block_n) for keys in call.caches)
        tiling = few.Tiling(*plan[:3], late=True, one_block=plan.splits >= blocks)
        return few.launch(call, gpu, plan.splits, tiling=tiling)


def arguments(batch: int, entries: int, seed: int, device: torch.device) -> Arguments:
    """Return the arguments of `sparse_mla_decode` for a token of each request, with full rows."""
    generator = torch.Generator(device).manual_seed(seed)

    def row(block: int, width: int) -> tuple[Tensor, Tensor, Tensor, int]:
        cache = scenario.random_cache(batch * width, generator, block)
        pages = torch.randperm(len(cache), device=device, generator=generator).view(batch, -1, 1)
        slots = (pages * block + torch.arange(block, device=device)).flatten(1).int()
        return cache, slots, torch.full((batch,), width, device=device, dtype=torch.int32), block

    q = torch.randn(batch, HEADS, layout.HEAD_DIM, device=device, generator=generator).bfloat16()
    sink = torch.randn(HEADS, device=device, generator=generator)
    window = row(scenario.BLOCK, scenario.WINDOW)
    return q, *window, scenario.CACHE, layout.HEAD_DIM**-0.5, sink, *row(BLOCK, entries)


def differs(plan: Plan, args: Arguments) -> str:
    """Compare a plan with the reference, and two of its runs bit by bit; return what is wrong, "" for nothing."""
    got, again = run(plan, *args), run(plan, *args)
    wrong = scenario.differs(got, REFERENCES[scenario.OP](*args))
    return wrong or ("" if all(map(torch.equal, got, again)) else "its runs differ")


def rows(sizes: Sequence[str], device: torch.device, until: float) -> Iterator[dict[str, Any]]:
    """Check and time every plan of every size that there is time for before `until`."""
    for size in sizes:
        batch, entries = SIZES[size]
        if time.monotonic() > until:
            print(f"no time left for {size}")
            continue
        keys = scenario.WINDOW + entries
        cost = costs.of(scenario.OP, T=batch, H=HEADS, D=layout.HEAD_DIM, K=keys, row=costs.row_bytes(scenario.CACHE))
        floor = costs.floor_us(cost, costs.H200)
        traffic = batch * keys * costs.row_bytes(scenario.CACHE)
        sets = [arguments(batch, entries, seed, device) for seed in range(max(1, timing.cold_sets(traffic, device)))]
        tried = {str(plan): plan for plan in plans(batch, entries)}
        ways: dict[str, Callable[..., Any]] = {name: partial(run, plan) for name, plan in tried.items()}
        for name, prepare in flash_mla.if_installed(flash_mla.decode, HEADS).items():
            try:
                ways[name] = prepare()
                wrong = scenario.differs(ways[name](*sets[0]), REFERENCES[scenario.OP](*sets[0]))
            except Exception as error:
                wrong = repr(error)[:200]
            if wrong:
                del ways[name]
                print(f"{size}: {name}: {wrong}")
        for name, call in ways.items():
            calls = [partial(call, *args) for args in sets]
            try:
                wrong = differs(tried[name], sets[0]) if name in tried else ""
                us = timing.measure(lambda calls=calls: [once() for once in calls], [()], device).us / len(sets)
                kernels = kernels_us(calls[:3])
            except Exception as error:
                print(f"{size}: {name}: {error!r}"[:300], flush=True)
                continue
            print(
                f"{size:10} {name:46} cold {us:8.2f}  floor {floor:6.2f}  "
                + " + ".join(f"{us:.1f}" for us in kernels.values()) + (wrong and f" WRONG: {wrong}"), flush=True,
            )  # fmt: skip
            yield {
                "size": size, "plan": name, "cold_us": round(us, 2), "floor_us": round(floor, 2),
                "kernels_us": kernels, "bytes": traffic, "sets": len(sets), "wrong": wrong,
            }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a plan is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--sizes", default=",".join(SIZES), help="entries x requests (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="begin no size later than that: %(default)s")
    parser.add_argument("--out", metavar="FOLDER", help="write hca_long.json there")
    args = parser.parse_args(argv)
    begin, device, sizes = time.monotonic(), torch.device("cuda"), args.sizes.split(",")
    said = "python examples/benchmarks/hca_long.py" + ("" if sizes == list(SIZES) else f" --sizes {args.sizes!r}")
    record = {"scenario": "hca_long", **environment(device), "command": said}
    record["rows"] = list(rows(sizes, device, begin + args.seconds))
    if args.out:
        print(f"written to {write_json(record, args.out)}")
    return int(any(row["wrong"] for row in record["rows"]))


if __name__ == "__main__":
    sys.exit(main())
