"""Time the compilation of whole models: python examples/benchmarks/compile_time.py --out results

V4-Flash's sizes with few routed experts and random weights in bfloat16, of some and of all layers. Each time is of a
separate process, from the first call of `generate` until the graphs of a prompt and of a step of one token have run and
steps are captured: tracing, Inductor, Triton, ptxas and the captures, without importing torch and making weights. Cold:
with empty folders for Inductor's and Triton's caches. Warm: once more with the same folders.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dsv4_compile import hf
from dsv4_compile.bench.record import environment, write_json
from dsv4_compile.hf.tiny import FLASH, layers_in_turn, quiet_libraries, random_model, tiny_config

SIZES: Mapping[str, Any] = FLASH | {"n_routed_experts": 8}
"""Sizes of V4-Flash, with so few experts that all of its layers fit on one GPU."""
PROMPT, STEPS = 2048, 3
SECONDS = 600


def measure(
    layers: int,
    device: torch.device,
    sizes: Mapping[str, Any] = SIZES,
    prompt: int = PROMPT,
    backend: str | Callable[..., Any] = "dsv4",
) -> dict[str, Any]:
    """Return the seconds until a prompt and steps have run, and the most host memory by then, MiB."""
    quiet_libraries()
    model: Any = random_model(tiny_config(**sizes, **layers_in_turn(layers)), device)
    hf.convert(model, max_batch_size=1, max_seq_len=prompt + 256)
    options = {"dsv4.cudagraph": "full"} if device.type == "cuda" else None
    model.compile(fullgraph=True, backend=backend, options=options)
    ids = torch.randint(1, model.config.vocab_size, (1, prompt), device=device)
    mask = torch.ones_like(ids)

    def seconds(tokens: int) -> float:
        begin = time.perf_counter()
        model.generate(ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    first, steps = seconds(1), seconds(1 + STEPS)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    times = {"prompt_s": first, "steps_s": steps, "compile_s": first + steps}
    return {name: round(value, 2) for name, value in times.items()} | {"host_mib": memory}


def record(layers: Sequence[int], device: torch.device, so_far: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Return cold and warm times of models of each number of `layers`; `so_far` gets the record after each process."""
    said = f"python examples/benchmarks/compile_time.py --layers {','.join(map(str, layers))} --device {device.type}"
    contents: dict[str, Any] = {"scenario": "compile_time", **environment(device), "command": said, "rows": []}
    for count in layers:
        with tempfile.TemporaryDirectory() as folder:
            env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
            command = [sys.executable, __file__, "--child", str(count), "--device", device.type]
            for cache in ("cold", "warm"):
                done = subprocess.run(
                    command,
                    env=env,
                    capture_output=True,
                    encoding="utf-8",
                    errors="replace",
                    timeout=SECONDS,
                    check=False,
                )
                if done.returncode:
                    raise RuntimeError(done.stderr[-2000:])
                row = {"layers": count, "cache": cache, **json.loads(done.stdout.splitlines()[-1])}
                contents["rows"].append({"date": contents["date"], "commit": contents["commit"], **row})
                print(contents["rows"][-1], file=sys.stderr, flush=True)
                so_far(contents)
    return contents


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description="Compile times of whole models.")
    parser.add_argument("--layers", default="4,12,43", help="%(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="%(default)s")
    parser.add_argument("--out", metavar="FOLDER", help="write compile_time.json there")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if args.child:
        print(json.dumps(measure(args.child, device)))
        return 0

    def write(found: dict[str, Any]) -> None:
        if args.out:
            write_json(found, args.out)

    print(json.dumps(record([int(count) for count in args.layers.split(",")], device, write), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
