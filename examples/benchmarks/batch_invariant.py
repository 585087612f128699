"""Time a model of real dimensions with dsv4.batch_invariant off and on: python examples/benchmarks/batch_invariant.py

A few layers of V4-Flash with random weights, in the official formats or in bfloat16. For each value of the option, in a
separate process: ms of a decode step for each batch, captured on a GPU, with its kernels, ms of a prompt of 2,048
tokens, and with the option on the random compositions of `check_batch_invariant`: tokens that were compared bit for
bit, and the first difference or "". On a CPU, --tiny tries the command.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

import torch
from split_model import captures, configuration, seconds, split_model

from dsv4_compile import hf
from dsv4_compile.bench.nodes import by_name, nodes
from dsv4_compile.bench.record import environment, write_json
from dsv4_compile.hf.tiny import quiet_libraries, random_model
from dsv4_compile.parallel.fake_group import fake_mesh
from dsv4_compile.testing import check_batch_invariant

SCRIPT = "examples/benchmarks/batch_invariant.py"
LEVELS = ("off", "step", "tokens")
PROMPT, STEPS, REPEATS = 2048, 16, 5
SECONDS = 3000
"""Most seconds of a process."""


def random_weights(args: argparse.Namespace, device: torch.device) -> Any:
    """Return a model with random weights."""
    config = configuration(args.layers, args.tiny)
    if args.weights == "float":
        return random_model(config, device)
    with fake_mesh(1, device) as mesh:
        return split_model(config, args.weights, mesh, "experts", device)


@torch.no_grad()  # type: ignore[untyped-decorator]
def times(model: Any, batches: list[int], prompt: int, device: torch.device) -> dict[str, Any]:
    """Return ms of a step by batch size, and of a prompt."""

    def ms(call: Any, calls: int) -> float:
        for _ in range(2):
            call()
        return round(statistics.median(seconds(call, device) for _ in range(REPEATS)) / calls * 1e3, 3)

    vocabulary, steps, kernels = model.config.vocab_size, {}, {}
    for batch in batches:
        ids = torch.randint(1, vocabulary, (batch, 32), device=device)
        state = model(ids).past_key_values
        one = ids[:, :1].clone()

        def consecutive(one: Any = one, state: Any = state) -> None:
            for _ in range(STEPS):
                model(one, past_key_values=state)

        steps[str(batch)] = ms(consecutive, STEPS)
        if device.type == "cuda":
            kernels[str(batch)] = by_name(nodes(lambda one=one, state=state: model(one, past_key_values=state)))
    ids = torch.randint(1, vocabulary, (1, prompt), device=device)
    prompt_ms = ms(lambda: model(ids, logits_to_keep=1), 1)
    return {"step_ms": steps, "kernels": kernels, "prompt": prompt, "prompt_ms": prompt_ms}


def run(args: argparse.Namespace, level: str) -> dict[str, Any]:
    """Return the row of one value of the option."""
    device = torch.device(args.device)
    batches = [int(batch) for batch in args.batches.split(",")]
    prompt = 64 if args.tiny else PROMPT
    model = random_weights(args, device)
    hf.convert(model, max_batch_size=max(batches), max_seq_len=prompt + 256, attention_only=False)
    options = {"dsv4.batch_invariant": level, **captures(device)}
    model.compile(fullgraph=True, backend="dsv4", options=options)
    row: dict[str, Any] = {"level": level, "weights": args.weights, "layers": args.layers}
    row |= times(model, batches, prompt, device)
    if level != "off" and args.compositions:
        row |= {"compositions": args.compositions, "compared": 0, "difference": ""}
        try:
            row["compared"] = check_batch_invariant(model, compositions=args.compositions).rows
        except AssertionError as difference:
            row["difference"] = str(difference)
        batch = hf.RunningBatch(model, slots=min(8, max(batches)), prefill_chunk=48, backend="dsv4",
                                options={"dsv4.batch_invariant": level})  # fmt: skip
        try:
            row["running"] = check_batch_invariant(batch, compositions=args.compositions).rows
        except AssertionError as difference:
            row |= {"running": 0, "running_difference": str(difference)}
    return row


def add_costs(rows: list[dict[str, Any]]) -> None:
    """Add to each row its times as a multiple of those with the option off."""
    off = next((row for row in rows if row["level"] == "off"), None)
    for row in rows if off is not None else ():
        row["of_off"] = {batch: round(ms / off["step_ms"][batch], 3) for batch, ms in row["step_ms"].items()}
        row["prompt_of_off"] = round(row["prompt_ms"] / off["prompt_ms"], 3)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return 1 if a bit differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=4, help="%(default)s")
    parser.add_argument("--weights", choices=("official", "float"), default="official", help="%(default)s")
    parser.add_argument("--batches", default="1,8,32,128", help="%(default)s")
    parser.add_argument("--levels", default=",".join(LEVELS), help="%(default)s")
    parser.add_argument("--compositions", type=int, default=500, help="%(default)s")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, float by default on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="%(default)s")
    parser.add_argument("--out", metavar="FOLDER", help="write batch_invariant.json there")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    quiet_libraries()
    if args.child:
        print(json.dumps(run(args, args.child)))
        return 0
    same = list(sys.argv[1:] if argv is None else argv)
    contents: dict[str, Any] = {"scenario": "batch_invariant", **environment(torch.device(args.device))}
    contents |= {"command": f"python {SCRIPT} {' '.join(same)}".strip(), "rows": []}
    for level in args.levels.split(","):
        command = [sys.executable, __file__, *same, "--child", level]
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=SECONDS, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
        contents["rows"].append(json.loads(done.stdout.splitlines()[-1]))
        add_costs(contents["rows"])
        shown = {name: value for name, value in contents["rows"][-1].items() if name != "kernels"}
        print(shown, file=sys.stderr, flush=True)
        if args.out:
            write_json(contents, args.out)
    return int(any(row.get("difference") or row.get("running_difference") for row in contents["rows"]))


if __name__ == "__main__":
    sys.exit(main())
