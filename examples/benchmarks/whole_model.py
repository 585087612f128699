"""Time a DeepSeek-V4 of real dimensions in transformers, eager and converted: python examples/benchmarks/whole_model.py

A few layers of V4-Flash with random weights in bfloat16: embedding, hyper-connections, router, experts, head. The forms
are `convert` of the whole model and with attention alone, both compiled with captured steps, the whole model with
captured prompts too, that in a block of `hf.unchanged`, `hf.RunningBatch`, and transformers eager.
For each batch: seconds of the two compilations, ms of a prefill, ms of a decode step by `generate`, by consecutive
calls of the model and by calls with their token read by the host, kernels of a captured step, and the experts that its
tokens touch. The host reads each token of a RunningBatch; its prefill is that of all prompts in one chunk. Each form
has a separate process, and kernels are counted after all times, because the profiler slows the host. Warm: the same
weights in every step, which no cache of a GPU holds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from dsv4_compile import hf
from dsv4_compile.bench.nodes import by_name, nodes
from dsv4_compile.bench.record import environment, write_json
from dsv4_compile.hf.tiny import FLASH, layers_in_turn, quiet_libraries, random_model, tiny_config

FORMS = ("whole", "captured", "unchanged", "running", "attention", "eager")
PROMPTS = {1: 2048, 8: 1024, 32: 512}
"""Tokens of each prompt by batch size; 512 for others."""
SECONDS = 600
STEPS, REPEATS, MAX_SEQ_LEN = 32, 5, 2560


class Timed:
    """Times calls that use `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], Any]) -> float:
        """Return the seconds of one call."""
        self.wait()
        begin = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - begin

    def ms(self, call: Callable[[], Any], calls: int = 1) -> float:
        """Return the median ms of a call, of `calls` in a row."""

        def run() -> None:
            for _ in range(calls):
                call()

        return round(statistics.median(self.seconds(run) for _ in range(REPEATS)) / calls * 1e3, 3)


def measure(
    model: Any, form: str, batch: int, prompt: int, timed: Timed
) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
    """Return the times of one form and batch size, and a function that returns its kernels."""
    device = timed.device
    ids = torch.randint(1, model.config.vocab_size, (batch, prompt), device=device)
    # Other tokens in each row, so that a step touches as many experts as it does with text.
    mask, one = torch.ones_like(ids), ids[:, :1].clone()
    seen = torch.ones_like(one)
    if form != "eager":
        hf.mark_dynamic_tokens(ids)
        hf.mark_dynamic_tokens(mask)

    @torch.no_grad()
    def prefill() -> Any:
        return model(ids, attention_mask=mask, use_cache=True, logits_to_keep=1).past_key_values

    def generate(tokens: int) -> Any:
        return model.generate(ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)

    row: dict[str, Any] = {"form": form, "batch": batch, "prompt": prompt}
    row["first_prefill_s"] = round(timed.seconds(lambda: generate(1)), 1)
    row["first_steps_s"] = round(timed.seconds(lambda: generate(4)), 1)
    for _ in range(3):  # the third call of a shape is captured
        prefill()
    row["prefill_ms"] = timed.ms(prefill)
    short, long = (timed.ms(lambda: generate(n)) for n in (2, 2 + STEPS))  # noqa: B023 called at once
    row["generate_ms"] = round((long - short) / STEPS, 3)
    cache = prefill()

    @torch.no_grad()
    def step() -> Any:
        return model(one, attention_mask=seen, past_key_values=cache, use_cache=True, logits_to_keep=1)

    if form == "eager":
        return row, lambda: {"experts_a_layer": experts_touched(model, step)}
    for _ in range(3):
        step()
    row["step_ms"] = timed.ms(step, STEPS)
    row["read_ms"] = timed.ms(lambda: step().logits[:, -1].argmax(-1).tolist(), STEPS)

    def kernels() -> dict[str, Any]:
        nonlocal cache
        cache = prefill()  # a different batch has had the model's cache since
        step()
        if device.type != "cuda":
            return {}
        launches = nodes(step)
        counted = {"nodes": len(launches), "kernels_ms": round(sum(node.us for node in launches) / 1e3, 3)}
        counted["kernels"] = [[node.name[:120], node.us] for node in launches]
        return counted | {"prefill_kernels": by_name(nodes(prefill))[:20]}

    return row, kernels


def measure_running(model: Any, batch: int, prompt: int, timed: Timed) -> dict[str, Any]:
    """Return the times of a RunningBatch with as many slots as requests, from their submission on."""
    chunk = batch * prompt
    serving = hf.RunningBatch(model, slots=batch, prefill_chunk=chunk, max_seq_len=MAX_SEQ_LEN, backend="dsv4")
    prompts = torch.randint(1, model.config.vocab_size, (batch, prompt)).tolist()

    def prefill(tokens: int = 1) -> None:
        requests = [serving.submit(prompt_ids, max_new_tokens=tokens) for prompt_ids in prompts]
        while not all(request.tokens for request in requests):
            serving.step()

    row: dict[str, Any] = {"form": "running", "batch": batch, "prompt": prompt}
    row["first_prefill_s"] = round(timed.seconds(prefill), 1)
    prefill()
    row["prefill_ms"] = timed.ms(prefill)
    prefill(MAX_SEQ_LEN - prompt)
    row["first_steps_s"] = round(timed.seconds(serving.step), 1)
    row["read_ms"] = timed.ms(serving.step, STEPS)
    return row


def experts_touched(model: Any, step: Callable[[], Any]) -> float:
    """Return the average number of distinct experts of a layer in one eager `step`."""
    counts: list[int] = []

    def count(_: Any, __: Any, out: Any) -> None:
        counts.append(out[2].unique().numel())

    hooks = [layer.mlp.gate.register_forward_hook(count) for layer in model.model.layers]
    step()
    for hook in hooks:
        hook.remove()
    return round(statistics.mean(counts), 1)


def fit_norms(model: Any) -> None:
    """Give norms the model's dtype where transformers (5.17) would return their weight's dtype, float32, from them."""
    norm, dtype = model.model.norm, model.dtype
    if norm(torch.ones(1, model.config.hidden_size, dtype=dtype, device=model.device)).dtype is dtype:
        return
    for module in model.modules():
        if type(module) is type(norm):
            module.to(dtype)


def run(args: argparse.Namespace, form: str) -> list[dict[str, Any]]:
    """Return the rows of one form."""
    device = torch.device(args.device)
    timed = Timed(device)
    sizes = {} if args.tiny else FLASH | layers_in_turn(args.layers) | {"n_routed_experts": args.experts}
    config = tiny_config(**sizes)
    model: Any = random_model(config, device)
    for layer in model.model.layers:
        if (bias := getattr(layer.mlp.gate, "e_score_correction_bias", None)) is not None:
            bias.data.zero_()  # a trained one balances the experts, a random one favours few
    batches = [int(b) for b in args.batches.split(",")]
    if form == "eager":
        fit_norms(model)
    else:
        hf.convert(model, max_batch_size=max(batches), max_seq_len=MAX_SEQ_LEN, attention_only=form == "attention")
        graphs: dict[str, Any] = {"dsv4.cudagraph": "full"} if device.type == "cuda" else {}
        if graphs and form in ("captured", "unchanged"):
            graphs["dsv4.cudagraph.max_tokens"] = max(batch * PROMPTS.get(batch, 512) for batch in batches)
        model.compile(fullgraph=True, backend="dsv4", options=graphs or None)
    prompts = {batch: 40 if args.tiny else PROMPTS.get(batch, 512) for batch in batches}
    if form == "running":
        return [measure_running(model, batch, prompt, timed) for batch, prompt in prompts.items()]
    with hf.unchanged(model) if form == "unchanged" else nullcontext():
        measured = [measure(model, form, batch, prompt, timed) for batch, prompt in prompts.items()]
        return [row | kernels() for row, kernels in measured]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=4, help="%(default)s")
    parser.add_argument("--experts", type=int, default=FLASH["n_routed_experts"], help="routed experts (%(default)s)")
    parser.add_argument("--batches", default="1,32", help="%(default)s")
    parser.add_argument("--forms", default=",".join(FORMS), help="%(default)s")
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead, to try the command")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="%(default)s")
    parser.add_argument("--out", metavar="FOLDER", help="write whole_model.json there")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    quiet_libraries()
    said = f"python examples/benchmarks/whole_model.py --layers {args.layers} --batches {args.batches}"
    said += f" --experts {args.experts}"
    contents: dict[str, Any] = {"scenario": "whole_model", **environment(torch.device(args.device))}
    contents |= {"command": f"{said} --forms {args.forms}", "rows": []}
    if args.child:
        print(json.dumps(run(args, args.child)))
        return 0
    same = list(sys.argv[1:] if argv is None else argv)
    for form in args.forms.split(","):
        command = [sys.executable, __file__, *same, "--child", form]
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=SECONDS, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        for row in json.loads(done.stdout.splitlines()[-1]):
            contents["rows"].append({"date": contents["date"], "commit": contents["commit"]} | row)
            said = {name: value for name, value in row.items() if not name.endswith("kernels")}
            print(said, file=sys.stderr, flush=True)
        if args.out:
            write_json(contents, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
