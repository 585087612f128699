"""Time starts until the first token, with and without a compiled folder: python examples/benchmarks/starts.py

Writes a checkpoint folder in the official formats, random bytes in V4-Flash's sizes with few experts, and builds a
compiled folder from it (`dsv4 build`). Then fresh processes with empty caches start from both folders and from the
first alone. Prints the seconds of each start by kind of work; `total` is from the creation of the process. The files
are in the system's cache: what reading a disk takes is `read_weights.py`'s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from read_weights import write

from dsv4_compile.bench.record import environment, now, write_json
from dsv4_compile.hf.start import measure_start
from dsv4_compile.hf.tiny import quiet_libraries

TINY: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "hc_sinkhorn_iters": 4,
    "sliding_window": 32,
    "index_n_heads": 32,
    "index_head_dim": 32,
    "index_topk": 8,
}
"""Sizes of a model for a CPU."""
SECONDS = 1800
EMPTY, COMPILED = "empty caches", "compiled="
"""Starts: as on a new machine, and from a compiled folder there."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":", 1)[0])
    parser.add_argument("--layers", default="4,43", help="%(default)s")
    parser.add_argument("--experts", type=int, default=8, help="experts of a layer (%(default)s)")
    parser.add_argument("--max-batch-size", type=int, default=8, help="%(default)s")
    parser.add_argument("--max-seq-len", type=int, default=4096, help="%(default)s")
    parser.add_argument("--tiny", action="store_true", help="a model of tiny sizes, which a CPU starts in seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="%(default)s")
    parser.add_argument("--folder", help="where the temporary folders go")
    parser.add_argument("--out", metavar="FOLDER", help="write starts.json there")
    args = parser.parse_args(argv)
    quiet_libraries()
    said = f"python examples/benchmarks/starts.py --layers {args.layers}{' --tiny' if args.tiny else ''}"
    record: dict[str, Any] = {"scenario": "starts", **environment(torch.device(args.device)), "command": said}
    record["rows"] = []
    for layers in map(int, args.layers.split(",")):
        with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
            for row in measure(layers, Path(temporary), args):
                record["rows"].append({**row, "date": now(), "commit": record["commit"]})
                sys.stdout.write(f"{json.dumps(row)}\n")
                sys.stdout.flush()
                if args.out:
                    write_json(record, args.out)
    return 0


def measure(layers: int, temporary: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each kind of start of a model of so many layers. Raises RuntimeError for one that fails."""
    checkpoint, compiled = temporary / "checkpoint", temporary / "compiled"
    checkpoint.mkdir()
    sizes = dict(TINY) if args.tiny else {"n_routed_experts": args.experts}
    files = write(checkpoint, layers, sizes)
    size = round(sum(file.stat().st_size for file in files) / 1e9, 2)
    build_s = build(checkpoint, compiled, args)
    arguments = {"max_batch_size": args.max_batch_size, "max_seq_len": args.max_seq_len, "device": args.device}
    rows = []
    for kind in (EMPTY, COMPILED):
        more = {"compiled": str(compiled), "compiled_required": True} if kind == COMPILED else {}
        start = measure_start(checkpoint, empty_caches=True, **arguments, **more)
        if start.why:
            raise RuntimeError(f"{kind}: {start.why}")
        row = {"layers": layers, "start": kind, "gigabytes": size, **start.as_dict()}
        rows.append({**row, "build_s": round(build_s, 1)} if kind == COMPILED else row)
    return rows


def build(checkpoint: Path, out: Path, args: argparse.Namespace) -> float:
    """Build a compiled folder in a process with empty caches, and return the seconds that it took."""
    env = os.environ | {name: str(out.parent / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    command = [sys.executable, "-m", "dsv4_compile", "build", str(checkpoint), "--out", str(out)]
    command += ["--max-batch-size", str(args.max_batch_size), "--max-seq-len", str(args.max_seq_len)]
    begin = time.perf_counter()
    done = subprocess.run(
        [*command, "--device", args.device],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        timeout=SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:])
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
