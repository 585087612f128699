"""Time long prompts in chunks on one GPU: python examples/benchmarks/prompt_chunks.py --out examples/results

Two CSA and two HCA layers of V4-Flash with random weights in official formats, converted and compiled, run prompts of
32k and 131k tokens in a `hf.RunningBatch` of one slot, for several sizes of a chunk. For each: seconds of the prompt,
ms of its first and of its last whole chunk, memory above weights and caches at both, and under the profiler ms of
kernels by kind, with the floors of attention and of the indexer's scores at the rate of GEMMs. Times and memory are
those of a second run of the prompt, without profiler. A size that fails or takes too long prints its error and leaves
the others running; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from split_model import configuration, split_model

from dsv4_compile import hf, layout
from dsv4_compile.bench.parts import Parts
from dsv4_compile.bench.record import environment, write_json
from dsv4_compile.hf.tiny import quiet_libraries
from dsv4_compile.parallel.fake_group import fake_mesh
from dsv4_compile.selection import costs

SCRIPT = "examples/benchmarks/prompt_chunks.py"
LAYERS = ["compressed_sparse_attention", "heavily_compressed_attention"] * 2
CHUNKS, PROMPTS = (2048, 4096, 8192), (32768, 131072)
TINY_CHUNKS, TINY_PROMPTS = (64, 128), (256,)
KINDS = {
    "attention": r"sparse_mla|combine_splits|combine_at_once|concatenate_slots|dequantize_pages|dense_rows",
    "indexer": r"indexer_|index_score|select_topk|select_groups|global_topk",
    "experts": r"moe_|expert|gate_up|down_kernel|split_kernel|sum_kernel|reorder|_places|count_rows",
    "hyper-connections": r"mhc",
    "norms, cache rows": r"norm|insert|compress|rope|partial_states|gather_k_cache|batch_metadata|advance",
    "GEMMs": r"gemm|quantize_activation|round_input|nvjet|cutlass|cublas|gemv|splitK|sm90_xmma",
    "copies, fills": r"^Mem(cpy|set)",
}
"""Names of kernels of each kind; others are the rest."""


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel, "rest" for unknown names."""
    return next((kind for kind, names in KINDS.items() if re.search(names, kernel)), "rest")


def floors_ms(config: Any, prompt: int) -> dict[str, float]:
    """Return ms of the GEMMs of attention and of the indexer's scores over a prompt, at the rates of an H200."""
    attended = scored = 0.0
    for kind in config.layer_types:
        ratio = layout.HCA_RATIO if kind.startswith("heavily") else layout.CSA_RATIO
        entries = torch.arange(1, prompt + 1, dtype=torch.float64) // ratio
        scored += float(entries.sum()) if ratio == layout.CSA_RATIO else 0.0
        most = config.index_topk if ratio == layout.CSA_RATIO else prompt
        attended += float((entries.clamp(max=most) + config.sliding_window).sum())
    # Scores and weighted values; a multiply and an add each.
    attention = 4 * attended * config.num_attention_heads * config.head_dim / costs.H200.flops["bfloat16"]
    indexer = 2 * scored * config.index_n_heads * config.index_head_dim / costs.H200.flops["e4m3"]
    return {"attention": round(attention * 1e3, 1), "indexer": round(indexer * 1e3, 1)}


