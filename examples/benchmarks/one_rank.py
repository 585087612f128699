"""Time the work of one rank of a split V4-Flash in a decode step, on one GPU, without the collectives:
python examples/benchmarks/one_rank.py

The other ranks do not exist: torch's fake process group returns from collectives at once. Weights are random, in the
official formats, and only this rank's part of them is allocated. Part "attention" times a layer of each kind at each
number of ranks, as `dsv4 bench decode_step` does, and gives its share of the time on one rank. Part "whole" times a
step of all layers, one graph launch, and gives the time to read its weights. With both parts, each has a separate
process and record.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from split_model import (
    STEPS,
    captures,
    configuration,
    seconds,
    split_model,
    step_figures,
    weights_read,
)

from dsv4_compile import bench, hf, progress
from dsv4_compile.bench import decode_step
from dsv4_compile.bench.record import environment, now, write_json
from dsv4_compile.bench.table import align
from dsv4_compile.bench.timing import copy_rate
from dsv4_compile.config import DeepseekV4Config
from dsv4_compile.hf.model.cache import cache_like
from dsv4_compile.hf.tiny import quiet_libraries
from dsv4_compile.parallel import EXPERT_LAYOUTS, Ranks
from dsv4_compile.parallel.fake_group import fake_mesh

SCRIPT = "examples/benchmarks/one_rank.py"
PARTS = ("attention", "whole")
EXCLUDED = "excluded: torch's fake process group, whose all-reduces return at once and whose gathers copy this part"
"""Sentence about collectives in each record: its times leave them out."""
TINY = DeepseekV4Config(
    hidden_size=128, num_heads=8, q_lora_rank=128, o_groups=8, o_lora_rank=128, index_n_heads=2, index_topk=16
)
"""A layer for a CPU that eight ranks split into whole blocks of quantisation."""
MOST = {"SWA": 0.55, "HCA": 0.65, "CSA": 0.75}
"""Largest share of the time on one rank that a layer of each kind should take on `AT[0]` ranks with `AT[1]` tokens."""
AT = (8, 32)
Row = dict[str, Any]


@dataclass(frozen=True)
class Attention:
    """Scenario for `bench.run`: the shards of layers on one rank, for each number of `ranks`."""

    ranks: Sequence[int]
    context: int
    config: DeepseekV4Config

    COLUMNS = (*decode_step.COLUMNS, "ranks")

    def problems(self, device: torch.device, only: bench.Only) -> Iterator[bench.Problem]:
        """Yield the problems of each number of ranks, inside its process group."""
        for size in self.ranks:
            with fake_mesh(size, device) as mesh:
                yield from decode_step.problems(device, only, self.config, self.context, mesh)


def show(title: str, lines: Sequence[Sequence[str]]) -> None:
    """Print a table with its head in the first line."""
    print("\n".join([title, *align(lines)]))


def shares(rows: Sequence[Row]) -> None:
    """Add to each row with a time "of_one" and "cold_of_one", its shares of the times of one rank."""
    one = {(row["layer"], row["end"], row["tokens"]): row for row in rows if row["ranks"] == 1 and row["us"]}
    for row in rows:
        base = one.get((row["layer"], row["end"], row["tokens"]))
        if base is not None and row["us"]:
            row["of_one"] = round(row["us"] / base["us"], 3)
            if row["cold_us"] and base["cold_us"]:
                row["cold_of_one"] = round(row["cold_us"] / base["cold_us"], 3)


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each row that `MOST` bounds."""
    sentences = []
    for row in rows:
        if (row["ranks"], row["tokens"]) == AT and "of_one" in row:
            share, most = row["of_one"], MOST[row["layer"]]
            said = "within" if share <= most else "above"
            sentences.append(
                f"{row['layer']}, {AT[0]} ranks, batch {AT[1]}: {share:.2f} of one rank, {said} {most:.2f}"
            )
    return sentences


def attention(args: argparse.Namespace, device: torch.device, command: str) -> int:
    """Measure and show part "attention"; return 1 if a layer is wrong or failed."""
    only = {
        "layer": set(MOST),
        "weights": {"fp8"},
        "end": {args.end},
        "impl": {"eager graph" if args.eager else "graph"},
    }
    if device.type == "cuda":
        only["tokens"] = set(args.tokens.split(","))
    context, config = (128, TINY) if args.tiny else (args.context, DeepseekV4Config.flash())
    scenario = Attention([int(ranks) for ranks in args.ranks.split(",")], context, config)

    def so_far(record: Row) -> None:
        shares(record["rows"])
        if args.out:
            write_json(record | {"collectives": EXCLUDED, "verdicts": verdicts(record["rows"])}, args.out)

    with progress.listen(progress.lines(sys.stderr)):
        record = bench.run(
            "one_rank_attention", only=only, device=device, so_far=so_far, modules=[scenario], command=command
        )
    so_far(record)
    lines = [["layer", "ranks", "batch", "us", "cold, us", "of one rank", "cold", "floor, us"]]
    for row in record["rows"]:
        missing = "-" if row["us"] else str(row["status"])
        times = [f"{row[name]:.1f}" if row.get(name) else missing for name in ("us", "cold_us")]
        parts = [f"{row[name]:.2f}" if name in row else "-" for name in ("of_one", "cold_of_one")]
        lines.append([row["layer"], str(row["ranks"]), str(row["tokens"]), *times, *parts, f"{row['floor_us']:.1f}"])
    show(f"A decode layer on one of several ranks, context {context:,}, collectives excluded", lines)
    faults = [row for row in record["rows"] if row["status"] in bench.FAULTS]
    print("\n".join([*verdicts(record["rows"]), *(f"{row['status']}: {row['note']}" for row in faults)]))
    return int(bool(faults))


