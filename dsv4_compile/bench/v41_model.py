"""A DeepSeek-V4.1-Flash with random weights in official formats; bytes of its decode step, and FLOPs of a prompt."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ..layout import page_layout
from ..models.v41.cache import V41Caches
from ..models.v41.config import V41Config
from ..models.v41.model import V41Model
from ..models.v41.ngrams import consecutive_primes
from ..models.v41.prefill import tail_length
from ..models.v41.tables import empty_like, lock_tables

_DRAWN = 1 << 26
"""Elements that are drawn at once."""


def smaller(config: V41Config, experts: int, engram: int) -> V41Config:
    """Return a configuration with so many experts, and engram tables of as many rows for each hash."""
    hashes = (config.engram_order - 1) * config.engram_heads
    sizes = consecutive_primes(engram, hashes * len(config.engram_layers))
    rows = tuple(sum(sizes[i * hashes : (i + 1) * hashes]) for i in range(len(config.engram_layers)))
    return replace(config, num_experts=experts, engram_vocab_size=engram, engram_rows=rows)


def meta_model(config: V41Config) -> V41Model:
    """Return a model in official formats without memory for its weights."""
    with torch.device("meta"):
        return V41Model(config, torch.bfloat16, quantised=True, quantize_input=True)


def _bytes_of(config: V41Config) -> int:
    return sum(parameter.nbytes for parameter in meta_model(config).parameters())


def experts_that_fit(config: V41Config, device: torch.device, spare: float, engram: int) -> int:
    """Return the number of experts, a multiple of 8, that leaves `spare` bytes of the device's memory."""
    if device.type != "cuda":
        return config.num_experts
    few, more = (_bytes_of(smaller(config, count, engram)) for count in (8, 16))
    free, _ = torch.cuda.mem_get_info(device)
    return max(8, min(config.num_experts, int((free - spare - few) // (more - few)) * 8 + 8))


def fill(name: str, tensor: Tensor) -> None:
    """Fill a weight with random values of a size that keeps activations near 1."""
    size = tensor.shape[-1] if tensor.dim() else 1
    if tensor.dtype is torch.uint8:
        tensor.random_(0, 256)
    elif tensor.dtype is torch.float8_e8m0fnu:
        low = 117 if tensor.dim() == 3 else 123
        tensor.view(torch.uint8).random_(low, low + (4 if tensor.dim() == 3 else 2))
    elif name.endswith(("bias", "bias_vl")):
        tensor.zero_()  # trained ones balance the experts, random ones favour few
    elif name.endswith(("norm.weight", "q_weight", "k_weight", "scale")):
        tensor.fill_(1.0)
    else:
        wide = tensor.dim() == 1 or name.startswith("embed")
        factor = 1.0 if wide else size**-0.5 * (8.0 if tensor.dtype is torch.float8_e4m3fn else 1.0)
        rows = max(1, _DRAWN // size)
        for part in tensor.split(rows) if tensor.dim() > 1 else [tensor]:
            part.copy_(torch.randn(part.shape, device=tensor.device) * factor)


@torch.no_grad()
def random_model(config: V41Config, device: torch.device, *, host: bool = False) -> V41Model:
    """Return a model with random weights on a device; with `host`, engram tables in host memory that it reads."""
    model = meta_model(config)
    for prefix, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                weight = empty_like(f"{prefix}.{name}", parameter, device, host)
                module._parameters[name] = nn.Parameter(weight, requires_grad=False)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    if host:
        lock_tables(model, device)
    for name, parameter in model.named_parameters():
        fill(name, parameter)
    ids = torch.arange(config.vocab_size, dtype=torch.int32, device=device)
    model.token_map.copy_(ids % config.engram_compressed_vocab)
    return model


def fill_caches(caches: V41Caches) -> None:
    """Fill windows, entries and keys with random rows, their scales near 1."""
    config, formats = caches.config, caches.cache_format
    rows = [(window, formats.window, config.head_dim) for window in caches.windows]
    for source in caches.sources.values():
        rows += [(source.entries, formats.entries, config.head_dim), (source.keys, formats.keys, config.index_head_dim)]
    for cache, name, channels in rows:
        page = page_layout(name, channels)
        assert page is not None, "formats are quantised"
        data = cache.shape[1] // (page.data + page.scale) * page.data
        low = 48 if name == "nvfp4" else 118
        cache[:, :data].random_(0, 126)
        cache[:, data:].random_(low, low + 8)


def weight_bytes(model: V41Model, batch: int) -> int:
    """Return the bytes of weights that a decode step reads, of as many experts as uniform choices touch."""
    config = model.config
    touched = 1 - (1 - config.experts_per_token / config.num_experts) ** batch
    hashes = (config.engram_order - 1) * config.engram_heads
    total = 0.0
    for name, weight in model.named_parameters():
        row = weight.nbytes / weight.shape[0]
        if ".ffn.experts." in name:
            total += weight.nbytes * touched
        elif name == "embed.weight":
            total += batch * row
        elif ".engram.embed" in name:
            total += batch * hashes * row
        else:
            total += weight.nbytes
    return int(total)


def request_bytes(config: V41Config, context: int) -> int:
    """Return the bytes of caches that a decode step reads for a request: windows, picked entries and index keys."""
    row, entry, key = (
        layout.data + layout.scale
        for fmt, channels in (
            ("mxfp8", config.head_dim),
            ("nvfp4", config.head_dim),
            ("mxfp4", config.index_head_dim),
        )
        if (layout := page_layout(fmt, channels)) is not None
    )
    total = config.num_layers * config.sliding_window * row
    for layer in range(config.num_layers):
        if ratio := config.ratio(layer):
            visible = context // ratio
            total += min(visible, config.index_topk) * entry
            if layer in config.index_sources:
                most = config.candidate_blocks * config.candidate_block_size
                total += key * (min(visible, most) if config.selects_candidates(layer) else visible)
    return total


def prompt_flops(config: V41Config, tokens: int, mode: str) -> int:
    """Return the multiplications and additions of a prompt: GEMMs, attention and index scores, by mode of `prefill`."""
    tail = tail_length(config, mode)
    all_tokens, last = torch.arange(tokens), config.last_source
    total = 2 * config.vocab_size * config.hidden_size
    for layer in range(config.num_layers):
        is_tail = tail is not None and layer >= last
        positions = all_tokens[-tail:] if is_tail and tail is not None else all_tokens
        inserted = all_tokens if layer <= last else positions
        total += 2 * len(inserted) * _inserted_weights(config, layer)
        total += 2 * len(positions) * _attended_weights(config, layer)
        total += _score_flops(config, layer, positions)
    return total


def _inserted_weights(config: V41Config, layer: int) -> int:
    """Return the weights that a token passes for a layer's rows of caches."""
    hidden, dim = config.hidden_size, config.head_dim
    weights = dim * hidden
    if layer in config.kv_sources:
        weights += min(config.ratio(layer), 2) * dim * hidden + config.index_head_dim * dim
    if layer in config.engram_layers:
        hashes = (config.engram_order - 1) * config.engram_heads
        weights += (config.hc_mult + 1) * hidden * hashes * config.engram_head_dim
    return weights


def _attended_weights(config: V41Config, layer: int) -> int:
    """Return the weights that a token passes in the rest of a layer."""
    hidden, latent, width = config.hidden_size, config.q_lora_rank, config.num_heads * config.head_dim
    groups = config.o_groups * config.o_lora_rank
    weights = latent * hidden + width * latent + groups * (width // config.o_groups) + hidden * groups
    if layer in config.index_sources:
        weights += config.index_n_heads * (config.index_head_dim * latent + hidden)
    weights += 3 * (config.experts_per_token + 1) * config.intermediate_size * hidden + config.num_experts * hidden
    return weights + 2 * (config.hc_mult + 2) * config.hc_mult**2 * hidden


def _score_flops(config: V41Config, layer: int, positions: Tensor) -> int:
    """Return the multiplications and additions of attention and index scores of tokens."""
    keys = (positions + 1).clamp_max(config.sliding_window)
    scored = torch.zeros_like(keys)
    if ratio := config.ratio(layer):
        visible = (positions + 1) // ratio
        keys = keys + visible.clamp_max(config.index_topk)
        if layer in config.index_sources:
            most = config.candidate_blocks * config.candidate_block_size
            scored = visible.clamp_max(most) if config.selects_candidates(layer) else visible
    attention = 4 * config.num_heads * config.head_dim * int(keys.sum())
    return attention + 2 * config.index_n_heads * config.index_head_dim * int(scored.sum())
