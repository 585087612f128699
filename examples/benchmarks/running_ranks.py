"""Time an `hf.RunningBatch` of a V4-Flash that is split over GPUs, with requests of random lengths:
torchrun --nproc-per-node 2 examples/benchmarks/running_ranks.py

Random weights in official formats (e4m3 linears, MXFP4 experts) or bfloat16; a rank allocates its part alone. Without
and with drafts, greedy and sampled: tokens a second of all requests, submitted together; ms of a step; ms from the
submission of a request to its first token on the host, and the same of a request alone, with a length that no request
had. Greedy drafts are those of a DSpark layer, then replaced: a pattern says how many of them are right, as random
weights would accept none. The tokens and caches of the ranks are compared.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from split_model import configuration, device_and_mesh, say, split_drafts, split_model
from torch import Tensor

from dsv4_compile import hf
from dsv4_compile.bench.record import environment, write_json
from dsv4_compile.hf.model.draft_settings import DSPARK, DraftSettings, Taps
from dsv4_compile.hf.tiny import quiet_libraries
from dsv4_compile.parallel import EXPERT_LAYOUTS, Ranks, agreement, gather_objects

DRAFTS = 5
"""Drafts of a step."""
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95}
_ANCHORS = 1024
"""Tokens are known modulo this."""


class KnownDrafts:
    """Drafts that are replaced by tokens of known texts, as many right ones as `pattern` says for a length.

    Args:
        source: runs as it would.
        max_seq_len: most tokens of a text.
        pattern: accepted drafts of a request by its length, repeated.
    """

    def __init__(self, source: Any, max_seq_len: int, pattern: Sequence[int], device: torch.device) -> None:
        self.source, self.num_drafts, self.taps = source, source.num_drafts, source.taps
        self.inject, self.new_caches, self.adopt = source.inject, source.new_caches, source.adopt
        self.table = torch.zeros(max_seq_len, _ANCHORS, DRAFTS, dtype=torch.int64, device=device)
        self.pattern = torch.tensor(pattern, device=device)

    def learn(self, texts: Sequence[Sequence[int]], new: Sequence[int]) -> None:
        """Know the last tokens of `texts`, so many of each as `new` says."""
        table = torch.zeros(self.table.shape, dtype=torch.int64)
        for text, count in zip(texts, new, strict=True):
            for length in range(len(text) - count, len(text)):
                following = torch.tensor(text[length + 1 : length + 1 + DRAFTS])
                table[length, text[length] % _ANCHORS, : len(following)] = following
        self.table.copy_(table)

    def propose(self, anchors: Tensor, lengths: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Return the drafts of known texts, and the logits of those that `source` proposes."""
        drafts, logits = self.source.propose(anchors, lengths, *args, **options)
        at = lengths.long().clamp(0, self.table.shape[0] - 1)
        right = self.table[at, anchors.clamp(min=0) % _ANCHORS]
        columns = torch.arange(self.num_drafts, device=drafts.device)
        accepted = self.pattern[at % len(self.pattern)]
        known = torch.where(columns < accepted[:, None], right, (right + 1) % logits.shape[2])
        return torch.where(drafts < 0, drafts, known), logits


