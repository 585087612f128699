"""Compile small random DeepSeek-V4 models and compare their tokens with eager transformers: `dsv4 demo`.

One has every kind of layer and tiny dims, the other two layers with attention of real dims. Prompts of unequal length
run as one padded batch through the compiled model and one by one through the eager model. The tiny model also generates
with drafts, uncompiled.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .. import progress
from .._compat import counters
from ..columns import table, terminal_width, wrap
from ..errors import check
from .model.cache import CACHE_NAME
from .model.convert import convert
from .serving.running_batch import RunningBatch
from .tiny import REAL_ATTENTION, quiet_libraries, tiny_drafts, tiny_model

PROMPT_LENGTHS = (1, 5, 126, 130)
TIMED_STEPS = 32
COMPARED_STEPS = 12
MODELS: dict[str, dict[str, Any]] = {"tiny": {}, "real-attention": REAL_ATTENTION}
"""Overrides of `tiny_config` by model."""
NEXT = """\
Next:  python examples/02_huggingface_generate.py     # the same, as a program
       dsv4 explain examples/01_compile_attention.py  # graphs, ops, and why
       dsv4 doctor FOLDER                             # examine a checkpoint"""
SAME = ("reference", "identical", "-")
"""Tokens of a row that do not contradict eager transformers."""
DRAFTS = "drafts, uncompiled"
"""Name of the row with drafts."""
Generated = tuple[Tensor, Tensor]
"""New tokens and their logits."""


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one way to run a model, None for a figure that does not apply."""

    name: str
    graphs: int | None
    breaks: int | None
    recompiles: int | None
    compile_seconds: float | None
    max_logit_difference: float | None
    tokens: str
    ms_per_step: float | None
    tokens_per_second: float | None
    model: str
    tokens_per_step: float = 1.0


def main(argv: list[str] | None = None) -> int:
    """Run the demo and return 0 if all tokens agree without a graph break or recompile, 1 otherwise."""
    args = _parse(argv)
    check(args.tokens >= 2, "E204", got=f"--tokens {args.tokens}", rule="the demo decodes at least 2 tokens")
    quiet_libraries()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    graphs = device.startswith("cuda") and args.backend == "dsv4"
    args.cudagraph = args.cudagraph or ("full" if graphs else "off")
    torch.set_num_threads(1)  # more threads make so small a model slower
    prompts = _prompts(args.seed, device)
    figures: list[Row] = []
    ok = True
    for name in MODELS if args.model == "all" else (args.model,):
        model: Any = tiny_model(args.seed, **MODELS[name])
        model.to(device)
        if not args.json:
            print(_introduction(model, device, args.tokens), flush=True)
        rows = _run(name, model, prompts, args)
        figures += rows
        agrees = all(row.tokens in SAME for row in rows) or args.kv_cache_dtype != "auto"
        holds = agrees and (rows[1].graphs, rows[1].breaks, rows[1].recompiles) == (2, 0, 0)
        ok = ok and holds
        if not args.json:
            print(_table(rows, holds), flush=True)
    record = {"device": device, "ok": ok, "rows": [asdict(row) for row in figures]}
    print(json.dumps(record, indent=2) if args.json else NEXT)
    return 0 if ok else 1


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dsv4 demo", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", choices=("all", *MODELS), default="all", help="which model (default all)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate for each prompt (default 64)")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto (exact), bfloat16, fp8 (default auto)")
    parser.add_argument("--backend", default="dsv4", help="dsv4, or another of torch.compile's (default dsv4)")
    parser.add_argument(
        "--cudagraph", choices=("off", "full", "trees"), help="replay decode steps (default: full on a GPU)"
    )
    parser.add_argument("--compare", action="store_true", help="also torch.compile the unconverted model: slow")
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is a GPU)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser.parse_args(sys.argv[1:] if argv is None else argv)


def _prompts(seed: int, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 512, (n,), generator=generator).to(device) for n in PROMPT_LENGTHS]


def _pad_left(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return token ids and attention mask `[B, S]`, like a tokenizer with padding_side="left"."""
    width = max(p.shape[0] for p in prompts)
    ids = torch.stack([torch.nn.functional.pad(p, (width - p.shape[0], 0)) for p in prompts])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(p), (width - p.shape[0], 0)) for p in prompts])
    return ids, mask


def _generate(model: Any, ids: Tensor, mask: Tensor | None, tokens: int) -> Generated:
    """Return new tokens `[B, n]` and their logits `[B, n, vocab]`."""
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, dim=1)


