"""Time the all-reduce of a sub-layer's output and the boundary after it:
torchrun --nproc-per-node 2 examples/benchmarks/all_reduce_boundary.py

Sizes of V4-Flash in bfloat16, consecutive calls in a CUDA graph. `boundary` is without an all-reduce; `fused` reads the
parts of all ranks in the boundary's own launch; `symmetric` and `nccl` run an all-reduce before it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from dsv4_compile.bench.record import environment, write_json
from dsv4_compile.hf.model.split import with_collectives
from dsv4_compile.parallel import Ranks
from dsv4_compile.parallel.collectives import functional_all_reduce

DIM, CALLS, REPEATS = 4096, 40, 9
ops: Any = torch.ops


def forms_of(tokens: int, ranks: Ranks, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return the forms by name, each a call on the same tensors."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    streams, output = randn(tokens, 4, DIM).bfloat16(), randn(tokens, DIM).bfloat16()
    post, comb = torch.sigmoid(randn(tokens, 4)), torch.softmax(randn(tokens, 4, 4), 1)
    mix = randn(24, 4 * DIM) / DIM**0.5, randn(24), randn(3), randn(DIM), 1e-6, 1e-6, 20
    name = ranks.name
    return {
        "boundary": lambda: ops.dsv4.mhc_boundary(streams, output, post, comb, *mix),
        "fused": lambda: ops.dsv4_collectives.all_reduce_mhc_boundary(streams, output, post, comb, *mix, name),
        "symmetric": lambda: ops.dsv4.mhc_boundary(
            streams, ops.dsv4_collectives.all_reduce(output, name), post, comb, *mix
        ),
        "nccl": lambda: ops.dsv4.mhc_boundary(streams, functional_all_reduce(output, name), post, comb, *mix),
    }


def microseconds(call: Callable[[], Any]) -> float:
    """Return the median time of a call among consecutive calls, which all ranks begin together."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.distributed.barrier()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / CALLS * 1e3)
    graph.reset()
    return round(statistics.median(times), 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tokens", default="1,8,32,128", help="%(default)s")
    parser.add_argument("--out", metavar="FOLDER", help="write all_reduce_boundary.json there")
    args = parser.parse_args(argv)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))
    ranks = with_collectives(Ranks.of(mesh), "symmetric", device)
    command = (
        f"torchrun --nproc-per-node {ranks.size} examples/benchmarks/all_reduce_boundary.py --tokens {args.tokens}"
    )
    contents: dict[str, Any] = {
        "scenario": "all_reduce_boundary",
        **environment(device),
        "command": command,
        "rows": [],
    }
    for tokens in map(int, args.tokens.split(",")):
        forms = forms_of(tokens, ranks, device)
        row = {"ranks": ranks.size, "tokens": tokens} | {
            f"{name}_us": microseconds(call) for name, call in forms.items()
        }
        contents["rows"].append(row)
        if ranks.rank == 0:
            print(row, flush=True)
            if args.out:
                write_json(contents, args.out)
    torch.cuda.synchronize()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
