"""Time a DeepSeek-V4 of real dimensions that is split over GPUs, and compare its tokens with those of one GPU:
torchrun --nproc-per-node 2 examples/benchmarks/tensor_parallel.py

Layers of V4-Flash with random weights, in official formats (e4m3 linears, MXFP4 experts) or bfloat16, of which a rank
allocates its part alone; compiled and captured. For each batch, and for one sequence of each context: ms of a prefill,
of a captured step by successive calls and by calls whose token the host reads, host time between two steps, kernels of
a step and the share of collectives. First, a smaller model is generated with by all ranks together and by each alone:
logits and tokens are compared, and the ranks' bits. Last, `generate` of unequal prompts, and the ranks' bits of many
steps.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import os
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import DeepseekV4ForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8GroupedLinear, FP8Linear
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

from dsv4_compile import hf
from dsv4_compile._compat import kept_in_float32
from dsv4_compile.bench.nodes import by_name, nodes
from dsv4_compile.bench.record import environment
from dsv4_compile.hf.model import cache_like
from dsv4_compile.hf.split import keep_part
from dsv4_compile.hf.tiny import FLASH, layers_in_turn, quiet_libraries, random_model, tiny_config
from dsv4_compile.parallel import EXPERT_LAYOUTS, Ranks, gather_objects

SMALL: dict[str, Any] = {"hidden_size": 512, "moe_intermediate_size": 256, "head_dim": 128, "o_lora_rank": 128}
"""Sizes for a CPU, in whole blocks of quantisation for two ranks."""
QUANTISED = ("q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj", "gate_proj", "up_proj", "down_proj")
STEPS, TOKENS = 32, 2048
"""Steps of a measurement; most tokens of a call."""
_GAP, _OFF = "gap_of_a_token_that_differs", "difference_of_logits"


def configuration(layers: int, tiny: bool, **overrides: Any) -> Any:
    """Return V4-Flash, or a tiny model, with `layers` layers: SWA, then CSA and HCA in turn."""
    return tiny_config(**(SMALL if tiny else FLASH) | layers_in_turn(layers) | overrides)


def quantise(model: Any) -> None:
    """Replace modules on the meta device by those of the official formats; compressors keep bfloat16."""
    options: dict[str, Any] = {"block_size": (128, 128), "scale_fmt": "ue8m0"}
    model.config.expert_dtype = "fp4"  # transformers 5.17 asks the configuration, later ones take an argument
    experts = {"expert_dtype": "fp4"} if "expert_dtype" in inspect.signature(FP8Experts).parameters else {}
    for path, module in list(model.named_modules()):
        name = path.rpartition(".")[2]
        compressor = ".compressor." in path and not path.endswith("indexer.q_b_proj")
        if path.endswith(".mlp.experts"):
            made: Any = FP8Experts(model.config, **options | experts)
        elif name not in QUANTISED or compressor:
            continue
        elif hasattr(module, "n_groups"):
            made = FP8GroupedLinear(module.in_features, module.out_features, module.n_groups, **options)
        else:
            made = FP8Linear(module.in_features, module.out_features, **options)
        model.set_submodule(path, made)


def fill(name: str, tensor: torch.Tensor, generator: torch.Generator, columns: int) -> None:
    """Fill a weight of any format, or its scales, so that a GEMM over `columns` keeps the scale of its input."""
    if name.endswith("_scale_inv"):
        exponent = -round(columns.bit_length() / 2) - 1
        if tensor.dtype is torch.float8_e8m0fnu:
            tensor.view(torch.uint8).fill_(127 + exponent)
        else:
            tensor.fill_(2.0**exponent)
    elif tensor.dtype is torch.int8:
        tensor.view(torch.uint8).random_(0, 256, generator=generator)
    elif tensor.dtype is torch.float8_e4m3fn:
        for rows in tensor.split(1024):
            values = torch.empty(rows.shape, dtype=torch.bfloat16, device=tensor.device)
            rows.copy_(values.normal_(0, 2, generator=generator))
    else:
        for each in tensor.unbind() if tensor.dim() > 2 else [tensor]:
            each.normal_(0, columns**-0.5, generator=generator)


def split_model(config: Any, weights: str, mesh: Any, layout: str, device: torch.device) -> Any:
    """Return a rank's part of a random model, allocated part by part; what ranks share is equal on all of them."""
    with torch.device("meta"):
        model: Any = DeepseekV4ForCausalLM(config)
        if weights == "official":
            quantise(model)
    whole = {name: parameter.shape for name, parameter in model.named_parameters()}
    keep_part(model, Ranks.of(mesh), layout)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        dtype = tensor.dtype
        if dtype is torch.float32 and not kept_in_float32(model, name) and not name.endswith("_scale_inv"):
            dtype = torch.bfloat16
        made = torch.empty(tensor.shape, dtype=dtype, device=device)
        seed = zlib.crc32(name.encode()) + (0 if tensor.shape == whole.get(name) else mesh.get_rank())
        generator = torch.Generator(device).manual_seed(seed)
        if name.endswith("norm.weight"):
            made.fill_(1)
        elif name.endswith("tid2eid"):
            scores = torch.rand(tensor.shape[0], config.n_routed_experts, generator=generator, device=device)
            made.copy_(scores.argsort(dim=1)[:, : tensor.shape[1]])
        else:
            fill(name, made, generator, config.hidden_size)
        setattr(module, leaf, torch.nn.Parameter(made, requires_grad=False) if leaf in module._parameters else made)
    for path, module in list(model.named_modules()):
        if type(module) is DeepseekV4RotaryEmbedding:
            model.set_submodule(path, DeepseekV4RotaryEmbedding(config).to(device))
    return model.eval()


