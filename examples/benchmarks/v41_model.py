"""Time a V4.1-Flash of real dimensions on one GPU: python examples/benchmarks/v41_model.py --out examples/results

All layers in official formats, with random weights that are filled on the device, fewer experts and small engram
tables. For each context and batch: ms of a decode step as one CUDA graph, of the plain model and compiled, and the
floor: the bytes that the step reads, with as many experts as uniform and independent choices touch, at the rate of a
large copy. Then launches, us by kind of kernel and experts touched; ms of a token by `generate`; ms of a prompt in one
chunk. Caches hold random rows, as if requests had the context. A batch of 1 is a step of two rows, one of them padding.

A part that fails or takes too long prints its error and leaves the others running; the exit status is 1 then.
`--unproven` runs kernels that are not proven on this GPU, in place of references that no CUDA graph can hold.
"""

from __future__ import annotations

import argparse
import contextvars
import gc
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4_compile.bench import timing
from dsv4_compile.bench.nodes import by_name, nodes
from dsv4_compile.bench.parts import Parts
from dsv4_compile.bench.record import environment, write_json
from dsv4_compile.bench.v41_model import (
    experts_that_fit,
    fill_caches,
    prompt_flops,
    random_model,
    request_bytes,
    smaller,
    weight_bytes,
)
from dsv4_compile.errors import DSV4Error, GraphError
from dsv4_compile.layout import PAD_INDEX
from dsv4_compile.models import v41
from dsv4_compile.models.v41.cache import V41Caches
from dsv4_compile.models.v41.captured import CapturedSteps
from dsv4_compile.models.v41.compiled import CompiledSteps
from dsv4_compile.models.v41.config import V41Config
from dsv4_compile.models.v41.model import V41Model
from dsv4_compile.models.v41.tiny import tiny_config
from dsv4_compile.ops.common.kernels import KERNELS
from dsv4_compile.selection.proven import trust, why_unproven

