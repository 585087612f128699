"""Time decode steps with DSpark drafts of a DeepSeek-V4 of real dimensions, split over GPUs:
torchrun --nproc-per-node 2 examples/benchmarks/drafts.py --layers 43

V4-Flash and its three draft layers with random weights, in official formats. A step verifies 6 tokens of each request,
accepts, drafts 5 more and advances, in one CUDA graph; runs of steps need no host. For each batch, ms a step by
consecutive replays: `plain_ms` of one token, `verify_ms` of 6 tokens without anything after the logits, `step_ms` of
the whole step; and the kernels of the whole step. Drafts of random weights are never accepted, so `--accept 3,5,0`
replaces the proposed tokens by those of a run that accepts none, 3 of one step, 5 of the next; the kernels are the
same ones.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from split_model import configuration, device_and_mesh, say, seconds, split_drafts, split_model
from torch import Tensor

from dsv4_compile import DecodeRunner, hf
from dsv4_compile.bench.nodes import by_name, nodes
from dsv4_compile.bench.record import environment, write_json
from dsv4_compile.hf.model.causal_lm import cache_like
from dsv4_compile.hf.model.draft_settings import DSPARK, DraftSettings
from dsv4_compile.hf.model.taps import Taps
from dsv4_compile.hf.serving.running_drafts import CompiledSource, VerifyTokens
from dsv4_compile.hf.serving.running_steps import DecodeTokens, with_repeated
from dsv4_compile.hf.tiny import quiet_libraries
from dsv4_compile.metadata import MetadataBuffers
from dsv4_compile.parallel import EXPERT_LAYOUTS, Ranks, gather_objects
from dsv4_compile.runtime import mark_static_inputs
from dsv4_compile.runtime.addresses import named_tensors

STEPS = 32
"""Steps of a run."""
CONTEXT = 64
"""Tokens of each request before the first step; their rows in the caches are zeros."""


class ForcedDrafts:
    """Drafts whose tokens are replaced by those of a known text, as many right ones in turn as `pattern` says.

    Args:
        source: runs as it would.
        text: int64 `[R, tokens]`, the tokens of each request from position CONTEXT on.
    """

    def __init__(self, source: Any, text: Tensor, pattern: Sequence[int]) -> None:
        self.source, self.text = source, text
        self.num_drafts, self.taps = source.num_drafts, source.taps
        self.inject, self.new_caches = source.inject, source.new_caches
        self.pattern = torch.tensor(pattern, device=text.device)
        self.step = torch.zeros(1, dtype=torch.int64, device=text.device)

    def restart(self, pattern: Sequence[int]) -> None:
        """Begin a run with `pattern`, repeated to the length of the first one."""
        self.pattern.copy_(torch.tensor([pattern[i % len(pattern)] for i in range(len(self.pattern))]))
        self.step.zero_()

    def propose(self, anchors: Tensor, lengths: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Return the forced drafts, and the logits of those that `source` proposes."""
        drafts, logits = self.source.propose(anchors, lengths, *args, **options)
        columns = torch.arange(self.num_drafts, device=drafts.device)
        right = self.text.gather(1, (lengths.long()[:, None] + 1 - CONTEXT + columns).clamp(0, self.text.shape[1] - 1))
        accepted = self.pattern.index_select(0, self.step % len(self.pattern))
        self.step.add_(1)
        forced = torch.where(columns < accepted, right, (right + 1) % logits.shape[2])
        return torch.where(drafts < 0, drafts, forced), logits


