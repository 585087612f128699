"""Time loading of weights next to disk reads and copies: python examples/benchmarks/read_weights.py --out results

Writes a checkpoint folder in the official formats, random bytes in V4-Flash's sizes, to a temporary folder, and reads
it, in GB/s: plain reads into one buffer, copies of a pinned buffer to the device, safetensors' own loader, and all of
`hf.load` with 1, 4, 8 and 16 threads, with what its log says. The files are in the system's cache for "cached"; for
"cold" the system is asked to drop them before each reading.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from dsv4_compile import hf
from dsv4_compile._compat import kept_in_float32
from dsv4_compile.bench.record import environment, write_json
from dsv4_compile.hf.loading import fill
from dsv4_compile.hf.loading.checkpoint import official_name
from dsv4_compile.hf.loading.placement import QUANTISED, targets
from dsv4_compile.hf.tiny import FLASH, layers_in_turn, quiet_libraries, tiny_config
from dsv4_compile.layout import MX_TILE, WEIGHT_TILE, cdiv

EXPERTS = 16
"""Experts of a layer, so that a folder of a few GB has several layers."""
QUANTISATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [WEIGHT_TILE, WEIGHT_TILE],
    "activation_scheme": "dynamic",
}


_reading_threads = fill.reading_threads


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":", 1)[0])
    parser.add_argument("--layers", type=int, default=12, help="a layer has about 0.32 GB (%(default)s)")
    parser.add_argument("--threads", default="1,4,8,16", help="threads of hf.load (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="the shortest of so many times counts (%(default)s)")
    parser.add_argument("--sizes", default="{}", help="JSON of other sizes in the configuration")
    parser.add_argument("--folder", help="where the temporary folder goes: the disk to measure")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", help="folder for read_weights.json")
    args = parser.parse_args(argv)
    said = f"python examples/benchmarks/read_weights.py --layers {args.layers} --threads {args.threads}"
    record = {"scenario": "read_weights", **environment(torch.device(args.device)), "command": said, "rows": []}
    quiet_libraries()
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(temporary)
        files = write(folder, args.layers, json.loads(args.sizes))
        size = sum(file.stat().st_size for file in files)
        sys.stdout.write(f"{size / 1e9:.2f} GB in {len(files)} files, {os.cpu_count()} CPUs, {args.device}\n")
        record |= {"gigabytes": round(size / 1e9, 2), "files": len(files), "cpus": os.cpu_count()}
        buffer = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=args.device != "cpu")
        target = torch.empty_like(buffer, device=args.device)

        def read() -> None:
            view = memoryview(buffer.numpy())
            for file in files:
                with open(file, "rb", buffering=0) as opened:
                    while opened.readinto(view):
                        pass

        def copy() -> None:
            for _ in range(max(1, size // buffer.nbytes)):
                target.copy_(buffer, non_blocking=True)

        def theirs() -> None:
            for file in files:
                load_file(file, device=args.device)

        runs: dict[str, Callable[[], None]] = {
            "read, 1 thread": read,
            "copy to the device": copy,
            "safetensors": theirs,
        }
        runs |= {f"hf.load, {n} threads": loads(folder, args.device, int(n)) for n in args.threads.split(",")}
        for name, run in runs.items():
            rates = [size / best(run, files, cold, args.repeats) / 1e9 for cold in (False, True)]
            sys.stdout.write(f"{name:20} cached {rates[0]:6.2f}   cold {rates[1]:6.2f} GB/s\n")
            sys.stdout.flush()
            row = {"what": name, "cached_gb_s": round(rates[0], 3), "cold_gb_s": round(rates[1], 3)}
            record["rows"].append({**row, "date": record["date"], "commit": record["commit"]})
            if args.out:
                write_json(record, args.out)
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        loads(folder, args.device, None)()  # the log says where its seconds go


def loads(folder: Path, device: str, threads: int | None) -> Callable[[], None]:
    """Return a function that loads the folder with so many threads, and frees the model."""

    def run() -> None:
        fill.reading_threads = _reading_threads if threads is None else lambda: threads
        hf.load(folder, max_batch_size=1, max_seq_len=256, device=device)

    return run


def write(folder: Path, layers: int, sizes: dict[str, Any]) -> list[Path]:
    """Write a folder of random bytes in e4m3 and MXFP4 with DeepSeek's names, a file for each layer."""
    config = tiny_config(**FLASH | {"n_routed_experts": EXPERTS, **layers_in_turn(layers), **sizes})
    config.dtype = torch.bfloat16
    values = config.to_dict() | {"expert_dtype": "fp4", "quantization_config": QUANTISATION}
    (folder / "config.json").write_text(json.dumps(values, default=str), encoding="utf-8")
    with torch.device("meta"):
        model: Any = DeepseekV4ForCausalLM(config)
    files: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in targets(model):
        file = ".".join(name.split(".")[:3]) if ".layers." in name else "rest"
        files.setdefault(file, []).append((name, tensor))
    for file, group in files.items():
        contents: dict[str, Tensor] = {}
        for name, tensor in group:
            contents |= stored(name, tensor, model)
        save_file(contents, folder / f"{file}.safetensors")
    return sorted(folder.glob("*.safetensors"))


def stored(name: str, tensor: Tensor, model: Any) -> dict[str, Tensor]:
    """Return what a checkpoint has of a parameter or buffer of the model, by its names there."""
    official = official_name(name)
    if name.endswith("tid2eid"):
        return {official: torch.randint(0, model.config.n_routed_experts, tensor.shape)}
    if ".mlp.experts." in name:
        prefix, whole = official.rpartition(".")[0], "down_proj" in name
        rows = tensor.shape[1] if whole else tensor.shape[1] // 2
        matrices = [f"{prefix}.{i}.{w}" for i in range(tensor.shape[0]) for w in (("w2",) if whole else ("w1", "w3"))]
        columns = tensor.shape[2]
        return {
            f"{matrix}.{leaf}": value
            for matrix in matrices
            for leaf, value in (
                ("weight", random((rows, columns // 2), torch.int8)),
                ("scale", random((rows, columns // MX_TILE), torch.float8_e8m0fnu)),
            )
        }
    path = name.rpartition(".")[0]
    if path.endswith(QUANTISED):
        shape = tuple(cdiv(size, WEIGHT_TILE) for size in tensor.shape)
        scale = f"{official.removesuffix('.weight')}.scale"
        return {official: random(tensor.shape, torch.float8_e4m3fn), scale: random(shape, torch.float8_e8m0fnu)}
    floating = torch.float32 if kept_in_float32(model, name) else torch.bfloat16
    return {official: random(tensor.shape, floating)}


def random(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of random bytes, or scales near 1."""
    low, high = (120, 130) if dtype is torch.float8_e8m0fnu else (0, 256)
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.randint(low, high, (nbytes,), dtype=torch.uint8).view(dtype).view(*shape)


def best(run: Callable[[], None], files: Sequence[Path], cold: bool, repeats: int) -> float:
    """Return the shortest time in seconds, with a wait for the device at the end."""
    times = []
    for _ in range(repeats):
        for file in files if cold else ():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        gc.collect()  # the model has cycles
    return min(times)


if __name__ == "__main__":
    main()
