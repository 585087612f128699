"""Which ops have a hand-written Triton kernel, and how a call reaches it without this package importing Triton.

`kernels/<stem>.py` holds the launcher of an op under the op's own name and with the op's arguments. Where a launcher
cannot take every call, `<op>_refuses`, with the same arguments, says why ("" = it takes this one) from host-side facts
alone; a refused call runs the reference, and the backend records the reason. So does a call on a GPU that the kernel
has not been tested on (see `proven`), unless dsv4.impl asks for the kernel.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from ..._compat import device_architecture
from ...errors import fail
from ...selection.proven import is_proven
from .arguments import packed

KERNELS: Mapping[str, str] = {
    "advance": "metadata.advance",
    "batch_metadata": "metadata.batch_metadata",
    "combine_topk_swa": "metadata.combine_topk_swa",
    "combine_topk_swa_ragged": "metadata.combine_topk_swa",
    "compress_norm_rope_insert": "preprocess.compress_norm_rope_insert",
    "copy_ragged_to_graph_buffers": "metadata.copy_ragged_to_graph_buffers",
    "cp_gather_indexer_k": "indexer.cp_gather_indexer_k",
    "dequantize_and_gather_k_cache": "preprocess.dequantize_and_gather_k_cache",
    "fp8_grouped_einsum": "linear.fp8_grouped_einsum",
    "fp8_grouped_einsum_quant": "linear.fp8_grouped_einsum",
    "fp8_linear": "linear.fp8_linear",
    "fused_q_kv_rmsnorm": "preprocess.fused_q_kv_rmsnorm",
    "global_topk": "metadata.global_topk",
    "global_topk_ragged": "metadata.global_topk",
    "grouped_linear": "linear.grouped_linear",
    "indexer_logits": "indexer.indexer_logits",
    "indexer_logits_topk": "indexer.indexer_logits",
    "indexer_logits_topk_ragged": "indexer.indexer_logits",
    "indexer_q_rope_quant": "indexer.indexer_q_rope_quant",
    "indexer_topk_slots": "indexer.indexer_topk_slots",
    "inv_rope": "attention.inv_rope",
    "inv_rope_fp8_quant": "attention.inv_rope",
    "kv_rope_insert": "preprocess.kv_rope_insert",
    "moe_experts": "moe.moe_experts",
    "moe_route": "moe.moe_route",
    "preprocess_insert": "preprocess.preprocess_insert",
    "preprocess_insert_quant": "preprocess.preprocess_insert",
    "q_norm_rope": "preprocess.q_norm_rope",
    "q_norm_rope_kv_insert": "preprocess.q_norm_rope",
    "ragged_from_dense": "metadata.ragged_from_dense",
    "save_partial_states": "preprocess.save_partial_states",
    "sparse_mla_decode": "attention.sparse_mla_decode",
    "sparse_mla_decode_latent": "attention.sparse_mla_decode",
    "sparse_mla_decode_out": "attention.sparse_mla_decode",
    "sparse_mla_decode_quant": "attention.sparse_mla_decode",
    "sparse_mla_decode_ragged": "attention.sparse_mla_decode",
    "sparse_mla_prefill": "attention.sparse_mla_prefill",
    "sparse_mla_prefill_ragged": "attention.sparse_mla_prefill",
}
"""Name of an op -> stem of the file in kernels/ that launches it on CUDA and ROCm devices."""


@functools.cache
def launcher(op: str) -> Callable[..., Any]:
    """The launcher of `op`. Imports Triton; E101 where there is none."""
    return packed(op, getattr(_module(op), op))


@functools.cache
def refusal(op: str) -> Callable[..., str] | None:
    """The function that says why a call of `op` cannot use its kernel; None if the kernel is not ours or takes all."""
    if op not in KERNELS:
        return None
    module = _module(op)
    found = getattr(module, f"why_unsupported_{op}", None) or getattr(module, f"{op}_refuses", None)
    return None if found is None else packed(op, found)


def runs_kernel(op: str, device: torch.device) -> bool:
    """Whether calls of `op` on `device` run its kernel, but for those that it refuses."""
    return device.type == "cuda" and op in KERNELS and is_proven("triton", op, device_architecture(device))


@functools.cache
def planned(op: str) -> Any:
    """The launcher of `op` as one that does again what it did for a call like this one: a `kernels.planned.Planned`."""
    return importlib.import_module("dsv4_compile.kernels.host.launch_cache").Planned(launcher(op))


def dispatcher(op: str, reference: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """What runs `op` on a GPU: its kernel where it is proven, or `reference`, also for calls that it refuses.

    `check` refuses wrong arguments, by what a plan is found by: a call that there is a plan for has passed it.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        device = next((value.device for value in args if isinstance(value, torch.Tensor)), None)
        if device is not None and runs_kernel(op, device):
            return launch(op, reference, check, device, args, kwargs)
        check(*args, **kwargs)
        return reference(*args, **kwargs)

    return run


def launch(
    op: str,
    reference: Callable[..., Any],
    check: Callable[..., None] | None,
    device: torch.device,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run the kernel of `op`, or `reference` for calls that it refuses, as `dispatcher` does where it is proven."""
    work = planned(op)
    plan = None if kwargs else work.find(args)
    if plan is None:
        if check is not None:
            check(*args, **kwargs)
        refuses = refusal(op)
        if refuses is not None and refuses(*args, **kwargs):
            return reference(*args, **kwargs)
    # Triton launches on the current device, whatever device its arguments are on.
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        return work(*args, **kwargs) if plan is None else plan(args)


def _module(op: str) -> Any:
    try:
        return importlib.import_module(f"dsv4_compile.kernels.{KERNELS[op]}")
    except ImportError as missing:
        fail(
            "E101",
            got=f"no Triton for torch.ops.dsv4.{op} on a GPU: {missing}",
            fix='install the Triton that belongs to this torch, or compile with options={"dsv4.impl": "eager"}',
        )