BACKENDS = ("plain", "dsv4")
MODES = ("full", "tail")
OPS = (
    *("engram_rows", "engram_embed", "engram_gate", "mhc_mixes", "mhc_collapse", "mhc_post", "mx_linear"),
    *("grouped_linear", "rope_quantize_insert", "compress_pairs", "index_topk", "index_topk_blocks"),
    *("sparse_mla_mixed", "moe_route_images", "mx_experts"),
)
"""Ops of a step."""
KINDS = {
    "attention": r"sparse_mla|combine_splits",
    "selection": r"index_score|select_topk|select_groups|count_rows",
    "experts": r"gate_up|down_kernel|split_kernel|experts|reorder|_places|moe_|sum_kernel",
    "engram": r"engram",
    "hyper-connections": r"mhc",
    "cache rows": r"rope_quantize|compress_pairs",
    "GEMMs": r"gemm|round_input|nvjet|cutlass|cublas|gemv|splitK",
    "copies, fills": r"^Mem(cpy|set)",
}
"""Names of kernels of each kind; others are the rest."""
STEPS, REPEATS, SECONDS = 32, 5, 0.25
"""Most steps of a run, runs, and seconds of a run."""
PROMPT = 16
"""Tokens of the prompts of `generate`."""
Fact = dict[str, Any]


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel, "rest" for unknown names."""
    return next((kind for kind, names in KINDS.items() if re.search(names, kernel)), "rest")


class Bench:
    """Measures a model."""

    def __init__(self, model: V41Model, parts: Parts, rate: float) -> None:
        self.model, self.parts, self.rate, self.device = model, parts, rate, model.device
        self.graphs = "cuda" if model.device.type == "cuda" else "standin"
        self.steps: dict[str, CompiledSteps] = {}

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], Any]) -> float:
        self.wait()
        begin = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - begin

    def ids(self, count: int) -> Tensor:
        """Return random text without the image token, which prompts may not have."""
        ids = torch.randint(0, self.model.config.vocab_size, (count,), device=self.device)
        return ids.where(ids != self.model.config.image_token_id, 0)

    def largest_caches(self, batches: Sequence[int], context: int, step_tokens: int) -> V41Caches:
        """Return caches for steps of `step_tokens`, for the largest batch that has memory."""
        free_memory()
        for batch in sorted(batches, reverse=True):
            try:
                sizes = {"max_batch_size": batch, "max_seq_len": context, "max_step_tokens": step_tokens}
                caches = self.model.new_caches(**sizes)
                fill_caches(caches)
                return caches
            except (DSV4Error, torch.OutOfMemoryError) as fault:
                print(f"  no memory for {batch} requests of {context:,} tokens: {str(fault)[:120]}", flush=True)
            free_memory()
        raise MemoryError(f"no memory for a request of {context:,} tokens")

    def compiled_steps(self, backend: str, caches: V41Caches, buckets: Sequence[int]) -> CapturedSteps:
        """Return captured steps of the plain model, or of one compiled for `caches`, whose prompts may use it, too."""
        some: Fact = {"graphs": self.graphs, "buckets": buckets, "prompt_buckets": ()}
        chosen = None if backend == "plain" else backend
        self.steps[backend] = steps = v41.compile(self.model, caches=caches, backend=chosen, **some)
        assert steps.captured is not None, "graphs are on"
        return steps.captured

    def build(self, sizes: Sequence[int], context: int) -> None:
        """Build the kernels of eager steps of these numbers of tokens, each in a thread, by steps of padding."""
        caches = self.model.new_caches(max_batch_size=1, max_seq_len=context, max_step_tokens=2 * PROMPT)

        @torch.no_grad()
        def step(tokens: int) -> None:
            padding = torch.full((tokens,), PAD_INDEX, dtype=torch.int64, device=self.device)
            last = torch.arange(2, device=self.device)
            self.model.logits(torch.zeros_like(padding), padding, padding, caches, last=last)

        with ThreadPoolExecutor(len(sizes)) as pool:
            steps = [pool.submit(contextvars.copy_context().run, step, tokens) for tokens in sizes]
        for tokens, done in zip(sizes, steps, strict=True):
            if fault := done.exception():
                print(f"  a step of {tokens:,}: {type(fault).__name__}: {str(fault)[:300]}", flush=True)
        self.wait()

    def inputs(self, batch: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.arange(batch, device=self.device)
        return self.ids(batch), torch.full_like(rows, context - STEPS - 2), rows

    def time_step(self, captured: CapturedSteps, batch: int, context: int) -> float:
        """Return ms of a step, of the median run."""
        captured.load(*self.inputs(batch, context))
        captured.run(1)
        count = max(1, min(STEPS, int(SECONDS / self.seconds(lambda: captured.run(1)))))
        times = []
        for _ in range(REPEATS):
            captured.load(*self.inputs(batch, context))
            times.append(self.seconds(lambda: captured.run(count)) / count)
        return 1e3 * statistics.median(times)

    def decode(self, backend: str, caches: V41Caches, batches: Sequence[int], profile: bool) -> None:
        """Measure steps of all batches that the caches hold."""
        self.steps.clear()
        free_memory()
        context, fits = caches.max_seq_len, [batch for batch in batches if batch <= caches.max_batch_size]
        buckets = sorted({max(2, batch) for batch in fits})
        begin = time.perf_counter()
        try:
            captured = self.compiled_steps(backend, caches, buckets)
        except GraphError as fault:
            print(f"  no CUDA graph: {str(fault)[:300]}", flush=True)
            for batch in fits:
                self.decode_eagerly(backend, caches, batch)
            raise
        print(f"  ready after {time.perf_counter() - begin:.1f} s", flush=True)
        for batch in fits:
            ms = self.time_step(captured, batch, context)
            row = {"what": "step", "backend": backend, "context": context, "batch": batch, "ms": round(ms, 3)}
            row |= self.floor(batch, context) | {"graphs_gb": round(captured.statistics.capture_bytes / 1e9, 2)}
            self.parts.add(row | self.memory())
        if not profile:
            return
        for batch in fits if backend == "plain" else ():
            with self.parts.part(f"generate, {batch} requests"):
                self.host_time(captured, batch)
        for batch in fits:
            with self.parts.part(f"kernels, {batch} requests, {backend}"):
                self.kinds(captured, backend, batch, context)

    def floor(self, batch: int, context: int) -> Fact:
        size = weight_bytes(self.model, batch) + batch * request_bytes(self.model.config, context)
        return {"floor_ms": round(1e3 * size / self.rate, 3), "gb": round(size / 1e9, 2)}

    def memory(self) -> Fact:
        if self.device.type != "cuda":
            return {}
        return {"memory_gb": round(torch.cuda.max_memory_allocated(self.device) / 1e9, 1)}

    @torch.no_grad()
    def decode_eagerly(self, backend: str, caches: V41Caches, batch: int) -> None:
        """Time one step without a graph, where one cannot be captured."""
        inputs = self.inputs(max(2, batch), caches.max_seq_len)
        forward = self.model if backend == "plain" else torch.compile(self.model, backend=backend, dynamic=True)
        self.seconds(lambda: forward(*inputs, caches))
        ms = 1e3 * self.seconds(lambda: forward(*inputs, caches))
        row = {"what": "step", "backend": f"{backend}, no graph", "context": caches.max_seq_len, "batch": batch}
        self.parts.add(row | {"ms": round(ms, 3)} | self.floor(batch, caches.max_seq_len))

    def host_time(self, captured: CapturedSteps, batch: int) -> None:
        """Measure the host's time of a launch, and ms of a token by `generate`."""
        prompts = [self.ids(PROMPT) for _ in range(batch)]
        captured.load(*self.inputs(batch, captured.caches.max_seq_len))
        times = []
        for _ in range(STEPS):
            self.wait()
            begin = time.perf_counter()
            captured.step()
            times.append(time.perf_counter() - begin)

        def generate(count: int) -> float:
            call: Fact = {"max_new_tokens": count, "stop": [], "forward": self.steps["plain"]}
            return min(self.seconds(lambda: v41.generate(self.model, prompts, **call)) for _ in range(2))

        short, long = generate(2), generate(2 + STEPS)
        row = {"what": "generate", "batch": batch, "prompt": PROMPT, "ms": round(1e3 * (long - short) / STEPS, 3)}
        self.parts.add(row | {"host_us": round(1e6 * statistics.median(times), 1)})

    def kinds(self, captured: CapturedSteps, backend: str, batch: int, context: int) -> None:
        """Profile a step: launches, and us of kernels by kind. On a GPU alone, after all times of the host."""
        row: Fact = {"what": "kernels", "backend": backend, "context": context, "batch": batch}
        if self.device.type == "cuda":
            captured.load(*self.inputs(batch, context))
            row |= profiled(captured.step)
        if backend == "plain":
            row["experts_a_layer"] = self.experts_touched(captured.caches, batch)
        self.parts.add(row)

    @torch.no_grad()
    def experts_touched(self, caches: V41Caches, batch: int) -> float:
        """Return the average number of distinct experts of a layer in one eager step."""
        counts: list[int] = []

        def count(ffn: Any, args: tuple[Tensor, Tensor]) -> None:
            gate = ffn.gate
            ids, _ = torch.ops.dsv4.moe_route_images(
                args[0], gate.weight, gate.bias, gate.bias_vl, args[1], *ffn.routing
            )
            counts.append(ids.unique().numel())

        hooks = [layer.ffn.register_forward_pre_hook(count) for layer in self.model._stack()]
        try:
            self.model(*self.inputs(batch, caches.max_seq_len), caches)
        finally:
            for hook in hooks:
                hook.remove()
        return round(statistics.mean(counts), 1)

    def prompts(self, backend: str, sizes: Sequence[int]) -> None:
        """Measure prompts of these sizes, each in one chunk."""
        most = max(sizes)
        steps = self.steps.get(backend) if backend != "plain" else None
        if steps is None or min(steps.caches.max_step_tokens, steps.caches.max_seq_len) < most:
            self.steps.clear()
            free_memory()
            caches = self.model.new_caches(max_batch_size=1, max_seq_len=most, max_step_tokens=most)
            if backend != "plain":
                steps = v41.compile(self.model, caches=caches, backend=backend, graphs="off")
        else:
            caches = steps.caches
        for size in sizes:
            prompt = self.ids(size).tolist()
            for mode in MODES:
                with self.parts.part(f"prompt of {size:,}, {mode}, {backend}"):
                    call: Fact = {"mode": mode, "forward": steps}
                    first = self.seconds(lambda: v41.prefill(self.model, [prompt], caches, **call))  # noqa: B023
                    times = [self.seconds(lambda: v41.prefill(self.model, [prompt], caches, **call)) for _ in range(3)]  # noqa: B023
                    flops = prompt_flops(self.model.config, size, mode)
                    ms = {"ms": round(1e3 * statistics.median(times), 1), "first_s": round(first, 1)}
                    ms["tflops"] = round(flops / 1e12, 2)
                    row = {"what": "prompt", "backend": backend, "tokens": size, "mode": mode}
                    self.parts.add(row | ms | self.memory())
        for size in sizes if self.device.type == "cuda" else ():
            with self.parts.part(f"kernels of a prompt of {size:,}, {backend}"):
                prompt = self.ids(size).tolist()
                row = {"what": "prompt kernels", "backend": backend, "tokens": size, "mode": MODES[0]}
                call = {"mode": MODES[0], "forward": steps}
                self.parts.add(row | profiled(lambda: v41.prefill(self.model, [prompt], caches, **call)))  # noqa: B023


