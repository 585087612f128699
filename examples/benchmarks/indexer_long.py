"""Check and time the indexer's selection at long contexts: python examples/benchmarks/indexer_long.py --out FOLDER

`indexer_topk_slots` with V4-Flash's sizes selects from parts of a row or from groups of its columns. Selections from
groups are first compared bit by bit with those from parts, on hostile logits and on the timed inputs; then both are
timed in CUDA graphs, with warm inputs and with as many input sets in turn as exceed the L2 cache, and kernel by kernel
under the profiler. A run takes less than two minutes on an H200, compilation included.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.bench import timing
from dsv4_compile.bench.nodes import kernels_us
from dsv4_compile.bench.record import environment, write_json
from dsv4_compile.kernels.indexer.indexer_logits import RAGGED_SELECT_TILE, SELECT_TILE
from dsv4_compile.kernels.indexer.select_groups import select_from_groups
from dsv4_compile.kernels.indexer.select_topk import KeyRows, select
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.testing import samples  # noqa: F401  (importing the package registers the ops)

HEADS, TOPK, BLOCK, RATIO = 64, 512, 64, layout.CSA_RATIO
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "parts": {"groups": (0, 0)},
    "groups of 16, 16 warps": {"groups": (16, 16)},
    "groups of 16, 32 warps": {"groups": (16, 32)},
    "groups of 8, 16 warps": {"groups": (8, 16)},
    "groups of 8, 8 warps": {"groups": (8, 8)},
}
"""Options of the launcher."""
SIZES = {
    "1M x 1": [1 << 20], "1M x 8": [1 << 20] * 8, "131k x 1": [131072], "131k x 8": [131072] * 8, "64k x 1": [65536],
    "32k x 1": [32768], "16k x 1": [16384], "16k x 8": [16384] * 8, "131k x 32": [131072] * 32,
    "mixed x 8": [1 << 20, 16384, 131072, 2048, 524288, 4096, 65536, 0],
}  # fmt: skip
"""Tokens of context of each request."""
PROMPTS = (2048, 32768), (1024, 131072)
"""Tokens of a prompt and entries of a token: their selection alone is timed."""
SPREADS = ("normal", "equal", "ties", "outlier", "infinities", "exponents", "clusters", "rising", "subnormal", "nan")
Arguments = tuple[Any, ...]


def with_slots(args: Arguments, topk: int) -> Arguments:
    """Append a top-k and the map to slots of a cache with the same pages, a tenth of them missing."""
    table, owners = args[4], args[5]
    random = torch.rand(table.shape, device=table.device)
    return *args, topk, torch.where(random < 0.1, -1, table), owners >= 0, args[7]


def scored(contexts: Sequence[int], seed: int, device: torch.device) -> Arguments:
    """Return random queries, keys and scales; a request for each context, its pages in any order."""
    generator = torch.Generator(device).manual_seed(seed)
    tokens, columns = len(contexts), layout.cdiv(max(contexts) // RATIO, BLOCK)
    pages = [layout.cdiv(context // RATIO, BLOCK) for context in contexts]
    cache = layout.allocate_cache("indexer_fp8", sum(pages), BLOCK, device=device)
    keys, scales = cache.split((BLOCK * layout.INDEXER_FP8.data, BLOCK * layout.INDEXER_FP8.scale), dim=1)

    def codes(*shape: int) -> Tensor:
        """Return bytes of e4m3, none of them NaN."""
        code = torch.randint(256, shape, dtype=torch.uint8, device=device, generator=generator)
        return torch.where((code & 0x7F) == 0x7F, 0, code)

    keys.copy_(codes(*keys.shape))
    scales.copy_(torch.rand(sum(pages), BLOCK, device=device, generator=generator).add_(0.5).view(torch.uint8))
    table = torch.full((tokens, columns), -1, dtype=torch.int32, device=device)
    order = torch.randperm(sum(pages), device=device, generator=generator).int()
    for row, blocks in zip(table, order.split(pages), strict=True):
        row[: len(blocks)] = blocks
    q = codes(tokens, HEADS, layout.INDEXER_HEAD_DIM).view(torch.float8_e4m3fn)
    weights = torch.randn(tokens, HEADS, device=device, generator=generator)
    lens = torch.tensor([context // RATIO for context in contexts], dtype=torch.int32, device=device)
    owners = torch.arange(tokens, dtype=torch.int32, device=device)
    return q, torch.empty(tokens, HEADS, 0, device=device), weights, cache, table, owners, lens, BLOCK, "indexer_fp8"


def hostile(spread: str, entries: int, device: torch.device) -> Arguments:
    """Return nine tokens of one request whose plain keys are their logits; two heads see k and -k."""
    generator = torch.Generator(device).manual_seed(entries)
    values = torch.randn(entries, device=device, generator=generator)
    if spread == "equal":
        values.zero_()
    elif spread == "ties":
        values = (3 * values).round()
    elif spread == "outlier":
        values[3], values[5] = 3e38, -3e38
    elif spread == "infinities":
        values[1::5], values[2::7], values[3::11] = torch.inf, -torch.inf, torch.nan
    elif spread == "exponents":
        values = torch.exp2(40 * values)
    elif spread == "clusters":
        values = torch.where(values > 0, 1 + 1e-6 * values, 1e6 + values.round())
    elif spread == "rising":
        values = values.sort().values
    elif spread == "subnormal":
        values *= 1e-40
    elif spread == "nan":
        values[values < 2] = torch.nan
    keys = torch.zeros(entries // BLOCK, BLOCK, 16, device=device)
    keys[..., 0] = values.view(-1, BLOCK)
    q = torch.zeros(9, 2, 16, device=device)
    q[:, 0, 0], q[:, 1, 0] = 1.0, -1.0
    table = torch.arange(len(keys), dtype=torch.int32, device=device)[None].clone()
    table[0, len(keys) // 3] = -1
    lens = [entries, entries - 1, entries // 2, 8192, 8193, 512, 513, 16 * 512 - 15, 0]
    lens_of = torch.tensor(lens, dtype=torch.int32, device=device).clamp(max=entries)
    owners = torch.zeros(9, dtype=torch.int32, device=device)
    weights = torch.tensor([1.0, -1.0], device=device).repeat(9, 1)
    return q, q[..., :0], weights, keys, table, owners, lens_of, BLOCK, "plain"


def check(name: str) -> list[str]:
    """Compare a configuration with "parts", bit by bit, on hostile logits; return what differs."""
    device, call, faults = torch.device("cuda"), launcher("indexer_topk_slots"), []
    torch.manual_seed(0)
    for entries, spread in itertools.product((4160, 8192, 32768, 262144), SPREADS):
        args = with_slots(hostile(spread, entries, device), TOPK)
        if not all(map(torch.equal, call(*args, **CONFIGURATIONS[name]), call(*args, groups=(0, 0)))):
            faults.append(f"{name}: {spread} of {entries}")
    for topk in (100, 1024):
        args = with_slots(hostile("ties", 32768, device), topk)
        if not all(map(torch.equal, call(*args, **CONFIGURATIONS[name]), REFERENCES["indexer_topk_slots"](*args))):
            faults.append(f"{name}: the reference's {topk}")
    return faults


def configurations(size: str) -> list[str]:
    """Return the configurations that a size is timed with: of long rows, those whose groups are not most of a row."""
    entries = max(SIZES[size]) // RATIO
    long = ["groups of 16, 16 warps", "groups of 16, 32 warps" if entries > 131072 else "groups of 8, 16 warps"]
    return ["parts", *(long if entries > SELECT_TILE[0] else [])]


def warm(size: str) -> list[str]:
    """Compile what a size is timed with, and compare five runs of each configuration with "parts" bit by bit."""
    call = launcher("indexer_topk_slots")
    args = with_slots(scored(SIZES[size], 1, torch.device("cuda")), TOPK)
    want, faults = call(*args, groups=(0, 0)), []
    for name in configurations(size):
        if not all(all(map(torch.equal, call(*args, **CONFIGURATIONS[name]), want)) for _ in range(5)):
            faults.append(f"{name}: {size}")
    for selection in selections(SIZES[size], configurations(size), args[0].device).values():
        selection()
    torch.cuda.synchronize()
    return faults


def selections(
    contexts: Sequence[int], names: Sequence[str], device: torch.device, tile: tuple[int, int] = SELECT_TILE
) -> dict[str, partial[Any]]:
    """Return calls of each selection alone, from random keys; `tile` is that of parts."""
    tokens, reach = len(contexts), max(contexts) // RATIO
    keys = torch.randn(tokens, layout.align_up(reach, 256), device=device).view(torch.int32)
    keys ^= (keys >> 31) & 0x7FFFFFFF
    lens = torch.tensor([context // RATIO for context in contexts], dtype=torch.int32, device=device)
    entries = KeyRows(keys, torch.arange(tokens, dtype=torch.int32, device=device), lens, tokens, reach)
    out = torch.empty(tokens, TOPK, dtype=torch.int32, device=device)
    calls: dict[str, partial[Any]] = {"parts": partial(select, out, entries, tile)}
    for name in names:
        columns, warps = CONFIGURATIONS[name]["groups"]
        if columns:
            best = keys.view(tokens, -1, columns).amax(2).contiguous()
            calls[name] = partial(select_from_groups, out, entries, best, warps)
    return calls


def rows(sizes: Sequence[str], device: torch.device, until: float) -> Iterator[dict[str, Any]]:
    """Time every size that there is time for before `until`."""
    for size in sizes:
        contexts, names = SIZES[size], configurations(size)
        if time.monotonic() > until:
            print(f"no time left for {size}")
            continue
        calls = selections(contexts, names, device)
        alone = {name: round(timing.measure(call, [()], device).us, 2) for name, call in calls.items()}
        traffic = sum(contexts) // RATIO * (layout.INDEXER_FP8.data + layout.INDEXER_FP8.scale)
        number = max(1, min(256, timing.cold_sets(traffic, device)))
        sets = [with_slots(scored(contexts, seed, device), TOPK) for seed in range(number)]
        for name in names:
            call = partial(launcher("indexer_topk_slots"), **CONFIGURATIONS[name])
            took = timing.measure(call, sets, device, cold=True)
            kernels = kernels_us([partial(call, *args) for args in (sets * 10)[:10]])
            print(
                f"{size:10} {name:24} {took.us:8.2f} cold {took.cold_us:8.2f}  select alone {alone.get(name, 0):6.2f}  "
                + " + ".join(f"{us:.1f}" for us in kernels.values()), flush=True,
            )  # fmt: skip
            yield {
                "size": size, "configuration": name, "us": round(took.us, 2), "cold_us": round(took.cold_us or 0, 2),
                "select_us": alone.get(name), "kernels_us": kernels, "bytes": traffic, "sets": number,
            }  # fmt: skip


def prompts(device: torch.device) -> Iterator[dict[str, Any]]:
    """Time the selections of all tokens of a chunk of a prompt."""
    for tokens, entries in PROMPTS:
        calls = selections([entries * RATIO] * tokens, list(CONFIGURATIONS)[1:], device, RAGGED_SELECT_TILE)
        calls["parts"]()
        out = calls["parts"].args[0]
        want = out.clone()
        for name, call in calls.items():
            out.fill_(-2)
            call()
            equal = torch.equal(out, want)
            us = round(timing.measure(call, [()], device).us, 1)
            print(f"{tokens} x {entries:7} {name:24} {us:8.1f} {'' if equal else 'differs'}", flush=True)
            yield {"size": f"{tokens} x {entries}", "configuration": name, "select_us": us, "equal": equal}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a selection differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--sizes", default=",".join(SIZES), help="%(default)s")
    parser.add_argument("--prompts", action="store_true", help="time selections of many tokens too")
    parser.add_argument("--no-checks", action="store_true", help="compare on the timed inputs alone")
    parser.add_argument("--seconds", type=float, default=100.0, help="begin no size later than that: %(default)s")
    parser.add_argument("--out", metavar="FOLDER", help="write indexer_long.json there")
    args = parser.parse_args(argv)
    begin, device, sizes = time.monotonic(), torch.device("cuda"), [size for size in args.sizes.split(",") if size]
    names = [] if args.no_checks else list(CONFIGURATIONS)[1:]
    # Processes compile kernels at the same time; this one then reads them from Triton's cache.
    with multiprocessing.get_context("spawn").Pool(max(1, len(names) + len(sizes))) as pool:
        checks = [pool.map_async(check, names, 1), pool.map_async(warm, sizes, 1)]
        faults = list(itertools.chain.from_iterable(fault for run in checks for fault in run.get()))
    print(f"{time.monotonic() - begin:.0f} s of checks: " + ("; ".join(faults[:20]) or "all equal"), flush=True)
    record = {"scenario": "indexer_long", **environment(device), "faults": faults}
    record["rows"] = list(rows(sizes, device, begin + args.seconds))
    if args.prompts:
        record["prompts"] = list(prompts(device))
    if args.out:
        print(f"written to {write_json(record, args.out)}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
