"""Time a DeepSeek-V4 of real dimensions that is split over GPUs, and compare its tokens with those of one GPU:
torchrun --nproc-per-node 2 examples/benchmarks/tensor_parallel.py

Layers of V4-Flash with random weights, in official formats (e4m3 linears, MXFP4 experts) or bfloat16; a rank allocates
its part alone. The model is compiled and captured. For each batch, and for one sequence of each context: ms of a
prefill, of a captured step by successive calls and by calls with their token read by the host, host time between two
steps, kernels of a step and the share of collectives. First, a smaller model is generated with by all ranks together
and by each alone: logits and tokens are compared, and the ranks' bits. Last, `generate` of unequal prompts, and the
ranks' bits of many steps.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from split_model import (
    STEPS,
    captures,
    configuration,
    device_and_mesh,
    seconds,
    split_model,
    step_figures,
    weights_read,
)

from dsv4_compile import hf
from dsv4_compile.bench.record import environment, write_json
from dsv4_compile.hf.model.cache import cache_like
from dsv4_compile.hf.tiny import quiet_libraries, random_model
from dsv4_compile.parallel import EXPERT_LAYOUTS, Ranks, gather_objects

TOKENS = 2048
"""Most tokens of a call."""
_GAP, _OFF = "gap_of_a_token_that_differs", "difference_of_logits"


def compare_with_one(args: argparse.Namespace, mesh: Any, device: torch.device) -> dict[str, Any]:
    """Generate with a model of few experts, split and whole on each rank; return how far they differ."""
    experts = {"n_routed_experts": 16, "num_hash_layers": 1}
    config = configuration(3, args.tiny, **experts)
    model: Any = random_model(config, device)
    sizes: dict[str, Any] = {"max_batch_size": 8, "max_seq_len": 256, "attention_only": False}
    unsharded = hf.convert(copy.deepcopy(model), **sizes)
    hf.convert(model, **sizes, mesh=mesh, expert_layout=args.experts, collectives=args.collectives)
    mask = (torch.arange(100, device=device) >= 100 - torch.arange(5, 105, 13, device=device)[:8, None]).long()
    ids = torch.randint(1, config.vocab_size, mask.shape, generator=torch.Generator().manual_seed(0)).to(device)
    if not args.eager:
        model.compile(fullgraph=True, backend="dsv4", options=captures(device))
    options: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    ours, theirs = (
        form.generate(ids, attention_mask=mask, max_new_tokens=args.compared, **options) for form in (model, unsharded)
    )
    logits, wanted = (torch.stack(output.logits, 1).float() for output in (ours, theirs))
    tokens, expected = (output.sequences[:, ids.shape[1] :] for output in (ours, theirs))
    alike = (tokens == expected).long().cumprod(1)
    # Up to the first token that differs, both have had the same input.
    seen = torch.nn.functional.pad(alike, (1, 0), value=1)[:, :-1].bool()
    error = float((logits - wanted)[seen].norm() / wanted[seen].norm())
    best = wanted.topk(2).values
    gap, off = (best[..., 0] - best[..., 1])[seen & (alike == 0)], (logits - wanted)[seen].abs().max()
    digests = gather_objects(logits.cpu().view(torch.int32).sum(dtype=torch.int64).item(), Ranks.of(mesh))
    return {
        "relative_error": error,
        "equal_tokens": f"{int(alike.sum())} of {alike.numel()}",
        f"largest_{_GAP}": float(gap.max()) if gap.numel() else 0.0,
        f"largest_{_OFF}": float(off),
        "ranks_bit_equal": len(set(digests)) == 1,
    }


def measure(model: Any, cache: Any, batch: int, prompt: int, device: torch.device) -> dict[str, Any]:
    """Return the figures of `batch` prompts of `prompt` tokens, which go into `cache` in chunks that it takes."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, model.config.vocab_size, (batch, prompt), generator=generator).to(device)
    # Other tokens in each row, so that a step touches as many experts as it does with text.
    one = ids[:, :1].clone()
    options: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1, "past_key_values": cache}
    chunk = min(cache.paged.max_step_tokens, max(1, TOKENS // batch))

    def prefill() -> None:
        cache.reset()
        for piece in ids.split(chunk, 1):
            mask = torch.ones_like(piece)
            for tensor in (piece, mask):
                hf.mark_dynamic_tokens(tensor)
            model(piece, attention_mask=mask, **options)

    def step() -> Any:
        return model(one, attention_mask=torch.ones_like(one), **options)

    def first() -> None:
        prefill()
        for _ in range(4):
            step()

    with torch.no_grad():
        row: dict[str, Any] = {"batch": batch, "prompt": prompt, "first_calls_s": round(seconds(first, device), 1)}
        row["prefill_ms"] = round(min(seconds(prefill, device) for _ in range(2)) * 1e3, 1)
        row |= step_figures(step, device)
    return row


def generate(model: Any, cache: Any, tokens: int, ranks: Ranks, device: torch.device) -> dict[str, Any]:
    """Return the figures of `generate` for prompts of unequal lengths, and whether all ranks have the same tokens."""
    batch, longest = min(8, cache.max_batch_size), 64
    lengths = torch.arange(longest, 0, -7)[:batch, None]
    mask = (torch.arange(longest) >= longest - lengths).long().to(device)
    ids = torch.randint(1, model.config.vocab_size, mask.shape, generator=torch.Generator().manual_seed(0)).to(device)
    options: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "eos_token_id": None}
    times = {}
    for new in (2, 2, 2, tokens, 2, tokens):  # the last of each are warm: a third call may capture
        cache.reset()
        begin = time.perf_counter()
        generated = model.generate(ids, past_key_values=cache, max_new_tokens=new, min_new_tokens=new, **options)
        checksum = int((generated.cpu() * torch.arange(1, generated.numel() + 1).view_as(generated)).sum())
        times[new] = time.perf_counter() - begin
    return {
        "prompts": [int(length) for length in lengths],
        "new_tokens": tokens,
        "ms_a_token": round((times[tokens] - times[2]) / (tokens - 2) * 1e3, 3),
        "ranks_equal": len(set(gather_objects(checksum, ranks))) == 1,
    }


def digest_of_steps(model: Any, cache: Any, steps: int, device: torch.device) -> int:
    """Return a digest of the logits of `steps` greedy steps of one sequence, which are read at the end alone."""
    cache.reset()
    token = torch.ones(1, 1, dtype=torch.int64, device=device)
    digest = torch.zeros((), dtype=torch.int64, device=device)
    options: dict[str, Any] = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    with torch.no_grad():
        for _ in range(steps):
            out = model(token, attention_mask=torch.ones_like(token), **options)
            logits = out.logits[:, -1].float()
            digest = digest * 31 + logits.view(torch.int32).sum(dtype=torch.int64)
            token = logits.argmax(-1, keepdim=True)
    return int(digest)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 1 if the ranks or one GPU disagree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=6, help="%(default)s")
    parser.add_argument("--batches", default="1,8,32,128", help="%(default)s")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt (%(default)s)")
    parser.add_argument("--contexts", default="", help="tokens of single prompts, such as 2048,8192 (none)")
    parser.add_argument("--steps", type=int, default=0, help="steps after which ranks' bits are compared (%(default)s)")
    parser.add_argument("--generate", type=int, default=0, help="new tokens of `generate`, 0 = none (%(default)s)")
    parser.add_argument("--weights", choices=("official", "bfloat16"), default="official", help="%(default)s")
    parser.add_argument("--experts", choices=EXPERT_LAYOUTS, default=EXPERT_LAYOUTS[0], help="%(default)s")
    parser.add_argument("--collectives", default="functional", help="or symmetric (%(default)s)")
    parser.add_argument("--compared", type=int, default=32, help="tokens compared with one GPU, 0 = none (%(default)s)")
    parser.add_argument("--eager", action="store_true", help="do not compile, to try the command sooner")
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead, to try the command")
    parser.add_argument("--out", metavar="FOLDER", help="write tensor_parallel.json there")
    args = parser.parse_args(argv)
    quiet_libraries()
    device, mesh = device_and_mesh()
    command = f"torchrun --nproc-per-node {mesh.size()} examples/benchmarks/tensor_parallel.py --layers {args.layers}"
    command += f" --batches {args.batches} --prompt {args.prompt} --weights {args.weights} --experts {args.experts}"
    command += f" --collectives {args.collectives}"
    optional = {"contexts": args.contexts, "generate": args.generate, "steps": args.steps}
    command += "".join(f" --{name} {value}" for name, value in optional.items() if value)
    contents: dict[str, Any] = {"scenario": "tensor_parallel", **environment(device), "command": command, "rows": []}

    def tell(value: dict[str, Any]) -> None:
        if mesh.get_rank() == 0:
            said = {name: column for name, column in value.items() if name != "kernels"}
            print(said, file=sys.stderr, flush=True)
            if args.out:
                write_json(contents, args.out)

    failed = False
    if args.compared:
        contents["compared"] = compare_with_one(args, mesh, device)
        tell(contents["compared"])
        same = contents["compared"]["largest_gap_of_a_token_that_differs"]
        failed = (
            not contents["compared"]["ranks_bit_equal"]
            or same > 2 * contents["compared"]["largest_difference_of_logits"]
        )
        torch.compiler.reset()
    batches = [int(batch) for batch in args.batches.split(",")]
    model = split_model(configuration(args.layers, args.tiny), args.weights, mesh, args.experts, device)
    nbytes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    contents["bytes_of_a_rank"] = sum(nbytes.values())
    contexts = [int(context) for context in args.contexts.split(",") if context]
    # One cache holds a long sequence, a second one the batches of short ones.
    longest = max([args.prompt, args.steps, *contexts]) + 8 * STEPS
    sizes: dict[str, Any] = {"max_batch_size": 1, "max_seq_len": longest, "attention_only": False}
    sizes["max_step_tokens"] = min(TOKENS, longest)
    hf.convert(model, **sizes, mesh=mesh, expert_layout=args.experts, collectives=args.collectives)
    if not args.eager:
        model.compile(fullgraph=True, backend="dsv4", options=captures(device))
    short, long = cache_like(model.model, max(batches), args.prompt + 8 * STEPS, args.prompt), cache_like(model.model)
    runs = [(short, batch, args.prompt) for batch in batches]
    runs += [(long, 1, context) for context in contexts]
    for cache, batch, prompt in runs:
        row = {"date": contents["date"], "commit": contents["commit"], **measure(model, cache, batch, prompt, device)}
        row["weights_gb"] = weights_read(model.config, batch, nbytes)
        contents["rows"].append(row)
        tell(contents["rows"][-1])
    if args.generate:
        contents["generate"] = generate(model, short, args.generate, Ranks.of(mesh), device)
        tell(contents["generate"])
        failed = failed or not contents["generate"]["ranks_equal"]
    if args.steps:
        digests = gather_objects(digest_of_steps(model, long, args.steps, device), Ranks.of(mesh))
        contents["steps"] = {"compared": args.steps, "ranks_bit_equal": len(set(digests)) == 1}
        tell(contents["steps"])
        failed = failed or not contents["steps"]["ranks_bit_equal"]
    torch.distributed.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
