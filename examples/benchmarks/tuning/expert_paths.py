"""Compare the forms of `moe_experts` for few tokens on Hopper: python examples/benchmarks/tuning/expert_paths.py

`dots` computes in float16 on CUDA cores, `split` in e4m3 from rows that are split into two, `rows64` and `rows128` in
bfloat16 with tiles of 64 or 128 weight rows. V4-Flash's MXFP4
experts with the e4m3 shared expert, whole and as rows of two or four ranks; uniform routing; 16 calls in a CUDA graph,
which read two layers' weights in turn, each with other experts. Prints microseconds a call and the weights' floor at
the speed of a copy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from dsv4_compile.bench import experts
from dsv4_compile.bench.record import environment, write_json
from dsv4_compile.bench.timing import copy_rate, replay_us
from dsv4_compile.kernels.moe import moe_experts as portable
from dsv4_compile.kernels.moe import moe_experts_sm90 as sm90
from dsv4_compile.kernels.moe import moe_experts_sm90_few_tokens as few_tokens
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.selection import proven

CALLS, REPLAYS = 16, 30
FORMS = {"split": (0, 8), "rows64": (10**9, 10**9), "rows128": (10**9, 0)}
"""Largest CTAs of an SM for which bfloat16 is taken, and those for which its tiles have 64 rows."""


@contextmanager
def taken(form: str) -> Iterator[None]:
    """Let calls take a form."""
    with ExitStack() as stack:
        if form in FORMS:
            most_tokens, (bfloat16, narrow) = 0, FORMS[form]
            stack.enter_context(mock.patch.object(sm90, "FEW_CTAS", bfloat16))
            stack.enter_context(mock.patch.object(portable, "FEW_CTAS", narrow))
        else:
            most_tokens = 10**9
        stack.enter_context(mock.patch.object(few_tokens, "MOST_TOKENS", most_tokens))
        stack.enter_context(mock.patch.object(few_tokens, "MOST_ELEMENTS", 10**9))
        portable.plan.cache_clear()
        yield
    portable.plan.cache_clear()


def timed(sets: Sequence[Any], form: str, build: bool) -> float:
    """Return microseconds a call of a form, captured with others, or build its kernels alone."""
    call = launcher("moe_experts")
    with taken(form):
        for args in sets[: 1 if build else 2]:
            call(*args)
        torch.cuda.synchronize()
        if build:
            return 0.0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for args in sets:
                call(*args)
    return statistics.median(replay_us(graph) for _ in range(REPLAYS)) / len(sets)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tokens", default="1,2,3,4,5,6,8,12,16,24", help="%(default)s")
    parser.add_argument("--inner", default="2048,1024,512", help="%(default)s")
    parser.add_argument("--forms", default="dots,split,rows64,rows128", help="%(default)s")
    parser.add_argument("--build", action="store_true", help="build kernels only, to fill Triton's cache")
    parser.add_argument("--out", metavar="FOLDER", help="write expert_paths.json there")
    args = parser.parse_args(argv)
    device = torch.device("cuda")
    rate = copy_rate(device)
    contents: dict[str, Any] = {"scenario": "expert_paths", **environment(device), "rows": []}
    for inner in map(int, args.inner.split(",")):
        model = experts.MODELS["Flash"]._replace(inner=inner)
        layers = [experts.arguments(model, "mxfp4", "e4m3", 32, device, seed) for seed in (0, 1)]
        for tokens in map(int, args.tokens.split(",")):
            generator = torch.Generator(device).manual_seed(tokens)
            routes = [experts.routes(model, tokens, generator) for _ in range(CALLS)]
            sets = [
                (layers[i % 2][0][:tokens], ids, weights, *layers[i % 2][3:]) for i, (ids, weights) in enumerate(routes)
            ]
            floor = experts.cost(model, "mxfp4", "e4m3", tokens).bytes / rate * 1e6
            row: dict[str, Any] = {"inner": inner, "tokens": tokens, "floor_us": round(floor, 1)}
            with proven.trust():
                row |= {form: round(timed(sets, form, args.build), 1) for form in args.forms.split(",")}
            contents["rows"].append(row)
            print(row, flush=True)
    if args.out and not args.build:
        write_json(contents, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