def _ms_per_step(models: Sequence[Any], prompts: list[Tensor]) -> list[float]:
    """Time one decode step of the batch in ms, as the difference of a long and a short generation, models in turn."""
    ids, mask = _pad_left(prompts)

    def seconds(model: Any, tokens: int) -> float:
        started = time.perf_counter()
        _generate(model, ids, mask, tokens)[1].sum().item()
        return time.perf_counter() - started

    def step(model: Any) -> float:
        return (seconds(model, 2 + TIMED_STEPS) - seconds(model, 2)) / TIMED_STEPS * 1e3

    for model in models:
        seconds(model, 2)
    rounds = [[step(model) for model in models] for _ in range(3)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _run(name: str, model: Any, prompts: list[Tensor], args: argparse.Namespace) -> list[Row]:
    """Return the rows of one model: eager transformers first, then the converted model."""
    compiled = copy.deepcopy(model)
    with progress.stage("eager transformers", total=len(prompts)) as work:
        expected = []
        for prompt in prompts:
            length = prompt.shape[0]
            work.note(f"prompt of {length} token{'s' if length != 1 else ''}, alone")
            expected.append(_generate(model, prompt[None], None, args.tokens))
            work.advance()
    facts = _compile(compiled, prompts, expected, args)
    eager_ms, ms = _ms_per_step((model, compiled), prompts)
    facts["recompiles"] = _graph_count() - facts["graphs"]
    facts["breaks"] = sum(counters["graph_break"].values())

    def per_second(each: float) -> float:
        return len(prompts) * 1e3 / each

    none: dict[str, Any] = dict.fromkeys(("graphs", "breaks", "recompiles", "compile_seconds", "max_logit_difference"))
    eager = Row(
        "eager transformers",
        **none,
        tokens="reference",
        ms_per_step=eager_ms,
        tokens_per_second=per_second(eager_ms),
        model=name,
    )
    ours = Row(f"compiled, {args.backend}", **facts, ms_per_step=ms, tokens_per_second=per_second(ms), model=name)
    rows = [eager, ours]
    if name == "tiny":
        rows.append(_run_drafts(name, model, prompts, [tokens[0] for tokens, _ in expected], args))
    return [*rows, *([_run_stock_compile(name, model, prompts[-1])] if args.compare else [])]


def _compile(model: Any, prompts: list[Tensor], expected: list[Generated], args: argparse.Namespace) -> dict[str, Any]:
    """Convert and compile `model`, and return the figures of its row but for times, breaks and recompiles."""
    longest = max(PROMPT_LENGTHS) + max(args.tokens, 2 + TIMED_STEPS)
    sizes = {"max_batch_size": len(prompts), "max_seq_len": longest}
    convert(model, **sizes, kv_cache_dtype=args.kv_cache_dtype, attention_only=False)
    graphs_of = {} if args.cudagraph == "off" else {"dsv4.cudagraph": args.cudagraph}
    model.compile(fullgraph=True, backend=args.backend, options=graphs_of or None)
    ids, mask = _pad_left(prompts)
    _reset_counts()
    started = time.perf_counter()
    with progress.stage("compile", total=2) as work:
        work.note("prefill graph")
        _generate(model, ids, mask, 1)
        work.advance("decode graph")
        _generate(model, ids, mask, 2)
        work.advance()
    seconds, graphs = time.perf_counter() - started, _graph_count()
    new_tokens, logits = _generate(model, ids, mask, args.tokens)
    same = all(torch.equal(new_tokens[b], e[0][0]) for b, e in enumerate(expected))
    return {
        "graphs": graphs,
        "compile_seconds": seconds,
        "max_logit_difference": max(_difference(logits[b], new_tokens[b], e) for b, e in enumerate(expected)),
        "tokens": "identical" if same else "differ",
    }


def _difference(logits: Tensor, tokens: Tensor, expected: Generated) -> float:
    """Return the largest logit difference up to the first token that differs; later logits have other inputs."""
    same = (tokens == expected[0][0]).long().cumprod(0)
    steps = min(int(same.sum()) + 1, len(tokens))
    return float((logits[:steps] - expected[1][0][:steps]).abs().max())


@torch.no_grad()
def _run_drafts(name: str, model: Any, prompts: list[Tensor], expected: list[Tensor], args: argparse.Namespace) -> Row:
    """Run the prompts as a running batch with drafts, uncompiled, since compiling it would take as long again.

    Random draft layers would be accepted as rarely as a guess. Here they have a Markov head alone, whose logits are how
    often a token follows the one before it in `expected`.
    """
    converted = copy.deepcopy(model)
    drafts: Any = tiny_drafts(model, stages=1)
    vocab = model.config.vocab_size
    pairs = torch.zeros(vocab, vocab, device=drafts.markov_w1.device)
    for prompt, tokens in zip(prompts, expected, strict=True):
        text = torch.cat((prompt[-1:], tokens))
        pairs.index_put_((text[1:], text[:-1]), pairs.new_ones(len(tokens)), accumulate=True)
    drafts.model.norm.weight.zero_()
    drafts.markov_w1.data, drafts.markov_w2.data = torch.eye(vocab, device=pairs.device), pairs
    sizes = {"max_batch_size": 1, "max_seq_len": max(PROMPT_LENGTHS) + args.tokens + drafts.num_drafts}
    convert(converted, drafts=drafts, **sizes, kv_cache_dtype=args.kv_cache_dtype, attention_only=False)
    with progress.stage("drafts", total=1) as work:
        batch = RunningBatch(converted, slots=len(prompts), graphs="off")
        requests = [batch.submit(prompt, max_new_tokens=args.tokens) for prompt in prompts]
        batch.run()
        work.advance()
    same = all(request.tokens == tokens.tolist() for request, tokens in zip(requests, expected, strict=True))
    return Row(
        DRAFTS,
        *(None, None, None, None, None),
        "identical" if same else "differ",
        ms_per_step=None,
        tokens_per_second=None,
        model=name,
        tokens_per_step=batch.draft_statistics.tokens_per_step,
    )


def _run_stock_compile(name: str, model: Any, prompt: Tensor) -> Row:
    """Run torch.compile on the unconverted model: a graph per cache shape, until torch gives up and runs eager."""
    torch.compiler.reset()
    _reset_counts()
    model.forward = torch.compile(model.forward)
    started = time.perf_counter()
    with progress.stage("torch.compile without conversion", total=COMPARED_STEPS) as work:
        cache, ids = None, prompt[None]
        for step in range(COMPARED_STEPS):
            work.note(f"step {step}, {_graph_count()} graphs so far")
            with torch.no_grad():
                out = model(ids, use_cache=True, **{CACHE_NAME: cache})
            cache, ids = out[CACHE_NAME], out.logits[:, -1:].argmax(-1)
            work.advance()
    elapsed = time.perf_counter() - started
    graphs, breaks = _graph_count(), sum(counters["graph_break"].values())
    ms = elapsed / COMPARED_STEPS * 1e3
    recompiles = max(graphs - 2, 0)
    return Row("stock torch.compile", graphs, breaks, recompiles, elapsed, None, "-", ms, 1e3 / ms, name)


def _reset_counts() -> None:
    counters["stats"].clear()
    counters["graph_break"].clear()


def _graph_count() -> int:
    return int(counters["stats"]["unique_graphs"])


def _introduction(model: Any, device: str, tokens: int) -> str:
    config = model.config
    kinds = ", ".join(t.removesuffix("_attention") for t in config.layer_types)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{device}, one thread"
    lengths = ", ".join(map(str, PROMPT_LENGTHS))
    return (
        f"\nDeepSeek-V4, {size:.1f} M random weights, {config.num_attention_heads} heads of {config.head_dim}, "
        f"on {where}:\n{kinds}.\n"
        f"{len(PROMPT_LENGTHS)} prompts of {lengths} tokens, {tokens} new tokens each, greedy."
    )


def _table(rows: list[Row], ok: bool) -> str:
    """Format a column per row, and the verdict, for the width of the terminal."""

    def text(value: float | str | None, form: str = "") -> str:
        return "-" if value is None else format(value, form)

    figures: dict[str, list[str]] = {
        "graphs": [text(row.graphs) for row in rows],
        "graph breaks": [text(row.breaks) for row in rows],
        "recompiles": [text(row.recompiles) for row in rows],
        "compilation, s": [text(row.compile_seconds, ".0f") for row in rows],
        "logits differ by": [text(row.max_logit_difference, ".1e") for row in rows],
        "tokens": [row.tokens for row in rows],
        "tokens a step": [text(row.tokens_per_step, ".3g") for row in rows],
        "ms a step": [text(row.ms_per_step, ".1f") for row in rows],
        "tokens a second": [text(row.tokens_per_second, ".0f") for row in rows],
    }
    width = terminal_width()
    lines = list(table(["", *(row.name for row in rows)], [[name, *cells] for name, cells in figures.items()], width))
    lines.insert(1, "-" * max(map(len, lines)))
    verdict = (
        "One prefill graph, one decode graph, no break, no recompile; a padded batch gives each prompt's own tokens."
        if ok
        else "The compiled model does not match the claims above: please report this table with `dsv4 doctor`."
    )
    if any(row.name == DRAFTS for row in rows):
        verdict += " Drafts are pairs of tokens counted in the eager text; examples/09_drafts.py trains draft layers."
    return "\n".join(["", *lines, "", *wrap(verdict, width), ""])


if __name__ == "__main__":
    raise SystemExit(main())