def random_requests(args: argparse.Namespace, vocab: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Return prompts and options of random lengths, the same in every run."""
    rng = random.Random(args.seed)
    requests = []
    for _ in range(args.requests):
        length, new = rng.randint(*args.prompts), rng.randint(*args.new)
        requests.append(([rng.randrange(1, vocab) for _ in range(length)], {"max_new_tokens": new}))
    return requests


def run(batch: Any, requests: Sequence[tuple[list[int], dict[str, Any]]]) -> tuple[list[Any], dict[str, Any]]:
    """Run requests through `batch`, all submitted at once; return them and the figures."""
    steps: list[float] = []
    first: dict[Any, float] = {}
    begin = time.perf_counter()
    submitted = [batch.submit(ids, **options) for ids, options in requests]
    while not batch.idle:
        before = time.perf_counter()
        new = batch.step()
        after = time.perf_counter()
        steps.append(1e3 * (after - before))
        for request, _ in new:
            first.setdefault(request, 1e3 * (after - begin))
    seconds = time.perf_counter() - begin
    tokens = sum(len(request.tokens) for request in submitted)
    assert all(request.state == "length" for request in submitted)
    return submitted, {
        "requests": len(submitted),
        "prompt_tokens": sum(len(ids) for ids, _ in requests),
        "new_tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_a_second": round(tokens / seconds, 1),
        "steps": len(steps),
        "step_ms": percentiles(steps),
        "first_token_ms": percentiles([*first.values()]),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return median, 90th percentile and largest of `values`."""
    ordered = sorted(values)
    p90 = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return {"median": round(statistics.median(ordered), 3), "p90": round(p90, 3), "max": round(ordered[-1], 3)}


def first_tokens_alone(batch: Any, lengths: Sequence[int], vocab: int) -> dict[str, float]:
    """Return ms from submission to the first token of requests that run alone, by the length of their prompts."""
    times = {}
    for length in lengths:
        prompt = torch.randint(1, vocab, (length,)).tolist()
        begin = time.perf_counter()
        next(iter(batch.submit(prompt, max_new_tokens=1)))
        times[str(length)] = round(1e3 * (time.perf_counter() - begin), 3)
    return times


def lead(batch: Any, args: argparse.Namespace, known: KnownDrafts | None) -> list[dict[str, Any]]:
    """Run all requests on rank 0: with `known`, drafted; return rows of figures."""
    vocab = batch.model.config.vocab_size
    requests = random_requests(args, vocab)
    run(batch, requests[:2])  # what the first step of a process costs
    rows = []
    for sampled in (False, True):
        options = [SAMPLED | {"seed": i} if sampled else {} for i in range(len(requests))]
        both = [(ids, each | extra) for (ids, each), extra in zip(requests, options, strict=True)]
        before = batch.draft_statistics.accepted
        submitted, row = run(batch, both)
        if known is not None:
            after = batch.draft_statistics
            accepted = [new - old for new, old in zip(after.accepted, before, strict=True)]
            row["accepted"] = accepted
            row["tokens_a_verified_step"] = round(
                sum(count * (drafts + 1) for drafts, count in enumerate(accepted)) / max(1, sum(accepted)), 3
            )
        row |= {"drafts": known is not None, "sampled": sampled}
        row["texts"] = [request.tokens for request in submitted]
        rows.append(row)
        say(f"{row['tokens_a_second']} tokens a second, {'sampled' if sampled else 'greedy'}")
    rows[0]["first_token_alone_ms"] = first_tokens_alone(batch, args.alone, vocab)
    return rows


def measure(model: Any, args: argparse.Namespace, device: torch.device, known: KnownDrafts | None) -> list[Any]:
    """Run a batch on all ranks; return its rows on all of them."""
    ranks = Ranks.of(args.mesh)
    begin = time.perf_counter()
    sizes = {"slots": args.slots, "max_seq_len": args.max_seq_len, "prefill_chunk": args.chunk}
    graphs = "auto" if device.type == "cuda" else "standin"
    backend = None if args.eager else "dsv4"
    with hf.RunningBatch(model, **sizes, backend=backend, graphs=graphs, drafts=known is not None) as batch:
        start_s = round(time.perf_counter() - begin, 1)
        say(f"a batch {'with' if known else 'without'} drafts is compiled and captured")
        rows: list[Any] = lead(batch, args, known) if ranks.rank == 0 else batch.serve() or []
    cached = [tensor for layer in batch.caches for tensor in layer.tensors().values()]
    bits = gather_objects(agreement.digest(*cached), ranks)
    rows = gather_objects(rows, ranks)[0]
    for row in rows:
        row |= {"start_s": start_s, "captures": batch.statistics.captures, "ranks_equal": len(set(bits)) == 1}
        if device.type == "cuda":
            row["memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    return rows


def same_tokens(texts: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> str:
    """Return how many tokens are those of `others`, up to the first that differs in each text."""
    same = total = 0
    for text, other in zip(texts, others, strict=True):
        equal = [a == b for a, b in zip(text, other, strict=True)]
        same += equal.index(False) if False in equal else len(equal)
        total += len(equal)
    return f"{same} of {total}"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=6, help="%(default)s")
    parser.add_argument("--requests", type=int, default=40, help="%(default)s")
    parser.add_argument("--slots", type=int, default=16, help="%(default)s")
    parser.add_argument("--chunk", type=int, default=2048, help="most prompt tokens of a step (%(default)s)")
    parser.add_argument("--accept", default="3,2,5,0,2,3", help="right drafts by length, repeated (%(default)s)")
    parser.add_argument("--weights", choices=("official", "bfloat16"), default="official", help="%(default)s")
    parser.add_argument("--experts", choices=EXPERT_LAYOUTS, default=EXPERT_LAYOUTS[0], help="%(default)s")
    parser.add_argument("--collectives", default="functional", help="or symmetric (%(default)s)")
    parser.add_argument("--no-drafts", action="store_true", help="measure requests without drafts alone")
    parser.add_argument("--eager", action="store_true", help="do not compile, to try the command sooner")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short requests, to try the command")
    parser.add_argument("--seed", type=int, default=0, help="of the requests' lengths (%(default)s)")
    parser.add_argument("--out", metavar="FOLDER", help="write running_ranks.json there")
    args = parser.parse_args(argv)
    args.prompts, args.new = ((4, 60), (4, 24)) if args.tiny else ((16, 2000), (32, 256))
    args.alone = (7, 50) if args.tiny else (64, 500, 2040)
    args.max_seq_len = 128 if args.tiny else 2304
    if args.tiny:
        args.chunk, args.slots = min(args.chunk, 64), min(args.slots, 4)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 1 if ranks disagree."""
    args = arguments(argv)
    quiet_libraries()
    device, mesh = device_and_mesh()
    args.mesh = mesh
    command = f"torchrun --nproc-per-node {mesh.size()} examples/benchmarks/running_ranks.py"
    command = " ".join([command, *(sys.argv[1:] if argv is None else argv)])
    contents: dict[str, Any] = {"scenario": "running_ranks", **environment(device), "command": command, "rows": []}
    torch.distributed.all_reduce(torch.zeros(1, device=device))  # NCCL's memory comes first
    config = configuration(args.layers, args.tiny)
    model = split_model(config, args.weights, mesh, args.experts, device)
    drafts = None
    if not args.no_drafts:
        taps = Taps(tuple(range(max(0, args.layers - 3), args.layers)))
        settings = DraftSettings(DSPARK, 3, DRAFTS, taps, noise_token=7, markov_rank=32 if args.tiny else 256)
        drafts = split_drafts(config, settings, args.weights, mesh, args.experts, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what filling weights took
    split = {"mesh": mesh, "expert_layout": args.experts, "collectives": args.collectives}
    hf.convert(model, max_batch_size=1, max_seq_len=args.max_seq_len, attention_only=False, **split, drafts=drafts)
    say("weights are filled")
    contents["bytes_of_a_rank"] = sum(parameter.nbytes for parameter in model.parameters())

    rows = measure(model, args, device, None)
    texts = rows[0]["texts"]
    if args.out and mesh.get_rank() == 0:  # what follows may be cut short
        shown = [{name: value for name, value in row.items() if name != "texts"} for row in rows]
        write_json(contents | {"rows": shown}, args.out)
    if drafts is not None:
        pattern = [int(count) for count in args.accept.split(",")]
        known = KnownDrafts(model.dsv4_drafts, args.max_seq_len, pattern, device)
        requests = random_requests(args, config.vocab_size)
        known.learn([ids + text for (ids, _), text in zip(requests, texts, strict=True)], [len(t) + 1 for t in texts])
        model.__dict__["dsv4_drafts"] = known
        rows += measure(model, args, device, known)
    for row in rows:
        given = row.pop("texts")
        if not row["sampled"]:
            row["same_tokens"] = same_tokens(given, texts)
        if mesh.get_rank() == 0:
            print(row, file=sys.stderr, flush=True)
    contents["rows"] = rows
    if args.out and mesh.get_rank() == 0:
        write_json(contents, args.out)
    torch.distributed.destroy_process_group()
    return int(not all(row["ranks_equal"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
