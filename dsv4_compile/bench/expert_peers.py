"""Calls other projects' experts with the arguments of `moe_experts`, without a shared expert.

`transformers_*` are the implementations of that library on weights in bfloat16; eager waits for the device.
`torch_grouped_mm` is torch's grouped GEMM, with plain PyTorch around it. `marlin` is vLLM's MXFP4 kernel; its weights
are repacked before it is timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..reference.moe.moe_experts import clamped_swiglu
from .problem import Args, Prepare, Unavailable, deepseek_v4

EAGER, BATCHED, GROUPED = "transformers_eager", "transformers_batched_mm", "transformers_grouped_mm"
TORCH, MARLIN = "torch_grouped_mm", "marlin"
OF_TRANSFORMERS: Mapping[str, str] = {EAGER: "eager", BATCHED: "batched_mm", GROUPED: "grouped_mm"}
"""Names that `experts_implementation` takes, by implementation."""
UNCAPTURED = (EAGER,)
_VLLM = "vllm.model_executor.layers"
_LIMIT = 11
"""Position of the limit of the clamp among the arguments of the op."""


def peers(kind: str, shared: str) -> dict[str, Prepare]:
    """Return the peers for routed weights of this format and this shared expert."""
    if shared != "none":
        return {}
    if kind == "bfloat16":
        return {**dict.fromkeys(OF_TRANSFORMERS, _transformers), TORCH: _torch}
    return {MARLIN: _marlin} if kind == "mxfp4" else {}


def arrange() -> dict[str, Callable[[Args], Args]]:
    """Return what makes the arguments of each peer that does not take the op's."""
    return {
        **{name: partial(_module, implementation) for name, implementation in OF_TRANSFORMERS.items()},
        MARLIN: _repacked,
    }


def _transformers() -> Callable[..., Any]:
    deepseek_v4()
    return lambda module, *args: module(*args)


def _module(implementation: str, args: Args) -> Args:
    """Return transformers' experts, which share the weights of `args`, and the arguments of a call."""
    x, ids, weights, w13, w2 = args[:5]
    if implementation == "batched_mm" and w13.is_cuda:
        free = torch.cuda.mem_get_info(w13.device)[0]
        free += torch.cuda.memory_reserved(w13.device) - torch.cuda.memory_allocated(w13.device)
        if too_large := why_too_large(ids, w13, w2, free):
            raise Unavailable(too_large)
    config: Any = SimpleNamespace(
        num_local_experts=len(w13),
        hidden_size=x.shape[1],
        intermediate_size=w2.shape[2],
        hidden_act="silu",
        swiglu_limit=args[_LIMIT],
        _experts_implementation=implementation,
    )
    with torch.device("meta"):
        module = deepseek_v4().DeepseekV4Experts(config)
    module.gate_up_proj, module.down_proj = (nn.Parameter(weight, requires_grad=False) for weight in (w13, w2))
    # A router of a model in bfloat16 gives weights in bfloat16.
    return module, x, ids.long(), weights.to(x.dtype)


def why_too_large(ids: Tensor, w13: Tensor, w2: Tensor, free: int) -> str:
    """Return why `batched_mm`, which copies the weights of every place, cannot run in `free` bytes, or ""."""
    copied = ids.numel() * (w13.nbytes + w2.nbytes) // len(w13)
    # A captured call allocates memory in addition to that of the calls before it.
    if 2 * copied <= free:
        return ""
    return f"batched_mm copies {copied / 1e9:.0f} GB of weights, twice with a graph; {free / 1e9:.0f} GB are free"


def _torch() -> Callable[..., Any]:
    grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None)
    if grouped_mm is None:
        raise Unavailable(f"torch {torch.__version__} has no torch.nn.functional.grouped_mm")

    def call(*args: Any) -> Tensor:
        x, ids, weights, w13, w2 = args[:5]
        ordered = ids.flatten().sort(stable=True)
        ends = torch.arange(1, len(w13) + 1, device=ids.device, dtype=ids.dtype)
        offsets = torch.searchsorted(ordered.values, ends).int()
        gate_up = grouped_mm(x[ordered.indices // ids.shape[1]], w13.transpose(1, 2), offs=offsets)
        hidden = clamped_swiglu(gate_up.float(), args[_LIMIT]).to(x.dtype)
        results = torch.empty(ids.numel(), x.shape[1], dtype=torch.float32, device=x.device)
        results[ordered.indices] = grouped_mm(hidden, w2.transpose(1, 2), offs=offsets).float()
        weighted: Tensor = results.view(*ids.shape, -1) * weights[..., None]
        return weighted.sum(1).to(x.dtype)

    return call


def _marlin() -> Callable[..., Any]:
    if not torch.cuda.is_available():
        raise Unavailable("Marlin's kernels run on GPUs")
    experts = _of_vllm(f"{_VLLM}.fused_moe.experts.marlin_moe")
    activation = _of_vllm(f"{_VLLM}.fused_moe.activation")
    kind = _of_vllm("vllm.scalar_type").scalar_types.float4_e2m1f.id

    def call(*args: Any) -> Any:
        x, ids, weights, w13, w2, w13_scale, w2_scale = args[:7]
        config = activation.ApplyMoEActivationConfig(clamp_limit=args[_LIMIT])
        return experts.fused_marlin_moe(
            x, w13, w2, None, None, w13_scale, w2_scale, weights, ids, kind, activation_config=config
        )

    return call


def _of_vllm(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as missing:
        raise Unavailable(f"no vLLM with Marlin's experts: {missing}") from missing


def _repacked(args: Args) -> Args:
    """Return `args` with MXFP4 weights and scales in Marlin's order."""
    x, ids, weights, w13, w2, w13_scale, w2_scale, *rest = args
    pack = _of_vllm(f"{_VLLM}.quantization.utils.marlin_utils_fp4").prepare_moe_mxfp4_layer_for_marlin
    layer = SimpleNamespace(params_dtype=x.dtype)
    return x, ids, weights, *pack(layer, w13, w2, w13_scale, w2_scale, None, None)[:4], *rest