def compare_with_one(args: argparse.Namespace, mesh: Any, device: torch.device) -> dict[str, Any]:
    """Generate with a model of few experts, split and whole on each rank; return how far they differ."""
    experts = {"n_routed_experts": 16, "num_hash_layers": 1}
    config = configuration(3, args.tiny, **experts)
    model: Any = random_model(config, device)
    sizes: dict[str, Any] = {"max_batch_size": 8, "max_seq_len": 256, "attention_only": False}
    whole = hf.convert(copy.deepcopy(model), **sizes)
    hf.convert(model, **sizes, mesh=mesh, expert_layout=args.experts, collectives=args.collectives)
    mask = (torch.arange(100, device=device) >= 100 - torch.arange(5, 105, 13, device=device)[:8, None]).long()
    ids = torch.randint(1, config.vocab_size, mask.shape, generator=torch.Generator().manual_seed(0)).to(device)
    if not args.eager:
        model.compile(fullgraph=True, backend="dsv4", options=captures(device))
    options: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    ours, theirs = (
        each.generate(ids, attention_mask=mask, max_new_tokens=args.compared, **options) for each in (model, whole)
    )
    logits, wanted = (torch.stack(each.logits, 1).float() for each in (ours, theirs))
    tokens, expected = (each.sequences[:, ids.shape[1] :] for each in (ours, theirs))
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


def captures(device: torch.device) -> dict[str, Any]:
    """Return options that capture decode steps, on a GPU."""
    return {"dsv4.cudagraph": "full"} if device.type == "cuda" else {}


