"""Time prompts and long contexts of a V4-Flash of real dimensions, split over GPUs:
torchrun --nproc-per-node 2 examples/benchmarks/split_prompts.py --layers 43

Random weights in official formats; a rank allocates its part alone. First, a model of a context of 16k is compiled and
warmed up: ms to the first token on the host, for prompts of lengths that are new, with the kernels' sum, and work that
was late: builds, compilations, captures. Then decode steps of one request at growing contexts of zeroed rows, in one
CUDA graph for a context of 1M. Last, long prompts in an `hf.RunningBatch` of one slot, in chunks of 8,192 tokens.
A part that fails prints its error and leaves the others running; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from split_model import configuration, device_and_mesh, say, seconds, split_model

from dsv4_compile import DecodeRunner, hf
from dsv4_compile.backend import dsv4
from dsv4_compile.bench.nodes import by_name, nodes
from dsv4_compile.bench.parts import Parts
from dsv4_compile.bench.record import environment
from dsv4_compile.debug import compile_log
from dsv4_compile.hf.model.cache import cache_like
from dsv4_compile.hf.serving.running_steps import DecodeTokens, with_repeated
from dsv4_compile.hf.tiny import quiet_libraries
from dsv4_compile.metadata import MetadataBuffers
from dsv4_compile.parallel import EXPERT_LAYOUTS
from dsv4_compile.runtime import mark_static_inputs
from dsv4_compile.runtime.addresses import named_tensors

STEPS, CHUNK = 32, 8192
"""Decode steps of a measurement, and tokens of a chunk of a long prompt."""


class Split:
    """A split model, compiled for one part after the other, each with caches of the size that it takes."""

    def __init__(self, args: argparse.Namespace, mesh: Any, device: torch.device) -> None:
        self.args, self.mesh, self.device = args, mesh, device
        self.model = split_model(configuration(args.layers, args.tiny), "official", mesh, args.experts, device)
        longest = max([*args.prompts, *args.long, *args.contexts]) + 8 * STEPS
        split = {"mesh": mesh, "expert_layout": args.experts, "collectives": args.collectives}
        hf.convert(self.model, max_batch_size=1, max_seq_len=longest, max_step_tokens=CHUNK, **split)
        say("weights are filled")

    def first_token(self, length: int, cache: Any) -> list[int]:
        """Return the first new token of a random prompt of `length` tokens, on the host."""
        cache.reset()
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(1, self.model.config.vocab_size, (1, length), generator=generator).to(self.device)
        with torch.no_grad():
            out = self.model(ids, attention_mask=torch.ones_like(ids), logits_to_keep=1, past_key_values=cache)
        tokens: list[int] = out.logits[:, -1].argmax(-1).tolist()
        return tokens

    def first_tokens(self, parts: Parts) -> None:
        """Time the first token of new lengths."""
        begin = time.perf_counter()
        most = self.args.prompts[-1]
        cache = hf.new_cache(self.model, max_seq_len=2 * most, max_step_tokens=most)
        if not self.args.eager:
            options: dict[str, Any] = {"dsv4.cudagraph": "full"} if self.device.type == "cuda" else {}
            self.model.compile(fullgraph=True, backend=dsv4, options=options)
            say(str(hf.warm_up(self.model, cache=cache)))
        started = round(time.perf_counter() - begin, 1)
        for length in self.args.prompts:
            times = []
            with compile_log() as late:
                for shorter in range(3):
                    times.append(seconds(lambda n=length - shorter: self.first_token(n, cache), self.device) * 1e3)
            row: dict[str, Any] = {"measured": "first token", "tokens": length, "first_token_ms": round(min(times), 2)}
            row |= {"slowest_ms": round(max(times), 2), "late": [str(entry) for entry in late], "start_s": started}
            if self.device.type == "cuda":
                kernels = nodes(lambda n=length: self.first_token(n, cache))
                row |= {"kernels_ms": round(sum(kernel.us for kernel in kernels) / 1e3, 2)}
                row["kernels"] = by_name(kernels)
            parts.add(row)
        self.model._compiled_call_impl = None
        torch.compiler.reset()

    def decode(self, parts: Parts) -> None:
        """Time decode steps of one request at growing contexts in one CUDA graph."""
        paged = cache_like(self.model.model, 1, max(self.args.contexts) + 8 * STEPS, 1).paged
        buffers = MetadataBuffers(
            max_num_batched_tokens=1,
            max_num_seqs=1,
            max_model_len=paged.max_seq_len,
            window=paged.config.sliding_window,
            ratios=paged.config.compressed_ratios,
            block_tables=paged.block_tables,
            device=self.device,
        )
        self.model.model.adopt()
        mark_static_inputs(named_tensors(paged.layers, "caches"))
        step: Any = DecodeTokens(self.model)
        if not self.args.eager:
            step = torch.compile(step, fullgraph=True, dynamic=True, backend="dsv4")
        runner = DecodeRunner(
            with_repeated(step, self.model, paged.layers),
            buffers,
            inputs={"input_ids": buffers.tensors["input_ids"]},
            caches=paged.layers,
            buckets=[1],
            graphs="cuda" if self.device.type == "cuda" else "standin",
            max_run_steps=8 * STEPS,
            sampler=lambda outputs: outputs[0],
        )
        runner.warm_up()
        for context in self.args.contexts:
            buffers.load([0, 1], [context + 1], input_ids=[7], reserved=[paged.max_seq_len])
            times = [seconds(lambda: [runner.step(1) for _ in range(STEPS)], self.device) for _ in range(5)]
            row: dict[str, Any] = {"measured": "decode", "context": context}
            row["step_ms"] = round(statistics.median(times) / STEPS * 1e3, 3)
            if self.device.type == "cuda":
                kernels = nodes(lambda: runner.step(1))
                row |= {"nodes": len(kernels), "kernels": by_name(kernels)}
                row["memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
            parts.add(row)

    def long_prompts(self, parts: Parts) -> None:
        """Time long prompts in chunks."""
        chunk = min(CHUNK, max(self.args.long))
        backend = None if self.args.eager else "dsv4"
        with hf.RunningBatch(
            self.model, slots=1, max_seq_len=max(self.args.long) + 256, prefill_chunk=chunk, graphs="off",
            backend=backend,
        ) as batch, torch.no_grad():  # fmt: skip
            if self.mesh.get_rank():
                batch.serve()
                return
            for tokens in self.args.long:
                ids = torch.randint(1, self.model.config.vocab_size, (tokens,)).tolist()
                times = [
                    seconds(lambda i=ids: next(iter(batch.submit(i, max_new_tokens=1))), self.device) for _ in "12"
                ]
                row: dict[str, Any] = {"measured": "long prompt", "tokens": tokens, "chunk": chunk}
                row |= {"seconds": round(min(times), 3), "first_run_s": round(max(times), 3)}
                if self.device.type == "cuda":
                    row["memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
                parts.add(row)


def numbers(text: str) -> list[int]:
    """Return the numbers of `text`, which commas separate, in order."""
    return sorted(int(number) for number in text.split(",") if number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a part fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=6, help="%(default)s")
    parser.add_argument("--prompts", type=numbers, default="64,512,2048,8192", help="%(default)s")
    parser.add_argument("--contexts", type=numbers, default="64,16384,131072,1048576", help="%(default)s")
    parser.add_argument("--long", type=numbers, default="32768,131072", help="tokens of long prompts (%(default)s)")
    parser.add_argument("--experts", choices=EXPERT_LAYOUTS, default="rows", help="%(default)s")
    parser.add_argument("--collectives", default="symmetric", help="or functional (%(default)s)")
    parser.add_argument("--seconds", type=float, default=560.0, help="of the whole run (%(default)s)")
    parser.add_argument("--eager", action="store_true", help="do not compile, to try the command sooner")
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead, to try the command")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write split_prompts.json there")
    args = parser.parse_args(argv)
    quiet_libraries()
    device, mesh = device_and_mesh()
    torch.distributed.all_reduce(torch.zeros(1, device=device))  # NCCL's memory comes first
    command = f"torchrun --nproc-per-node {mesh.size()} examples/benchmarks/split_prompts.py --layers {args.layers}"
    command += f" --experts {args.experts} --collectives {args.collectives}"
    for name in ("prompts", "contexts", "long"):
        command += f" --{name}={','.join(map(str, getattr(args, name)))}"
    record: dict[str, Any] = {"scenario": "split_prompts", **environment(device), "command": command}
    record |= {"layers": args.layers, "ranks": mesh.size(), "errors": [], "rows": []}
    leads = mesh.get_rank() == 0
    parts = Parts(record, args.out if leads else None, args.seconds, lambda line: say(line) if leads else None)
    split = Split(args, mesh, device)
    with torch.no_grad():
        for name in ("first_tokens", "decode", "long_prompts"):
            if getattr(args, {"first_tokens": "prompts", "decode": "contexts", "long_prompts": "long"}[name]):
                with parts.part(name):
                    getattr(split, name)(parts)
    torch.distributed.destroy_process_group()
    return int(parts.failed)


if __name__ == "__main__":
    sys.exit(main())
