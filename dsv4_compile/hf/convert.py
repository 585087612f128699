"""Conversion of a transformers DeepseekV4ForCausalLM in place (`convert`), and back (`revert`)."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import __version__ as transformers_version
from transformers.modeling_outputs import MoeModelOutputWithPast

from ..cache import CacheFormat
from ..config import DeepseekV4Config
from ..errors import check, fail
from ..loading import hf_name
from ..modules import DeepseekV4Attention
from ..modules.linear import Fp8Linear, Linear
from ..rope_tables import cos_sin_cache
from .cache import PagedCache
from .model import CompilableAttention, CompilableForCausalLM, CompilableModel, CompilableNorm, hf

_COMPILABLE: dict[type, Any] = {
    hf.DeepseekV4Attention: CompilableAttention,
    hf.DeepseekV4Model: CompilableModel,
    hf.DeepseekV4RMSNorm: CompilableNorm,
    hf.DeepseekV4ForCausalLM: CompilableForCausalLM,
}
_ORIGINAL = {compilable: original for original, compilable in _COMPILABLE.items()}


def convert(
    model: Any,
    *,
    max_batch_size: int,
    max_seq_len: int,
    kv_cache_dtype: str = "auto",
    indexer_cache_dtype: str = "auto",
    hadamard: bool = False,
    max_step_tokens: int | None = None,
) -> Any:
    """Make `model` compilable in one graph for prefill and one for decode, and return the same object.

    Args:
        model: a `DeepseekV4ForCausalLM` in eval mode, on its final device. Parameters are shared, not copied. Some move
            to be rows of one matrix (see `modules.stacked`), which temporarily needs memory for a few matrices of one
            layer.
        max_batch_size: most sequences in a batch.
        max_seq_len: most tokens of a sequence, prompt and answer together.
        kv_cache_dtype, indexer_cache_dtype, hadamard: see `dsv4_compile.cache.CacheFormat.resolve`. With `auto` the
            caches have the model's dtype and nothing is quantised.
        max_step_tokens: most tokens that one forward adds to a sequence (None = max_seq_len). Smaller values shrink
            the window and compressor-state caches; longer prompts then go through
            `generate(prefill_chunk_size=max_step_tokens)`.

    Raises E205 for an unsupported configuration and E208 for an unsupported model.
    """
    check(
        type(model) is hf.DeepseekV4ForCausalLM,
        "E208",
        got=f"a {type(model).__name__}",
        why="already converted" if isinstance(model, CompilableForCausalLM) else "",
        fix="pass a transformers DeepseekV4ForCausalLM",
    )
    check(
        "past_key_values" in {field.name for field in fields(MoeModelOutputWithPast)},
        "E208",
        got=f"transformers {transformers_version}",
        why="it renamed past_key_values",
        fix="pip install 'transformers<5.24'",
    )
    check(not model.training, "E208", got="a model in training mode", fix="call model.eval() first")
    config = DeepseekV4Config.from_hf(model.config)
    dtype, device = model.lm_head.weight.dtype, model.lm_head.weight.device
    cache_format = CacheFormat.resolve(kv_cache_dtype, indexer_cache_dtype, model_dtype=dtype, hadamard=hadamard)
    cache = PagedCache(
        config,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        cache_format=cache_format,
        max_step_tokens=max_step_tokens,
        device=device,
    )
    attentions = [
        _shared_attention(layer.self_attn, config, cache_format, dtype, cache.paged.max_seq_len)
        for layer in model.model.layers
    ]
    for layer, attention in zip(model.model.layers, attentions, strict=True):
        # In __dict__, so that nn.Module does not register the parameters a second time.
        layer.self_attn.__dict__["dsv4"] = attention
    model.model.__dict__["dsv4_cache"] = cache
    _swap_classes(model, _COMPILABLE)
    return model


def revert(model: Any) -> Any:
    """Restore the original classes of a converted model, drop the caches, and return the same object."""
    _check_converted(model)
    _swap_classes(model, _ORIGINAL)
    for layer in model.model.layers:
        del layer.self_attn.__dict__["dsv4"]
    del model.model.__dict__["dsv4_cache"]
    model.__dict__.pop("_dsv4_warned", None)
    return model


def new_cache(model: Any, *, max_batch_size: int | None = None, max_seq_len: int | None = None) -> PagedCache:
    """Allocate another cache for a converted model, in the same format and, unless given, with the same capacity."""
    _check_converted(model)
    own: PagedCache = model.model.dsv4_cache
    limit = model.model.layers[0].self_attn.dsv4.cos_sin.shape[0]
    length = max_seq_len or own.paged.max_seq_len
    check(length <= limit, "E204", got=f"max_seq_len={length}", why=f"the model was converted for {limit}")
    return PagedCache(
        own.paged.config,
        max_batch_size=max_batch_size or own.paged.max_batch_size,
        max_seq_len=length,
        cache_format=own.paged.cache_format,
        max_step_tokens=min(own.paged.max_step_tokens, length),
        device=own.seq_lens.device,
    )


def _check_converted(model: Any) -> None:
    check(
        isinstance(model, CompilableForCausalLM),
        "E208",
        got=f"a {type(model).__name__}",
        fix="pass a model that dsv4_compile.hf.convert returned",
    )


def _swap_classes(model: nn.Module, swaps: dict[type, Any]) -> None:
    for module in model.modules():
        if type(module) in swaps:
            module.__class__ = swaps[type(module)]


def _shared_attention(
    source: Any, config: DeepseekV4Config, cache_format: CacheFormat, dtype: torch.dtype, max_seq_len: int
) -> DeepseekV4Attention:
    """Build a `DeepseekV4Attention` that shares the parameters of `source`, floating or e4m3 with scales."""
    ours = DeepseekV4Attention(
        config,
        source.layer_idx,
        cache_format=cache_format,
        fp8=True,
        dtype=dtype,
        device="meta",
        max_seq_len=max_seq_len,
    )
    for path, module in list(ours.named_modules()):
        if isinstance(module, Fp8Linear) and _hf_parameter(source, f"{path}.weight").dtype is not torch.float8_e4m3fn:
            ours.set_submodule(path, Linear(*module.weight.shape, dtype=dtype, device="meta"))
    left = {name for name, _ in source.named_parameters()}
    for name, parameter in list(ours.named_parameters()):
        theirs = _hf_parameter(source, name)
        _check_stored_alike(theirs, parameter, f"{hf_name(name)} of layer {source.layer_idx}")
        left.remove(hf_name(name))
        path, _, leaf = name.rpartition(".")
        setattr(ours.get_submodule(path), leaf, theirs)
    check(
        not left,
        "E207",
        got=f"parameters of layer {source.layer_idx} that no op uses: {', '.join(sorted(left))}",
    )
    ours.stack()
    ours.cos_sin = cos_sin_cache(config.rope(ours.ratio), max_seq_len, source.sinks.device)
    return ours.eval()


def _check_stored_alike(theirs: Tensor, ours: Tensor, name: str) -> None:
    """Raise E207 unless a parameter of transformers has the shape of `ours`, and is e4m3 exactly if `ours` is."""
    check(
        theirs.shape == ours.shape,
        "E207",
        got=f"{name} of shape {tuple(theirs.shape)}",
        why=f"needs {tuple(ours.shape)}",
    )
    check(
        (theirs.dtype is torch.float8_e4m3fn) == (ours.dtype is torch.float8_e4m3fn),
        "E207",
        got=f"{name} of dtype {theirs.dtype}",
        why="DeepSeek-V4 keeps this weight in floating point",
    )


def _hf_parameter(source: Any, name: str) -> nn.Parameter:
    """Return the parameter of a transformers attention that corresponds to our parameter `name`."""
    theirs = hf_name(name)
    path, _, leaf = theirs.rpartition(".")
    value = getattr(source.get_submodule(path), leaf, None)
    if value is None:
        fail("E207", got=f"no parameter {theirs} in layer {source.layer_idx}", why=f"{name} needs it")
    return value
