"""Time reading weights into a device next to disk reads and copies: python examples/benchmarks/read_weights.py

Writes a safetensors file of bfloat16 matrices to a temporary folder and reads it, in GB/s: plain reads into one buffer
(read), copies of a pinned buffer to the device (copy), `hf.load`'s reader, and safetensors' own loader. The file is in
the system's cache unless --cold asks the system to drop it before each reading.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dsv4_compile.checkpoints.header import read_header
from dsv4_compile.checkpoints.reader import Reader

ROWS, COLUMNS = 4096, 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":", 1)[0])
    parser.add_argument("--gb", type=float, default=4.0, help="bytes of the file (%(default)s GB)")
    parser.add_argument("--cold", action="store_true", help="drop the file from the system's cache before each reading")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    count = max(1, round(args.gb * 1e9 / (2 * ROWS * COLUMNS)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        save_file({f"w{i}": torch.randn(ROWS, COLUMNS).bfloat16() for i in range(count)}, file)
        weights = [torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device=args.device) for _ in range(count)]
        buffer = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=args.device != "cpu")
        target = torch.empty_like(buffer, device=args.device)

        def read() -> None:
            view = memoryview(buffer.numpy())
            with open(file, "rb", buffering=0) as opened:
                while opened.readinto(view):
                    pass

        def copy() -> None:
            for _ in range(file.stat().st_size // buffer.nbytes):
                target.copy_(buffer, non_blocking=True)

        def ours() -> None:
            tensors, source, fault = read_header(Path(folder), file)
            assert source is not None and fault is None, fault
            with Reader(source) as reader:
                for i, weight in enumerate(weights):
                    reader.copy(tensors[f"w{i}"], (), weight)

        def theirs() -> None:
            load_file(file, device=args.device)

        for name, run in {"read": read, "copy": copy, "hf.load's reader": ours, "safetensors": theirs}.items():
            sys.stdout.write(f"{name:18} {file.stat().st_size / best(run, file, args.cold) / 1e9:6.2f} GB/s\n")


def best(run: Callable[[], None], file: Path, cold: bool) -> float:
    """Return the shortest of three times, in seconds, with a wait for the device at the end of each."""
    times = []
    for _ in range(3):
        if cold:
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


if __name__ == "__main__":
    main()
