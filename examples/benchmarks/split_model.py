"""A rank's part of V4-Flash with random weights, allocated alone, and the figures of a decode step of it."""

from __future__ import annotations

import inspect
import os
import statistics
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import DeepseekV4ForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8GroupedLinear, FP8Linear
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

from dsv4_compile._compat import kept_in_float32
from dsv4_compile.bench.nodes import by_name, launches_of_host, nodes
from dsv4_compile.hf.model.draft_kinds import KINDS
from dsv4_compile.hf.model.draft_settings import DraftSettings
from dsv4_compile.hf.model.split import keep_part
from dsv4_compile.hf.tiny import FLASH, layers_in_turn, tiny_config
from dsv4_compile.parallel import Ranks

SMALL: dict[str, Any] = {"hidden_size": 512, "moe_intermediate_size": 256, "head_dim": 128, "o_lora_rank": 128}
"""Sizes for a CPU, in whole blocks of quantisation for two ranks."""
QUANTISED = ("q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj", "gate_proj", "up_proj", "down_proj")
STEPS = 32
"""Steps of a measurement."""
_BEGIN = time.perf_counter()
COLLECTIVES = ("nccl", "all_reduce", "shot")
"""Words in the names of kernels of collectives."""


def device_and_mesh() -> tuple[torch.device, Any]:
    """Return this rank's device, a GPU if there is one, and a mesh of all ranks that torchrun has started."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast
    return device, init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),))


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
            replacement: Any = FP8Experts(model.config, **options | experts)
        elif name not in QUANTISED or compressor:
            continue
        elif hasattr(module, "n_groups"):
            replacement = FP8GroupedLinear(module.in_features, module.out_features, module.n_groups, **options)
        else:
            replacement = FP8Linear(module.in_features, module.out_features, **options)
        model.set_submodule(path, replacement)


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
        for matrix in tensor.unbind() if tensor.dim() > 2 else [tensor]:
            matrix.normal_(0, columns**-0.5, generator=generator)


def split_model(config: Any, weights: str, mesh: Any, layout: str, device: torch.device) -> Any:
    """Return a rank's part of a random model, allocated part by part; what ranks share is equal on all of them."""
    with torch.device("meta"):
        model: Any = DeepseekV4ForCausalLM(config)
    return allocated(model, config, weights, mesh, layout, device)


def split_drafts(
    config: Any, settings: DraftSettings, weights: str, mesh: Any, layout: str, device: torch.device
) -> Any:
    """Return a rank's part of random draft layers for a model with `config`, see `split_model`."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            drafts = KINDS[settings.kind](config, settings)
    finally:
        torch.set_default_dtype(dtype)
    return allocated(drafts, drafts.config, weights, mesh, layout, device)


def allocated(model: Any, config: Any, weights: str, mesh: Any, layout: str, device: torch.device) -> Any:
    """Allocate and fill the part of a rank of `model`, which is on the meta device, in the formats of `weights`."""
    if weights == "official":
        with torch.device("meta"):
            quantise(model)
    full_shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    keep_part(model, Ranks.of(mesh), layout)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        dtype = tensor.dtype
        if dtype is torch.float32 and not kept_in_float32(model, name) and not name.endswith("_scale_inv"):
            dtype = torch.bfloat16
        filled = torch.empty(tensor.shape, dtype=dtype, device=device)
        seed = zlib.crc32(name.encode()) + (0 if tensor.shape == full_shapes.get(name) else mesh.get_rank())
        generator = torch.Generator(device).manual_seed(seed)
        if name.endswith("norm.weight"):
            filled.fill_(1)
        elif name.endswith("tid2eid"):
            scores = torch.rand(tensor.shape[0], config.n_routed_experts, generator=generator, device=device)
            filled.copy_(scores.argsort(dim=1)[:, : tensor.shape[1]])
        else:
            fill(name, filled, generator, config.hidden_size)
        setattr(module, leaf, torch.nn.Parameter(filled, requires_grad=False) if leaf in module._parameters else filled)
    for path, module in list(model.named_modules()):
        if type(module) is DeepseekV4RotaryEmbedding:
            model.set_submodule(path, DeepseekV4RotaryEmbedding(config).to(device))
    return model.eval()


def say(text: str) -> None:
    """Print a line with the seconds since the start, on one rank."""
    if not torch.distributed.get_rank():
        print(f"{time.perf_counter() - _BEGIN:.0f} s: {text}", file=sys.stderr, flush=True)


def captures(device: torch.device) -> dict[str, Any]:
    """Return options that capture decode steps, on a GPU."""
    return {"dsv4.cudagraph": "full"} if device.type == "cuda" else {}


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of a call, from an idle device until it is idle again."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - begin


def step_figures(step: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Return times of a captured decode step with logits as result, in ms, and on a GPU its kernels and launches.

    "step_ms" is that of consecutive calls, "host_ms" the host's part of it, "read_ms" that of calls with a token that
    the host reads.
    """
    host: list[float] = []

    def consecutive() -> None:
        begin = time.perf_counter()
        for _ in range(STEPS):
            step()
        host.append(time.perf_counter() - begin)

    def read() -> None:
        for _ in range(STEPS):
            step().logits[:, -1].argmax(-1).tolist()

    def ms(all_of_them: Callable[[], None]) -> float:
        return round(statistics.median(seconds(all_of_them, device) for _ in range(3)) / STEPS * 1e3, 3)

    figures: dict[str, Any] = {"step_ms": ms(consecutive)}
    figures |= {"host_ms": round(statistics.median(host) / STEPS * 1e3, 3), "read_ms": ms(read)}
    if device.type != "cuda":
        return figures
    # If weights fill the GPU, an allocation may have to free others first, and waits for the GPU.
    figures["free_gb"] = round(torch.cuda.mem_get_info()[0] / 1e9, 2)
    figures["allocations_again"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    kernels = nodes(step)
    collective = [node for node in kernels if any(word in node.name for word in COLLECTIVES)]
    figures |= {"nodes": len(kernels), "kernels_ms": round(sum(node.us for node in kernels) / 1e3, 3)}
    figures |= {"kernels": by_name(kernels), "collectives": len(collective)}
    figures["collectives_ms"] = round(sum(node.us for node in collective) / 1e3, 3)
    return figures | launches_of_host(step)


def weights_read(config: Any, batch: int, nbytes: dict[str, int]) -> float:
    """Return the GB of weights that a rank reads in a step of `batch` tokens with uniform routing.

    Args:
        config: the model's configuration.
        nbytes: bytes of this rank's parameters by name.
    """
    experts = sum(size for name, size in nbytes.items() if ".mlp.experts." in name)
    rows = nbytes["model.embed_tokens.weight"]  # one row is read per token
    touched = 1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** batch
    return round((sum(nbytes.values()) - experts - rows + experts * touched) / 1e9, 2)
