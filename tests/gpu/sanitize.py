"""Run every kernel of the package under compute-sanitizer: `python tests/gpu/sanitize.py [--tool NAME] [--op NAME]`.

For each tool, a kernel with a planted fault comes first: a tool that does not find it proves nothing, and the run
fails. Then the launcher of every op with a kernel is called on the op's samples, decode attention at 8 and at 64 heads
with everything that can be fused, and products by the kernels for few tokens and for many, one process for all. Every
tensor is a separate allocation, so that memcheck knows where each ends. Exits with 1 on a fault, and on a plant that
stays hidden.

What racecheck reports between two warpgroups of a warp-specialised Gluon kernel is counted, and not judged: it does not
see what orders them. On an H200 it reports every word that one stores and a second one loads behind a barrier, the
arguments that Triton itself hands to the partitions among them (13967 pairs of decode attention with 64 heads); of
warpgroups.py, which is the pattern by itself, it reports nothing, not even where that arrives before it stores and
gives wrong sums. The simulated kernels of tests/kernels, with threads as partitions, do fail without their barriers.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout that is not installed

from dsv4_compile.ops.common.kernels import KERNELS, launcher, refusal
from dsv4_compile.testing.samples import op_samples

TOOLS = ("memcheck", "racecheck")
FOUND = 42
"""What compute-sanitizer exits with when it has found something."""
PLANT = "plant"
LAUNCHED = "all launched"
PRODUCTS = ("fp8_linear", "fp8_grouped_einsum", "fp8_grouped_einsum_quant", "grouped_linear")
WARPGROUP = 128
OPTIONS: dict[str, tuple[str, ...]] = {
    "racecheck": ("--racecheck-report", "hazard", "--print-limit", "1000000", "--show-backtrace", "no"),
}
_HAZARD = re.compile(r"hazard detected.*\n.* Thread \((\d+),\d+,\d+\) at (\w+)\+.*\n.* Thread \((\d+),")


@triton.jit
def overrun_kernel(p_out, SIZE: tl.constexpr):
    """Writes the element after the last."""
    o = tl.arange(0, SIZE)
    tl.store(p_out + o + 1, o)


@triton.jit
def race_kernel(p_out, SIZE: tl.constexpr):
    """Each thread writes a word of shared memory and reads that of a thread of the next warp, without a barrier."""
    o = tl.arange(0, SIZE)
    seen = tl.inline_asm_elementwise(
        """{
        .shared .align 4 .b32 planted[128];
        .reg .b32 thread, address;
        mov.u32 thread, %tid.x;
        mov.u32 address, planted;
        mad.lo.u32 address, thread, 4, address;
        st.shared.b32 [address], $1;
        add.u32 thread, thread, 32;
        and.b32 thread, thread, 127;
        mov.u32 address, planted;
        mad.lo.u32 address, thread, 4, address;
        ld.shared.b32 $0, [address];
        }""",
        "=r,r",
        [o],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(p_out + o, seen)


PLANTS: dict[str, Any] = {"memcheck": overrun_kernel, "racecheck": race_kernel}


def plant(tool: str) -> None:
    """Launch the kernel with the fault that `tool` must find."""
    PLANTS[tool][(1,)](torch.zeros(256, dtype=torch.int32, device="cuda"), SIZE=256)
    torch.cuda.synchronize()


def calls(op: str) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Name, launcher and arguments of every launch of `op` that is checked."""
    for index, args in enumerate(op_samples(op, "cuda")):
        refuses = refusal(op)
        if refuses is None or not refuses(*args):
            yield f"{op} {index}", launcher(op), args
    if op in ("sparse_mla_decode", "sparse_mla_decode_quant"):
        yield from decode_calls(op)
    if op in PRODUCTS:
        yield from product_calls(op)