class Model:
    """A split model with drafts, and what times its steps."""

    def __init__(self, args: argparse.Namespace, mesh: Any, device: torch.device) -> None:
        config = configuration(args.layers, args.tiny)
        layers = range(max(0, args.layers - 3), args.layers)
        settings = DraftSettings(DSPARK, 3, 5, Taps(tuple(layers)), noise_token=7, markov_rank=32 if args.tiny else 256)
        self.device, self.args = device, args
        self.model = split_model(config, args.weights, mesh, args.experts, device)
        drafts = split_drafts(config, settings, args.weights, mesh, args.experts, device)
        self.bytes_of_drafts = sum(parameter.nbytes for parameter in drafts.parameters())
        self.bytes_of_model = sum(parameter.nbytes for parameter in self.model.parameters())
        sizes: dict[str, Any] = {"max_batch_size": 1, "max_seq_len": CONTEXT + 8 * STEPS * 6, "max_step_tokens": 6}
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what filling weights took
        split = {"mesh": mesh, "expert_layout": args.experts, "collectives": args.collectives}
        hf.convert(self.model, **sizes, **split, drafts=drafts)
        self.model.model.adopt()
        self.model.dsv4_drafts.adopt()
        say("weights are filled")

    def compiled(self, call: Any) -> Any:
        """Return `call` compiled, unless the command says eager."""
        if self.args.eager:
            return call
        return torch.compile(call, fullgraph=True, dynamic=True, backend="dsv4")

    def runner(self, step: Any, requests: int, tokens_each: int, **options: Any) -> DecodeRunner:
        """Return a runner with captured steps of `requests` requests, which have caches of their own."""
        paged = cache_like(self.model.model, requests, None, 6).paged
        buffers = MetadataBuffers(
            max_num_batched_tokens=requests * tokens_each,
            max_num_seqs=requests,
            max_model_len=paged.max_seq_len,
            window=paged.config.sliding_window,
            ratios=paged.config.compressed_ratios,
            block_tables=paged.block_tables,
            device=self.device,
        )
        mark_static_inputs(named_tensors(paged.layers, "caches"))
        runner = DecodeRunner(
            with_repeated(self.compiled(step), self.model, paged.layers),
            buffers,
            inputs={"input_ids": buffers.tensors["input_ids"]},
            caches=paged.layers,
            buckets=[requests * tokens_each],
            graphs="cuda" if self.device.type == "cuda" else "standin",
            max_run_steps=8 * STEPS,
            **options,
        )
        runner.warm_up()
        return runner

    def ms(self, call: Callable[[], Any], steps: int) -> float:
        """Return ms a step of a call of `steps` steps."""
        return round(statistics.median(seconds(call, self.device) for _ in range(5)) / steps * 1e3, 3)

    def plain(self, requests: int, tokens: list[int]) -> tuple[Tensor, float]:
        """Return the text int64 `[R, tokens]` of plain decoding, with the first tokens, and ms a step."""
        runner = self.runner(DecodeTokens(self.model), requests, 1, sampler=lambda outputs: outputs[0])
        most = [runner.buffers.max_model_len] * requests

        def load() -> None:
            starts = list(range(requests + 1))
            runner.buffers.load(starts, [CONTEXT + 1] * requests, input_ids=tokens, reserved=most)

        load()
        chosen, _ = runner.run(6 * STEPS, requests)
        first = torch.tensor(tokens, device=self.device)[:, None]
        text = torch.cat((first, chosen[:, :, 0].t()), 1)
        load()
        return text, self.ms(lambda: [runner.step(requests) for _ in range(STEPS)], STEPS)

    def verified(self, text: Tensor) -> float:
        """Return ms of a step of 6 tokens of each request, up to its logits. Equal tokens would share experts."""
        requests = len(text)
        runner = self.runner(VerifyTokens(self.model), requests, 6)
        starts = [6 * request for request in range(requests + 1)]
        ids = text[:, :6].flatten().tolist()
        runner.buffers.load(starts, [CONTEXT + 6] * requests, input_ids=ids)
        return self.ms(lambda: [runner.step(6 * requests) for _ in range(STEPS)], STEPS)

    def measure(self, requests: int, pattern: Sequence[int]) -> dict[str, Any]:
        """Return the figures of a batch."""
        generator = torch.Generator().manual_seed(1)
        tokens: list[int] = torch.randint(1, self.model.config.vocab_size, (requests,), generator=generator).tolist()
        text, plain_ms = self.plain(requests, tokens)
        say(f"batch {requests}: plain {plain_ms} ms")
        row: dict[str, Any] = {
            "batch": requests,
            "layers": self.args.layers,
            "ranks": torch.distributed.get_world_size(),
        }
        row |= {"plain_ms": plain_ms, "verify_ms": self.verified(text)}
        say(f"batch {requests}: verify {row['verify_ms']} ms")
        source = forced = ForcedDrafts(self.model.dsv4_drafts, text, pattern)
        if not self.args.eager:
            source = CompiledSource(forced, self.compiled)
        caches = self.model.dsv4_drafts.new_caches(requests)
        runner = self.runner(VerifyTokens(self.model), requests, 6, drafts=source, draft_caches=caches)
        drafting: Any = runner.drafting

        def load(pattern: Sequence[int]) -> None:
            drafting.load(tokens, [CONTEXT] * requests, reserved=[runner.buffers.max_model_len] * requests)
            for tensor in [*named_tensors(runner.caches, "caches").values(), *caches.tensors().values()]:
                tensor.zero_()
            forced.restart(pattern)
            runner.draft()

        say("captured with drafts")
        load([0])
        chosen, _ = runner.run(6 * STEPS, requests)
        text[:, 1:].copy_(chosen[:, :, 0].t())  # a step of six tokens rounds otherwise than one of a single token
        load(pattern)
        before = drafting.accepted.clone()
        got, kept = runner.run(STEPS, requests)
        row["accepted"] = (drafting.accepted - before).tolist()
        row["tokens_a_step"] = round(float(kept.float().mean()), 3)
        row["same_text"] = same_text(text[:, 1:], got, kept)
        times = []
        for _ in range(5):
            load(pattern)
            times.append(seconds(lambda: runner.run(STEPS, requests), self.device) / STEPS * 1e3)
        row["step_ms"] = round(statistics.median(times), 3)
        row["ms_a_token"] = round(row["step_ms"] / row["tokens_a_step"], 3)
        if self.device.type == "cuda":
            load(pattern)
            kernels = nodes(lambda: runner.run(1, requests))
            row |= {"nodes": len(kernels), "kernels_ms": round(sum(node.us for node in kernels) / 1e3, 3)}
            row["kernels"] = by_name(kernels)
            row["memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        return row


def same_text(text: Tensor, tokens: Tensor, kept: Tensor) -> str:
    """Return how many tokens of a run are those of `text`, up to the first other one of each request."""
    same = total = 0
    for request in range(text.shape[0]):
        new = [int(t) for step, count in zip(tokens[:, request], kept[:, request], strict=True) for t in step[:count]]
        wanted = text[request, : len(new)].tolist()
        equal = [a == b for a, b in zip(new, wanted, strict=False)]
        same += equal.index(False) if False in equal else len(equal)
        total += len(wanted)
    return f"{same} of {total}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 1 if ranks disagree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=6, help="%(default)s")
    parser.add_argument("--batches", default="1,8,32", help="%(default)s")
    parser.add_argument("--accept", default="3,2,5,0,2,3", help="accepted drafts of successive steps (%(default)s)")
    parser.add_argument("--weights", choices=("official", "bfloat16"), default="official", help="%(default)s")
    parser.add_argument("--experts", choices=EXPERT_LAYOUTS, default=EXPERT_LAYOUTS[0], help="%(default)s")
    parser.add_argument("--collectives", default="functional", help="or symmetric (%(default)s)")
    parser.add_argument("--eager", action="store_true", help="do not compile, to try the command sooner")
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead, to try the command")
    parser.add_argument("--out", metavar="FOLDER", help="write drafts.json there")
    args = parser.parse_args(argv)
    quiet_libraries()
    device, mesh = device_and_mesh()
    ranks = Ranks.of(mesh)
    command = f"torchrun --nproc-per-node {mesh.size()} examples/benchmarks/drafts.py --layers {args.layers}"
    command += f" --batches {args.batches} --accept {args.accept} --weights {args.weights} --experts {args.experts}"
    command += f" --collectives {args.collectives}"
    contents: dict[str, Any] = {"scenario": "drafts", **environment(device), "command": command, "rows": []}
    torch.distributed.all_reduce(torch.zeros(1, device=device))  # NCCL's memory comes first
    pattern = [int(count) for count in args.accept.split(",")]
    with torch.no_grad():
        model = Model(args, mesh, device)
        contents |= {"bytes_of_a_rank": model.bytes_of_model, "bytes_of_drafts": model.bytes_of_drafts}
        equal = True
        for batch in args.batches.split(","):
            row = model.measure(int(batch), pattern)
            row["ranks_equal"] = len(set(gather_objects(repr(row["accepted"]) + row["same_text"], ranks))) == 1
            equal = equal and row["ranks_equal"]
            contents["rows"].append(row)
            if mesh.get_rank() == 0:
                print({name: value for name, value in row.items() if name != "kernels"}, file=sys.stderr, flush=True)
                if args.out:
                    write_json(contents, args.out)
    torch.distributed.destroy_process_group()
    return int(not equal)


if __name__ == "__main__":
    sys.exit(main())
