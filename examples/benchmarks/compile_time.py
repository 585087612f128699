"""Time the compilation of the three kinds of layer: python examples/benchmarks/compile_time.py --out results

Each time is of a process of its own, from the first call of the first layer until graphs of 1 and 8 tokens are
captured: tracing, Inductor, Triton, ptxas and the captures, without importing torch and making weights. Cold: with
empty folders for Inductor's and Triton's caches. Warm: once more with the same folders.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from dsv4_compile import layout
from dsv4_compile.backend import dsv4
from dsv4_compile.bench.decode_layers import DecodeStep
from dsv4_compile.bench.decode_step import WEIGHTS
from dsv4_compile.bench.record import environment, write_json
from dsv4_compile.config import DeepseekV4Config
from dsv4_compile.selection import proven

KINDS = {"SWA": 1, "HCA": layout.HCA_RATIO, "CSA": layout.CSA_RATIO}
SIZES = (1, 8)
CONTEXT = 1024
SECONDS = 600


def measure(
    fp8: bool, device: torch.device, config: DeepseekV4Config | None = None, backend: Any = dsv4
) -> dict[str, float]:
    """Return the seconds until all three kinds of layer are captured, and until a first replay has ended."""
    own = (config or DeepseekV4Config.flash()).with_layers(*KINDS.values())
    step = DecodeStep.build(own, fp8, SIZES[-1], CONTEXT, device)
    hidden = torch.randn(SIZES[-1], step.width, device=device).bfloat16()
    layers = step.compiled(backend=backend)
    begin = time.perf_counter()
    runner = step.runner(layers, SIZES)
    compiled = time.perf_counter() - begin
    step.replay(runner, SIZES[-1])(hidden)[-1].sum().item()
    return {"compile_s": round(compiled, 2), "first_step_s": round(time.perf_counter() - begin, 2)}


def record(
    weights: Sequence[str], device: torch.device, trust: bool, so_far: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Return cold and warm times for each of `weights`; `so_far` gets the record after each process."""
    said = f"python examples/benchmarks/compile_time.py --weights {','.join(weights)} --device {device.type}"
    found: dict[str, Any] = {"scenario": "compile_time", **environment(device)}
    found |= {"command": f"{said} --trust" if trust else said, "rows": []}
    for each in weights:
        with tempfile.TemporaryDirectory() as folder:
            env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
            command = [sys.executable, __file__, "--child", each, "--device", device.type]
            for cache in ("cold", "warm"):
                done = subprocess.run(
                    [*command, *(["--trust"] if trust else [])],
                    env=env,
                    capture_output=True,
                    text=True,
                    timeout=SECONDS,
                    check=False,
                )
                if done.returncode:
                    raise RuntimeError(done.stderr[-2000:])
                found["rows"].append({"weights": each, "cache": cache, **json.loads(done.stdout.splitlines()[-1])})
                print(found["rows"][-1], file=sys.stderr, flush=True)
                so_far(found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description="Compile times of the kinds of layer.")
    parser.add_argument("--weights", default=",".join(WEIGHTS), help="%(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="%(default)s")
    parser.add_argument("--trust", action="store_true", help="count every implementation as proven on this GPU")
    parser.add_argument("--out", metavar="FOLDER", help="write compile_time.json there")
    parser.add_argument("--child", choices=WEIGHTS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if args.child:
        with proven.trust() if args.trust else nullcontext():
            print(json.dumps(measure(args.child == "fp8", device)))
        return 0

    def write(found: dict[str, Any]) -> None:
        if args.out:
            write_json(found, args.out)

    print(json.dumps(record(args.weights.split(","), device, args.trust, write), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