def profiled(call: Callable[[], Any]) -> Fact:
    """Return the launches of a call, ms of all kernels, and us by kind and by kernel."""
    launches = nodes(call)
    sums: dict[str, float] = {}
    for node in launches:
        kind = kind_of(node.name)
        sums[kind] = sums.get(kind, 0.0) + node.us
    row: Fact = {"launches": len(launches), "kernels_ms": round(sum(sums.values()) / 1e3, 3)}
    row["us_by_kind"] = {kind: round(us, 1) for kind, us in sorted(sums.items(), key=lambda item: -item[1])}
    return row | {"kernels": by_name(launches)[:60]}


def free_memory() -> None:
    """Return memory of dead tensors to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run(args: argparse.Namespace, parts: Parts, device: torch.device) -> None:
    """Run all parts."""
    config = tiny_config() if args.tiny else V41Config().with_layers(args.layers)
    with parts.part("weights"):
        engram = args.engram_rows if not args.tiny else config.engram_vocab_size
        experts = args.experts or experts_that_fit(config, device, args.spare_gb * 1e9, engram)
        model = random_model(smaller(config, experts, engram), device, host=args.host_tables)
        size = sum(parameter.nbytes for parameter in model.parameters())
        rate = timing.copy_rate(device)
        facts: Fact = {"layers": config.num_layers, "experts": experts, "host_tables": args.host_tables}
        facts["engram_rows"] = list(model.config.engram_rows)
        parts.record |= facts | {"weights_gb": round(size / 1e9, 2), "copy_gb_s": round(rate / 1e9, 1)}
        print("  " + "  ".join(f"{name} {parts.record[name]}" for name in (*facts, "weights_gb", "copy_gb_s")))
        bench = Bench(model, parts, rate)
    if parts.failed:
        return
    if args.unproven or not parts.record["unproven"]:
        with parts.part("kernels"):
            sizes = {*(max(2, batch) for batch in args.batches), *args.prompts}
            bench.build(sorted(sizes), args.contexts[0])
    for backend in args.backends:
        for number, context in enumerate(args.contexts):
            with parts.part(f"steps at {context:,} tokens, {backend}"):
                profile = number == 0 or args.all_kernels
                # Graphs of these caches serve prompts, too: they are compiled once.
                most = 2 * PROMPT if backend == "plain" else max(2 * PROMPT, *args.prompts, 0)
                caches = bench.largest_caches(args.batches, context, most)
                bench.decode(backend, caches, args.batches, profile)
                del caches
        if args.prompts:
            with parts.part(f"prompts, {backend}"):
                bench.prompts(backend, args.prompts)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Decode steps and prompts of DeepSeek-V4.1-Flash on one GPU.")
    for name, values in (("batches", (1, 8, 32, 128)), ("contexts", (16384, 1 << 20)), ("prompts", (2048, 8192))):
        parser.add_argument(f"--{name}", type=int, nargs="*", default=values, help="%(default)s")
    parser.add_argument("--no-prompts", dest="prompts", action="store_const", const=(), help="decode steps alone")
    parser.add_argument("--backends", nargs="*", choices=BACKENDS, default=BACKENDS, help="%(default)s")
    parser.add_argument("--layers", type=int, default=40, help="%(default)s")
    parser.add_argument("--experts", type=int, default=0, help="routed experts of a layer (0 = as many as fit)")
    parser.add_argument("--spare-gb", type=float, default=40, help="memory without weights (%(default)s)")
    parser.add_argument("--engram-rows", type=int, default=100_000, help="rows for a hash, of 16,000,000 (%(default)s)")
    parser.add_argument("--host-tables", action="store_true", help="engram tables in host memory")
    parser.add_argument("--unproven", action="store_true", help="run kernels that are not proven on this GPU")
    parser.add_argument("--all-kernels", action="store_true", help="profile all contexts, not the first alone")
    parser.add_argument("--seconds", type=float, default=150, help="seconds of the whole run (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead, to try the command")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="%(default)s")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write v41_model.json there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = arguments(argv)
    device = torch.device(args.device)
    record: Fact = {"scenario": "v41_model", **environment(device)}
    record["command"] = " ".join(["python examples/benchmarks/v41_model.py", *(sys.argv[1:] if argv is None else argv)])
    where = record["architecture"]
    unproven = [op for op in OPS if op in KERNELS and why_unproven("triton", op, where)]
    record |= {"unproven": unproven, "unproven_run": bool(args.unproven), "errors": [], "rows": []}
    ran = "their kernels" if args.unproven else "references"
    print(f"{record['machine']}, torch {record['torch']}; not proven: {', '.join(unproven) or 'none'}: {ran} run")
    parts = Parts(record, args.out, args.seconds, partial(print, flush=True))
    with warnings.catch_warnings(record=True) as told, trust() if args.unproven else nullcontext():
        warnings.simplefilter("always")
        run(args, parts, device)
    said = sorted({str(warning.message)[:300] for warning in told if "W603" in str(warning.message)})
    for text in said:
        print(text, flush=True)
    record["warnings"] = said
    if args.out is not None:
        write_json(record, args.out)
    return int(parts.failed)


if __name__ == "__main__":
    sys.exit(main())
