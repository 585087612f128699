"""End one of two ranks in the middle of a captured step, on two GPUs of one host: python tests/gpu/killed.py

A small random model is split over two plain processes, without a launcher that would end the other one, with symmetric
collectives; both generate, compiled and captured. The rank that goes has just launched a replay, then is killed, or
with `--how raise` raises an error; rank 0 takes the store with it. The other must end by E706 with that rank's name.
Prints how long it took, its status and its text; exits with 1 if it hung for 60 seconds or named nobody.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout that is not installed

ALARM, START = 60.0, 300.0
"""Seconds for the survivor after the other rank went, and for both until then."""
REPLAYS = 10
"""Replays that the rank which goes has launched."""


class Raised(Exception):
    """The error of a rank that goes by itself."""


def generate(args: argparse.Namespace) -> None:
    """Generate on this rank, and go in a step if it is this one's turn."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from dsv4_compile import hf
    from dsv4_compile.hf.tiny import FLASH, layers_in_turn, quiet_libraries, random_model, tiny_config
    from tests.gpu.conftest import pytest_configure

    pytest_configure()
    quiet_libraries()
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    mesh = init_device_mesh("cuda", (2,))
    sizes = FLASH | layers_in_turn(args.layers) | {"n_routed_experts": 16, "num_hash_layers": 0, "vocab_size": 8192}
    model: Any = random_model(tiny_config(**sizes), device)
    options: dict[str, Any] = {"max_batch_size": 1, "max_seq_len": 256, "attention_only": False}
    hf.convert(model, **options, mesh=mesh, collectives="symmetric", rank_timeout=args.timeout)
    model.compile(fullgraph=True, backend="dsv4", options={"dsv4.cudagraph": "full"})
    launch, launched = torch.cuda.CUDAGraph.replay, 0

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        nonlocal launched
        launch(graph)
        launched += 1
        if rank == args.rank and launched == REPLAYS:
            Path(args.went).write_text(f"{time.time()}")
            if args.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise Raised

    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]
    ids = torch.randint(1, 8192, (1, 20), generator=torch.Generator().manual_seed(0)).to(device)
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=100)
    print(f"rank {rank} has generated {tokens.shape[1] - 20} tokens with {launched} replays", flush=True)


def ranks(args: argparse.Namespace, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start both ranks, with their output in files of `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--went", str(folder / "went"), "--how", args.how]
    command += ["--rank", str(args.rank), "--timeout", str(args.timeout), "--layers", str(args.layers)]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "NCCL_NVLS_ENABLE": "0"}
    started = []
    for rank in range(2):
        environment = os.environ | where | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / str(rank)).open("wb") as log:
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    return started


def check(args: argparse.Namespace, folder: Path) -> str:
    """Run both ranks; return why the survivor did not end as it must, "" if it did."""
    from dsv4_compile.parallel.watchdog import STATUS

    both = ranks(args, folder)
    survivor, other = both[1 - args.rank], both[args.rank]
    went = folder / "went"
    begin = time.time()
    try:
        while not (went.exists() and went.read_text()):
            if any(process.poll() is not None for process in both) or time.time() - begin > START:
                return (
                    f"no rank went: statuses {[process.poll() for process in both]} after {time.time() - begin:.0f} s"
                )
            time.sleep(0.02)
        at = float(went.read_text())
        print(f"rank {args.rank} went ({args.how}) {at - begin:.1f} s after the start", flush=True)
        while survivor.poll() is None:
            if time.time() - at > ALARM:
                return f"the survivor hung for {ALARM:.0f} s"
            time.sleep(0.02)
        print(f"the survivor ended {time.time() - at:.1f} s later with status {survivor.returncode}", flush=True)
        time.sleep(1.0)
        print(f"the other rank's status, None if it hangs at its exit: {other.poll()}", flush=True)
        text = (folder / str(1 - args.rank)).read_text(errors="replace")
        print(text[text.find("[E706]") :] if "[E706]" in text else "no E706", flush=True)
        missing = [word for word in ("[E706]", f"rank {args.rank} (process {other.pid} on ") if word not in text]
        wrong = survivor.returncode != STATUS
        return f"status {survivor.returncode}, text without {missing}" if missing or wrong else ""
    finally:
        for process in both:
            process.kill()
            process.wait()


def main() -> int:
    """Run the check, or one rank of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--how", choices=("kill", "raise"), default="kill", help="%(default)s")
    parser.add_argument("--rank", type=int, choices=(0, 1), default=1, help="the rank that goes (%(default)s)")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds, see convert(rank_timeout=) (%(default)s)")
    parser.add_argument("--layers", type=int, default=1, help="%(default)s")
    parser.add_argument("--went", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.went:
        generate(args)
        return 0
    with tempfile.TemporaryDirectory() as name:
        if why := check(args, Path(name)):
            print(f"FAILED: {why}", flush=True)
            for rank in range(2):
                print(f"--- rank {rank}\n{(Path(name) / str(rank)).read_text(errors='replace')[-4000:]}", flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
