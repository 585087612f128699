"""The first calls of a converted model build no kernel that its compilation could have built.

    python tests/gpu/test_early_builds.py [--layers 4] [--experts 16] [--trust]

A V4-Flash of few layers with random weights is compiled and called, prompt and step, in a process with empty caches:
once with `dsv4.early_builds` off, once on. Prints how long that took and where kernels were built, and for each kernel
that a first call built although others of its function were built before, how the nearest of these differs.
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
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout that is not installed

from dsv4_compile import hf
from dsv4_compile.backend import dsv4
from dsv4_compile.debug import compile_log
from dsv4_compile.hf.tiny import FLASH, layers_in_turn, quiet_libraries, random_model, tiny_config
from dsv4_compile.kernels.host.build_hooks import describe_any_kernel
from dsv4_compile.kernels.host.launch import is_building
from dsv4_compile.runtime import early_builds
from dsv4_compile.selection import proven

PROMPT, STEPS = 512, 4
"""Tokens of the prompt, and tokens that are generated: the third call of a step is captured."""
SECONDS = 900
OTHER = "outside of graphs"
"""Place of a launch that no compiled graph makes."""


def variant(given: dict[str, Any]) -> dict[str, str]:
    """Return what a kernel is built for, as Triton's hook is told: type, constant and alignment by argument."""
    compiled, names = given["compile"], given["fn"].jit_function.arg_names

    def name(path: Any) -> str:
        return path if isinstance(path, str) else ".".join([names[path[0]], *map(str, path[1:])])

    parameters = {argument: str(kind) for argument, kind in compiled["signature"].items()}
    for values in (compiled["constants"], *compiled["configs"]):
        for path, value in values.items():
            parameters[name(path)] = f"{parameters.get(name(path), '')} {value}"
    return parameters | {"options": compiled["key"].rpartition("{")[2]}


def place(folder: str) -> str:
    """Return the kernel file that launches now, and whether a graph with its code in `folder` launches it."""
    frame, file, graph = sys._getframe(1), "", False
    while frame is not None:
        path = frame.f_code.co_filename
        graph |= path.startswith(folder)
        if not file and "/kernels/" in path and "/kernels/host/" not in path:
            file = path.rpartition("/kernels/")[2]
        frame = frame.f_back  # type: ignore[assignment]
    return file if graph else f"{file}, {OTHER}"


def differences(late: dict[str, str], early: Sequence[dict[str, str]]) -> str:
    """Return how `late` differs from the variant of `early` that is nearest to it."""
    if not early:
        return "none of this function was built early"
    changes = [[name for name in late | other if late.get(name) != other.get(name)] for other in early]
    names = min(changes, key=len)
    other = early[changes.index(names)]
    return "; ".join(f"{name}: {late.get(name)}, early {other.get(name)}" for name in names) or "the same variant"


def measure(layers: int, experts: int, wanted: str, device: torch.device) -> dict[str, Any]:
    """Return seconds of the first prompt and of the first steps, and the kernels with the place of their build."""
    from triton import knobs

    folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    early: dict[str, list[dict[str, str]]] = {}
    late: list[dict[str, str]] = []

    def note(**given: Any) -> None:
        function = given["fn"].jit_function.fn.__name__
        if is_building():
            early.setdefault(function, []).append(variant(given))
        else:
            why = differences(variant(given), early.get(function, []))
            late.append({"kernel": function, "where": place(folder), "why": why})

    describe_any_kernel()
    knobs.runtime.jit_cache_hook = note
    sizes = FLASH | layers_in_turn(layers) | {"n_routed_experts": experts}
    model: Any = random_model(tiny_config(**sizes), device)
    hf.convert(model, max_batch_size=1, max_seq_len=2 * PROMPT)
    options = {"dsv4.early_builds": wanted}
    model.compile(
        fullgraph=True, backend=dsv4, options=options | ({"dsv4.cudagraph": "full"} if device.type == "cuda" else {})
    )
    ids = torch.randint(1, sizes["vocab_size"], (1, PROMPT), device=device)
    mask = torch.ones_like(ids)
    hf.mark_dynamic_tokens(ids)
    hf.mark_dynamic_tokens(mask)

    def seconds(tokens: int) -> float:
        begin = time.perf_counter()
        model.generate(ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return round(time.perf_counter() - begin, 1)

    built: list[early_builds.Built] = []
    with early_builds.listen(built.append), compile_log() as log:
        row: dict[str, Any] = {"first_prompt_s": seconds(1), "first_steps_s": seconds(STEPS)}
    took = {"compile_s": 0.0, "kernel_s": 0.0}
    for entry in log:
        if not entry.early:
            took[f"{entry.kind}_s"] = took.get(f"{entry.kind}_s", 0.0) + (entry.seconds or 0.0)
    row |= {name: round(value, 1) for name, value in took.items()}
    row["early"] = sum(not build.error for build in built)
    row["early_s"] = round(sum(build.seconds for build in built), 1)
    row["failed"] = [f"{build.name}: {build.error}" for build in built if build.error]
    return row | {"late": late}


def child(wanted: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return what `measure` returns in a process with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        command = [sys.executable, __file__, "--child", wanted, *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def in_graphs(row: dict[str, Any]) -> list[dict[str, str]]:
    """Return the kernels that a compiled graph built at its first call."""
    return [kernel for kernel in row["late"] if not kernel["where"].endswith(OTHER)]


def test_the_first_calls_of_a_model_find_every_kernel_built() -> None:
    row = child("on", ["--layers", "3", "--experts", "8", "--trust"])
    assert row["early"] > 10 and row["failed"] == []
    assert in_graphs(row) == []


def report(say: Callable[[str], Any], arguments: Sequence[str]) -> int:
    """Print both runs and return 1 if a graph's first call built a kernel although early builds are on."""
    runs = {wanted: child(wanted, arguments) for wanted in ("off", "on")}
    for wanted, row in runs.items():
        inside = in_graphs(row)
        say(f"early builds {wanted}: first prompt {row['first_prompt_s']} s, first steps {row['first_steps_s']} s")
        say(f"  torch.compile {row['compile_s']} s, builds in first calls {row['kernel_s']} s")
        say(f"  {row['early']} kernels built early, {row['early_s']} s of builds during the compilation")
        say(f"  {len(inside)} built at a graph's first call, {len(row['late']) - len(inside)} {OTHER}")
        for line in row["failed"]:
            say(f"  not built early: {line}")
    for kernel in runs["on"]["late"]:
        say(f"  late: {kernel['kernel']} ({kernel['where']}): {kernel['why']}")
    before, after = (runs[wanted]["first_prompt_s"] + runs[wanted]["first_steps_s"] for wanted in ("off", "on"))
    say(f"{before:.1f} s without, {after:.1f} s with early builds: {before - after:.1f} s saved")
    return 1 if in_graphs(runs["on"]) or runs["on"]["failed"] else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description="Time first calls with early builds of kernels and without.")
    parser.add_argument("--layers", type=int, default=4, help="%(default)s")
    parser.add_argument("--experts", type=int, default=16, help="%(default)s")
    parser.add_argument("--trust", action="store_true", help="count every implementation as proven on this GPU")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=("on", "off"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        quiet_libraries()
        with proven.trust() if args.trust else nullcontext():
            print(json.dumps(measure(args.layers, args.experts, args.child, torch.device(args.device))))
        return 0
    options = ["--layers", str(args.layers), "--experts", str(args.experts), "--device", args.device]
    return report(lambda line: print(line, flush=True), [*options, *(["--trust"] if args.trust else [])])


if __name__ == "__main__":
    sys.exit(main())