def whole(args: argparse.Namespace, device: torch.device, command: str) -> int:
    """Measure and show part "whole"."""
    size, batches = args.whole_ranks, [int(batch) for batch in args.batches.split(",")]
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    record: Row = {"scenario": "one_rank_whole", **environment(device), "command": command, "collectives": EXCLUDED}
    rate = copy_rate(device)  # before weights fill the memory
    record |= {"copy_gb_s": round(rate / 1e9, 1), "rows": []}
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with fake_mesh(size, device) as mesh:
        begin = time.perf_counter()
        model = split_model(configuration(args.layers, args.tiny), "official", mesh, args.experts, device)
        nbytes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
        length = args.prompt + 8 * STEPS
        options: dict[str, Any] = {"max_batch_size": 1, "max_seq_len": length, "max_step_tokens": 1}
        hf.convert(model, **options, attention_only=False, mesh=mesh, expert_layout=args.experts)
        if not args.eager:
            model.compile(fullgraph=True, backend="dsv4", options=captures(device))
        cache = cache_like(model.model, max(batches))
        record |= {"bytes_of_a_rank": sum(nbytes.values()), "built_s": round(time.perf_counter() - begin, 1)}
        for batch in batches:
            row = {"date": now(), "commit": record["commit"], "layers": args.layers, "ranks": size, "batch": batch}
            row |= steps(model, cache, batch, args.prompt, Ranks.of(mesh), device)
            row["weights_gb"] = weights_read(model.config, batch, nbytes)
            row["floor_ms"] = round(row["weights_gb"] * 1e12 / rate, 3)
            record["rows"].append(row)
            print({name: value for name, value in row.items() if name != "kernels"}, file=sys.stderr, flush=True)
            if args.out:
                write_json(record, args.out)
    lines = [["batch", "step, ms", "floor of weights, ms", "weights read, GB", "kernels", "graph launches"]]
    for row in record["rows"]:
        counts = [str(row.get(name, "-")) for name in ("nodes", "graph_launches")]
        times = [f"{row[name]:.2f}" for name in ("step_ms", "floor_ms")]
        lines.append([str(row["batch"]), *times, f"{row['weights_gb']:.1f}", *counts])
    show(f"A step of {args.layers} layers on one of {size} ranks, collectives excluded", lines)
    return 0


def steps(model: Any, cache: Any, batch: int, prompt: int, ranks: Ranks, device: torch.device) -> Row:
    """Return the figures of steps of `batch` sequences that follow `prompt` steps."""
    # Tokens of this rank's part of the vocabulary: nobody adds the embeddings of others.
    first, end = ranks.part(model.config.vocab_size)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(max(1, first), end, (batch, 1), generator=generator).to(device)
    mask = torch.ones_like(ids)
    cache.reset()

    def step() -> Any:
        return model(ids, attention_mask=mask, use_cache=True, logits_to_keep=1, past_key_values=cache)

    def first_steps() -> None:
        for _ in range(prompt):
            step()

    with torch.no_grad():
        row: Row = {"prompt": prompt, "first_calls_s": round(seconds(first_steps, device), 1)}
        return row | step_figures(step, device)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 1 if a layer's results are wrong or a part fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="%(default)s")
    parser.add_argument("--ranks", default="1,2,4,8", help="numbers of ranks of part attention (%(default)s)")
    parser.add_argument("--tokens", default="1,32,128", help="batches of part attention, on a GPU (%(default)s)")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each request there (%(default)s)")
    parser.add_argument("--end", default=decode_step.TOGETHER, choices=(decode_step.TOGETHER, decode_step.APART))
    parser.add_argument("--whole-ranks", type=int, default=2, help="number of ranks of part whole (%(default)s)")
    parser.add_argument("--layers", type=int, default=43, help="layers of part whole (%(default)s)")
    parser.add_argument("--batches", default="1,8,32,128", help="batches of part whole (%(default)s)")
    parser.add_argument("--prompt", type=int, default=64, help="steps before those that are timed there (%(default)s)")
    parser.add_argument("--experts", choices=EXPERT_LAYOUTS, default="rows", help="%(default)s")
    parser.add_argument("--eager", action="store_true", help="do not compile, to try the command sooner")
    parser.add_argument("--tiny", action="store_true", help="small layers instead, to try the command")
    parser.add_argument("--out", metavar="FOLDER", help="write one_rank_attention.json and one_rank_whole.json there")
    args = parser.parse_args(argv)
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there is {', '.join(PARTS)}")
    words = list(sys.argv[1:] if argv is None else argv)
    if len(parts) > 1:
        # The last option of a name counts. The weights of a whole rank leave no memory for leftovers of the other part.
        calls = [[sys.executable, __file__, *words, "--parts", name] for name in parts]
        statuses = [subprocess.run(call, check=False).returncode for call in calls]
        return int(any(statuses))
    quiet_libraries()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    defaults = vars(parser.parse_args([]))
    changed = {name: value for name, value in vars(args).items() if value != defaults[name] and name != "out"}
    options = (
        f"--{name.replace('_', '-')}" + (f" {value}" if value is not True else "") for name, value in changed.items()
    )
    return {"attention": attention, "whole": whole}[parts[0]](args, device, " ".join(["python", SCRIPT, *options]))


if __name__ == "__main__":
    sys.exit(main())