def decode_calls(op: str) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Decode attention of a model and of a shard of it, in one part and in many, by each kernel that takes the call."""
    from dsv4_compile.bench import sparse_mla_decode as scenario

    for fused in ("quant",) if op == scenario.QUANT_OP else ("none", "both"):
        for tokens, heads in itertools.product((2, 140), (8, 64)):
            args = scenario.fused_arguments(fused, tokens, heads, torch.device("cuda"), 0, 1024)
            args[3][0], args[10][1] = 0, 65
            args[2][1, ::3] = -1
            yield f"{op} {fused} {tokens} {heads}", launcher(op), args
            yield f"{op} {fused} {tokens} {heads} portable", scenario.portable, args


def product_calls(op: str) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Products of tiles that are whole and that are not, alone and in clusters that send their parts or fetch them."""
    from dsv4_compile.bench.gemm import Layer

    for tokens in (3, 40, 70, 130, 300):
        args = Layer(op, "", 256, 2048, 1 if op == "fp8_linear" else 2).arguments(tokens, torch.device("cuda"), 0)
        yield f"{op} {tokens}", launcher(op), args
        if op == "fp8_linear":
            beside = torch.randn(200, 2048, device="cuda").bfloat16()
            yield f"{op} {tokens} beside", launcher(op), (*args, True, beside)


def launch_all(ops: list[str]) -> None:
    """Launch the kernels of `ops`, naming each call before it is made."""
    for op in ops:
        for name, launch, args in calls(op):
            print(name, flush=True)
            launch(*args)
            torch.cuda.synchronize()
    print(LAUNCHED, flush=True)


def sanitized(sanitizer: str, tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """This file with `arguments`, in a process that `tool` watches."""
    options = "--tool", tool, *OPTIONS.get(tool, ()), "--error-exitcode", str(FOUND)
    command = [sanitizer, *options, sys.executable, __file__, *arguments]
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def across_warpgroups(report: str) -> int:
    """How many hazards a report lists, if all are between warpgroups of warp-specialised kernels; else 0."""
    pairs = _HAZARD.findall(report)
    across = [
        any(arch in k for arch in ("_sm90_", "_hopper_")) and int(a) // WARPGROUP != int(b) // WARPGROUP
        for a, k, b in pairs
    ]
    return len(pairs) if all(across) and len(pairs) == report.count("hazard detected") else 0


def check(sanitizer: str, tool: str, ops: list[str]) -> tuple[str, int]:
    """What is wrong with `tool` or what it has found, "" for nothing, and how many findings are not judged."""
    planted = sanitized(sanitizer, tool, "--launch", PLANT, "--tool", tool)
    if planted.returncode != FOUND:
        return f"the planted fault was not found:\n{planted.stdout[-2000:]}{planted.stderr[-2000:]}", 0
    done = sanitized(sanitizer, tool, "--launch", *ops)
    unjudged = across_warpgroups(done.stdout) if LAUNCHED in done.stdout else 0
    if done.returncode == 0 or (done.returncode == FOUND and unjudged):
        return "", unjudged
    return f"exit status {done.returncode}\n{done.stdout[-6000:]}{done.stderr[-2000:]}", 0


def main(arguments: list[str] | None = None) -> int:
    """0 if no tool has found anything but its plant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tool", choices=TOOLS, help="default: both")
    parser.add_argument("--op", action="append", choices=sorted(KERNELS), help="default: all")
    parser.add_argument(
        "--sanitizer", default=shutil.which("compute-sanitizer") or "", help="path of compute-sanitizer"
    )
    parser.add_argument("--launch", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.launch:
        with torch.no_grad():
            plant(options.tool) if options.launch == [PLANT] else launch_all(options.launch)
        return 0
    if not options.sanitizer:
        print("compute-sanitizer is not in PATH: it comes with the CUDA toolkit; pass --sanitizer")
        return 1
    ops = options.op or sorted(KERNELS)
    reports = {tool: check(options.sanitizer, tool, ops) for tool in ([options.tool] if options.tool else TOOLS)}
    for tool, (wrong, unjudged) in reports.items():
        note = f", {unjudged} pairs across warpgroups not judged" if unjudged else ""
        print(f"{tool}: {wrong}" if wrong else f"{tool}: plant found, {len(ops)} ops clean{note}")
    return 1 if any(wrong for wrong, _ in reports.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
