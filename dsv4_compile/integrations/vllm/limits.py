"""Configurations of vLLM that the plug-in does not support, each with its reason.

`Engine` holds the few facts of a configuration that matter, so that the rules can be read and tested without vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ... import layout
from ...config import DeepseekV4Config
from ...errors import DSV4Error
from ...parallel import Ranks
from ...parallel.split import Whole, attention_sizes, check_divides

CACHE_DTYPES = ("auto", "fp8", "fp8_ds_mla")
"""Names under which vLLM has `fp8_ds_mla` caches of DeepSeek-V4."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Facts of a vLLM configuration.

    drafts: method of speculative decoding, "" for none. quantisation: method and weight block of the checkpoint, with
    `None` for weights without scales. parallel: sizes above 1 by the names of vLLM's parallel configuration.
    whole_model: vLLM's model runner compiles, with guards, what it calls. model: why its configuration cannot be read,
    or why ranks do not divide it.
    """

    drafts: str = ""
    cache_dtype: str = "auto"
    indexer_fp4: bool = False
    attention_backend: str = ""
    parallel: tuple[tuple[str, int], ...] = ()
    microbatches: bool = False
    lora: bool = False
    quantisation: tuple[str, tuple[int, ...]] | None = None
    dtype: str = "bfloat16"
    whole_model: bool = False
    model: str = ""

    @classmethod
    def of(cls, config: Any) -> Engine:
        """Read the facts of a `vllm.config.VllmConfig`; what a version does not have is off."""
        hf, parallel, attention = config.model_config.hf_config, config.parallel_config, config.attention_config
        quantised = getattr(hf, "quantization_config", None) or {}
        sizes = ((name, getattr(parallel, name, 1)) for name in PARALLEL)
        return cls(
            drafts=str(getattr(config.speculative_config, "method", "") or ""),
            cache_dtype=str(config.cache_config.cache_dtype),
            indexer_fp4=bool(getattr(attention, "use_fp4_indexer_cache", False)),
            attention_backend=_name(getattr(attention, "backend", None)),
            parallel=tuple((name, size) for name, size in sizes if size > 1),
            microbatches=bool(getattr(parallel, "enable_dbo", False)),
            lora=config.lora_config is not None,
            quantisation=_quantisation(quantised) if quantised else None,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            whole_model=getattr(config.compilation_config.mode, "name", "") == "STOCK_TORCH_COMPILE",
            model=_model(hf, getattr(parallel, "tensor_parallel_size", 1)),
        )


PARALLEL = {
    "pipeline_parallel_size": "a stage would have the metadata of its own layers only",
    "decode_context_parallel_size": "block tables then list the pages of all ranks",
    "prefill_context_parallel_size": "a rank then has part of a request's tokens, and compressors pool neighbours",
}
"""Sizes of vLLM's parallel configuration that must be 1, and why."""

DRAFTS = {
    "mtp": "MTP layers read hidden streams and caches that only vLLM's own attention fills",
    "dspark": "DSpark attends a block of drafts that is not causal, which the window's index rows cannot describe",
}
"""Methods of speculative decoding by a part of their name, and why they are unsupported."""
OTHER_DRAFTS = "verification of drafts has not been run with this attention"

WEIGHT_BLOCK = (layout.WEIGHT_TILE, layout.WEIGHT_TILE)


def why_unsupported(engine: Engine) -> list[str]:
    """Return a reason for everything about `engine` that the plug-in does not support."""
    reasons = [f"{name}={size}: {PARALLEL[name]}" for name, size in engine.parallel]
    if engine.drafts:
        known = (why for keyword, why in DRAFTS.items() if keyword in engine.drafts.lower())
        reasons.append(f"speculative decoding by {engine.drafts!r}: {next(known, OTHER_DRAFTS)}")
    if engine.cache_dtype not in CACHE_DTYPES:
        why = "its rows are not fp8_ds_mla, and vLLM has them for FlashInfer alone"
        reasons.append(f"kv_cache_dtype={engine.cache_dtype!r}: {why}")
    if "FLASHINFER" in engine.attention_backend.upper():
        why = "FlashInfer's rows hold keys and values of its own format; this attention is the backend"
        reasons.append(f"attention backend {engine.attention_backend}: {why}")
    if engine.indexer_fp4:
        reasons.append("use_fp4_indexer_cache: indexer keys are fp8 here")
    if engine.microbatches:
        reasons.append("enable_dbo: two microbatches would share one step's metadata")
    if engine.lora:
        reasons.append("LoRA: weights of one input are rows of one matrix, which adapters do not expect")
    if engine.quantisation not in (None, ("fp8", WEIGHT_BLOCK), ("deepseek_v4_fp8", WEIGHT_BLOCK)):
        side = layout.WEIGHT_TILE
        reasons.append(f"quantisation {engine.quantisation}: weights are floating, or e4m3 with {side}x{side} scales")
    if engine.whole_model:
        reasons.append("compilation mode 1: it would trace how vLLM describes a step; modes 2 and 3 do not")
    if engine.dtype != "bfloat16":
        reasons.append(f"dtype {engine.dtype}: vLLM's experts and hyper-connections take bfloat16 here")
    return [*reasons, *([engine.model] if engine.model else [])]


def _name(value: Any) -> str:
    return "" if value is None else str(getattr(value, "name", value))


def _quantisation(config: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    return str(config.get("quant_method")), tuple(config.get("weight_block_size") or ())


def _model(hf: Any, number: int) -> str:
    """Return why this package cannot read the model's configuration, or split its attention over ranks, or ""."""
    try:
        config = DeepseekV4Config.from_hf(hf)
    except DSV4Error as error:
        return f"the model: {error.got}"
    return why_undivided(attention_sizes(config, fp8=bool(getattr(hf, "quantization_config", None))), number)


def why_undivided(sizes: Sequence[Whole], number: int) -> str:
    """Return why `number` ranks cannot have equal parts of `sizes`, or ""."""
    try:
        check_divides(sizes, Ranks(0, number, ""))
    except DSV4Error as error:
        return f"tensor_parallel_size={number}: {error.why}; {error.fix}"
    return ""