class Prompt:
    """Runs a prompt in chunks, as often as asked."""

    def __init__(self, serving: Any, tokens: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(1, serving.model.config.vocab_size, (tokens,), generator=generator).tolist()
        self.serving, self.device = serving, device

    def steps(self, each: Callable[[], None]) -> None:
        """Run the prompt, and call `each` after every chunk, when the device has ended it."""
        request = self.serving.submit(self.ids, max_new_tokens=1)
        while not request.tokens:
            self.serving.step()
            each()
        while not self.serving.idle:
            self.serving.step()

    def measure(self) -> dict[str, Any]:
        """Return seconds of the prompt, and ms and memory of its chunks."""
        ends, peaks = [], []
        cuda = self.device.type == "cuda"

        def note() -> None:
            if cuda:
                torch.cuda.synchronize(self.device)
                peaks.append(torch.cuda.max_memory_allocated(self.device))
                torch.cuda.reset_peak_memory_stats(self.device)
            ends.append(time.perf_counter())

        note()
        before = torch.cuda.memory_allocated(self.device) if cuda else 0
        self.steps(note)
        took = [(end - begin) * 1e3 for begin, end in itertools.pairwise(ends)]
        row: dict[str, Any] = {"seconds": round(ends[-1] - ends[0], 3), "steps": len(took)}
        row |= {"first_ms": round(took[0], 2), "last_ms": round(took[-1], 2)}
        if cuda:
            above = [(peak - before) / 2**30 for peak in peaks[1:]]
            row |= {"first_gib": round(above[0], 3), "last_gib": round(above[-1], 3), "most_gib": round(max(above), 3)}
        return row

    def kinds_ms(self) -> tuple[dict[str, float], list[tuple[str, float]]]:
        """Return ms by kind of all kernels of the prompt under the profiler, and of those that take most."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.steps(lambda: None)
            torch.cuda.synchronize(self.device)
        kinds: dict[str, float] = {}
        kernels: dict[str, float] = {}
        for event in profile.events():
            if event.device_type.name == "CUDA":
                ms = event.device_time / 1e3
                kind = kind_of(event.name)
                kinds[kind] = kinds.get(kind, 0.0) + ms
                kernels[event.name[:80]] = kernels.get(event.name[:80], 0.0) + ms

        def most(table: dict[str, float]) -> list[tuple[str, float]]:
            return sorted(((name, round(ms, 1)) for name, ms in table.items()), key=lambda item: -item[1])

        return dict(most(kinds)), most(kernels)[:24]


def converted(tiny: bool, experts: int, tokens: int, device: torch.device) -> Any:
    """Return a converted model of `LAYERS` with random weights in official formats."""
    sizes: dict[str, Any] = {"layer_types": LAYERS} | ({} if tiny else {"n_routed_experts": experts})
    with fake_mesh(1, device) as mesh:
        model = split_model(configuration(len(LAYERS), tiny, **sizes), "official", mesh, "rows", device)
    hf.convert(model, max_batch_size=1, max_seq_len=tokens)
    return model


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a size fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--chunks", help=f"tokens of a chunk ({','.join(map(str, CHUNKS))})")
    parser.add_argument("--prompts", help=f"tokens of a prompt ({','.join(map(str, PROMPTS))})")
    parser.add_argument("--experts", type=int, default=256, help="routed experts of a layer (%(default)s)")
    parser.add_argument("--seconds", type=float, default=85.0, help="of the whole run (%(default)s)")
    parser.add_argument("--eager", action="store_true", help="do not compile, to try the command sooner")
    parser.add_argument("--tiny", action="store_true", help="small layers instead, to try the command")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write prompt_chunks.json there")
    args = parser.parse_args(argv)
    quiet_libraries()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    chunks = [int(n) for n in args.chunks.split(",")] if args.chunks else TINY_CHUNKS if args.tiny else CHUNKS
    prompts = [int(n) for n in args.prompts.split(",")] if args.prompts else TINY_PROMPTS if args.tiny else PROMPTS
    defaults = vars(parser.parse_args([]))
    changed = {name: value for name, value in vars(args).items() if value != defaults[name] and name != "out"}
    options = (f" --{name}" + (f" {value}" if value is not True else "") for name, value in changed.items())
    record: dict[str, Any] = {"scenario": "prompt_chunks", **environment(device)}
    record |= {"command": f"python {SCRIPT}{''.join(options)}", "layers": LAYERS, "errors": [], "rows": []}
    parts = Parts(record, args.out, args.seconds, lambda line: print(line, flush=True))
    length = max(prompts) + layout.KV_BLOCK
    with parts.part("model"):
        model = converted(args.tiny, args.experts, length, device)
    for chunk in chunks if not parts.failed else ():
        with parts.part(f"chunks of {chunk}"), torch.no_grad():
            begin = time.perf_counter()
            serving = hf.RunningBatch(
                model, slots=1, max_seq_len=length, prefill_chunk=chunk, graphs="off",
                backend=None if args.eager else "dsv4",
            )  # fmt: skip
            started = round(time.perf_counter() - begin, 1)
            for tokens in prompts:
                prompt = Prompt(serving, tokens, device)
                row: dict[str, Any] = {"chunk": chunk, "prompt": tokens, "start_s": started}
                prompt.steps(lambda: None)
                row |= prompt.measure() | {"floors_ms": floors_ms(model.config, tokens)}
                if device.type == "cuda":
                    row["ms"], row["kernels"] = prompt.kinds_ms()
                parts.add(row)
            del serving, prompt
    if args.out:
        write_json(record, args.out)
    return int(parts.failed)


if __name__ == "__main__":
    sys.exit(main())