def measure(model: Any, cache: Any, batch: int, prompt: int, device: torch.device) -> dict[str, Any]:
    """Return the figures of `batch` prompts of `prompt` tokens, which go into `cache` in chunks that it takes."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, model.config.vocab_size, (batch, prompt), generator=generator).to(device)
    # Other tokens in each row, so that a step touches as many experts as it does with text.
    one = ids[:, :1].clone()
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    options: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1, "past_key_values": cache}
    chunk = min(cache.paged.max_step_tokens, max(1, TOKENS // batch))

    def prefill() -> None:
        cache.reset()
        for part in ids.split(chunk, 1):
            mask = torch.ones_like(part)
            for each in (part, mask):
                hf.mark_dynamic_tokens(each)
            model(part, attention_mask=mask, **options)

    def step() -> Any:
        return model(one, attention_mask=torch.ones_like(one), **options)

    def timed(call: Callable[[], Any]) -> float:
        wait()
        begin = time.perf_counter()
        call()
        wait()
        return time.perf_counter() - begin

    def read() -> None:
        for _ in range(STEPS):
            step().logits[:, -1].argmax(-1).tolist()

    begin = time.perf_counter()
    with torch.no_grad():
        prefill()
        for _ in range(4):
            step()
        wait()
        row: dict[str, Any] = {"batch": batch, "prompt": prompt, "first_calls_s": round(time.perf_counter() - begin, 1)}
        row["prefill_ms"] = round(min(timed(prefill) for _ in range(2)) * 1e3, 1)
        times, host = [], []
        for _ in range(3):
            wait()
            begin = time.perf_counter()
            for _ in range(STEPS):
                step()
            host.append(time.perf_counter() - begin)
            wait()
            times.append(time.perf_counter() - begin)
        row["step_ms"] = round(statistics.median(times) / STEPS * 1e3, 3)
        row["host_ms"] = round(statistics.median(host) / STEPS * 1e3, 3)
        row["read_ms"] = round(statistics.median(timed(read) for _ in range(3)) / STEPS * 1e3, 3)
        if device.type == "cuda":
            # Beside weights that fill the GPU, an allocation may have to free others first, and waits for the GPU.
            row["free_gb"] = round(torch.cuda.mem_get_info()[0] / 1e9, 2)
            row["allocations_again"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
            found = nodes(step)
            collective = [node for node in found if any(word in node.name for word in ("nccl", "all_reduce", "shot"))]
            row["nodes"], row["kernels_ms"] = len(found), round(sum(node.us for node in found) / 1e3, 3)
            row["kernels"] = by_name(found)
            row["collectives"], row["collectives_ms"] = (
                len(collective),
                round(sum(node.us for node in collective) / 1e3, 3),
            )
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
        found = model.generate(ids, past_key_values=cache, max_new_tokens=new, min_new_tokens=new, **options)
        checksum = int((found.cpu() * torch.arange(1, found.numel() + 1).view_as(found)).sum())
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
            found = model(token, attention_mask=torch.ones_like(token), **options)
            logits = found.logits[:, -1].float()
            digest = digest * 31 + logits.view(torch.int32).sum(dtype=torch.int64)
            token = logits.argmax(-1, keepdim=True)
    return int(digest)


def weights_read(config: Any, batch: int, nbytes: dict[str, int]) -> float:
    """Return the GB of weights that a rank reads in a step of `batch` tokens whose routing is uniform.

    Args:
        config: the model's configuration.
        nbytes: bytes of this rank's parameters by name.
    """
    experts = sum(size for name, size in nbytes.items() if ".mlp.experts." in name)
    rows = nbytes["model.embed_tokens.weight"]  # of which one a token is read
    touched = 1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** batch
    return round((sum(nbytes.values()) - experts - rows + experts * touched) / 1e9, 2)


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
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast
    mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),))
    command = f"torchrun --nproc-per-node {mesh.size()} examples/benchmarks/tensor_parallel.py --layers {args.layers}"
    command += f" --batches {args.batches} --prompt {args.prompt} --weights {args.weights} --experts {args.experts}"
    command += f" --collectives {args.collectives}"
    given = {"contexts": args.contexts, "generate": args.generate, "steps": args.steps}
    command += "".join(f" --{name} {value}" for name, value in given.items() if value)
    found: dict[str, Any] = {"scenario": "tensor_parallel", **environment(device), "command": command, "rows": []}

    def tell(value: dict[str, Any]) -> None:
        if mesh.get_rank() == 0:
            said = {name: each for name, each in value.items() if name != "kernels"}
            print(said, file=sys.stderr, flush=True)
            if args.out:
                Path(args.out).mkdir(parents=True, exist_ok=True)
                (Path(args.out) / "tensor_parallel.json").write_text(json.dumps(found, indent=1) + "\n")

    failed = False
    if args.compared:
        found["compared"] = compare_with_one(args, mesh, device)
        tell(found["compared"])
        same = found["compared"]["largest_gap_of_a_token_that_differs"]
        failed = (
            not found["compared"]["ranks_bit_equal"] or same > 2 * found["compared"]["largest_difference_of_logits"]
        )
        torch.compiler.reset()
    batches = [int(batch) for batch in args.batches.split(",")]
    model = split_model(configuration(args.layers, args.tiny), args.weights, mesh, args.experts, device)
    nbytes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    found["bytes_of_a_rank"] = sum(nbytes.values())
    contexts = [int(context) for context in args.contexts.split(",") if context]
    # One cache holds a long sequence, another one the batches of short ones.
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
        row = {"date": found["date"], "commit": found["commit"], **measure(model, cache, batch, prompt, device)}
        row["weights_gb"] = weights_read(model.config, batch, nbytes)
        found["rows"].append(row)
        tell(found["rows"][-1])
    if args.generate:
        found["generate"] = generate(model, short, args.generate, Ranks.of(mesh), device)
        tell(found["generate"])
        failed = failed or not found["generate"]["ranks_equal"]
    if args.steps:
        digests = gather_objects(digest_of_steps(model, long, args.steps, device), Ranks.of(mesh))
        found["steps"] = {"compared": args.steps, "ranks_bit_equal": len(set(digests)) == 1}
        tell(found["steps"])
        failed = failed or not found["steps"]["ranks_bit_equal"]
    torch.distributed.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
