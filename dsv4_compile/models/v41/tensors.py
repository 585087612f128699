"""Tensors of an official DeepSeek-V4.1 checkpoint: names, shapes, storage, and their place in the modules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ...layout import MX_TILE, cdiv
from .config import V41Config
from .draft_config import V41DraftConfig

BF16, F32, E4M3, E2M1, ROWS = "BF16", "F32", "e4m3", "e2m1", "e4m3 rows"
"""Storage: floating, e4m3 with a scale for 32x32, MXFP4 bytes, and e4m3 with a scale for each row and 32 columns."""
SKIPPED = re.compile(r"(vision|aligner)\.|image_")
"""Names of the vision tower, which is not built."""
DRAFTS = re.compile(r"mtp\.")


class Expected(NamedTuple):
    """A tensor of a checkpoint, without the suffix of weights and scales.

    Attributes:
        name: official name; `weight` and `scale`, those of its parts, scale "" for floating tensors.
        shape: of the values, e2m1 counted one by one.
        storage: see the constants of this module.
        parameter: name of the module's parameter that it fills; `parameter_scale` takes its scales.
        expert: index in the parameter's first dim, or None.
        rows: first and last row of the parameter's matrix, or None for all.
    """

    name: str
    weight: str
    scale: str
    shape: tuple[int, ...]
    storage: str
    parameter: str
    parameter_scale: str
    expert: int | None = None
    rows: tuple[int, int] | None = None

    @property
    def stored(self) -> tuple[str, tuple[int, ...]]:
        """Dtype, in safetensors' words, and shape of the stored weight."""
        if self.storage == E2M1:
            return "I8", (self.shape[0], self.shape[1] // 2)
        return ("F8_E4M3" if self.storage in (E4M3, ROWS) else self.storage), self.shape

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the stored scales, UE8M0."""
        rows, columns = self.shape
        return (cdiv(rows, MX_TILE) if self.storage == E4M3 else rows), cdiv(columns, MX_TILE)


def expected_tensors(config: V41Config) -> Iterator[Expected]:
    """Yield the tensors of the text model, without draft layers."""
    hidden, vocab = config.hidden_size, config.vocab_size
    for name, shape in (("embed", (vocab, hidden)), ("head", (vocab, hidden)), ("norm", (hidden,))):
        yield _floating(name, shape)
    for layer in range(config.num_layers):
        yield from _layer(config, layer, f"layers.{layer}")


def draft_tensors(config: V41Config, drafts: V41DraftConfig) -> Iterator[Expected]:
    """Yield the tensors of the draft layers: a layer for each stage, and heads before the first and after the last."""
    hidden, vocab, rank = config.hidden_size, config.vocab_size, drafts.markov_rank
    stage_config, last = drafts.stage_config(config), f"mtp.{drafts.stages - 1}"
    for stage in range(drafts.stages):
        yield from _layer(stage_config, stage, f"mtp.{stage}")
    yield _scaled("mtp.0.main_proj", (hidden, len(drafts.taps) * hidden))
    for name, shape in (
        ("mtp.0.main_norm", (hidden,)),
        (f"{last}.norm", (hidden,)),
        (f"{last}.markov_head.embed", (vocab, rank)),
        (f"{last}.markov_head.head", (vocab, rank)),
        (f"{last}.confidence_head.proj", (1, hidden + rank)),
    ):
        yield _floating(name, shape)


def model_tensors(config: V41Config, drafts: V41DraftConfig | None) -> Iterator[Expected]:
    """Yield the tensors of the text model, and of draft layers if it has some."""
    yield from expected_tensors(config)
    if drafts is not None:
        yield from draft_tensors(config, drafts)


def _layer(config: V41Config, layer: int, prefix: str) -> Iterator[Expected]:
    hidden, dim = config.hidden_size, config.head_dim
    for norm in ("attn_norm", "ffn_norm"):
        yield _floating(f"{prefix}.{norm}", (hidden,))
    mixes = (config.hc_mult + 2) * config.hc_mult
    for site in ("attn", "ffn"):
        for leaf, shape in (("fn", (mixes, config.hc_mult * hidden)), ("base", (mixes,)), ("scale", (3,))):
            name, parameter = f"{prefix}.hc_{site}_{leaf}", f"{prefix}.hc_{site}.{leaf}"
            yield Expected(name, name, "", shape, F32, parameter, "")
    attn, groups = f"{prefix}.attn", config.o_groups * config.o_lora_rank
    width = config.num_heads * dim
    yield _scaled(f"{attn}.wq_a", (config.q_lora_rank, hidden))
    yield _scaled(f"{attn}.wq_b", (width, config.q_lora_rank))
    yield _scaled(f"{attn}.wkv", (dim, hidden))
    yield _scaled(f"{attn}.wo_a", (groups, width // config.o_groups))
    yield _scaled(f"{attn}.wo_b", (hidden, groups))
    yield _floating(f"{attn}.q_norm", (config.q_lora_rank,))
    yield _floating(f"{attn}.kv_norm", (dim,))
    yield Expected(f"{attn}.attn_sink", f"{attn}.attn_sink", "", (config.num_heads,), F32, f"{attn}.attn_sink", "")
    if layer in config.kv_sources:
        yield _floating(f"{attn}.compressor.wkv", (dim, hidden))
        if config.ratio(layer) > 1:
            yield _floating(f"{attn}.compressor.wgate", (dim, hidden))
        yield _floating(f"{attn}.compressor.norm", (dim,))
        yield _floating(f"{attn}.indexer.wk", (config.index_head_dim, dim))
        yield _floating(f"{attn}.indexer.k_norm", (config.index_head_dim,))
    if layer in config.index_sources:
        yield _scaled(f"{attn}.indexer.wq_b", (config.index_n_heads * config.index_head_dim, config.q_lora_rank))
        yield _floating(f"{attn}.indexer.weights_proj", (config.index_n_heads, hidden))
    if layer in config.engram_layers:
        yield from _engram(config, layer, f"{prefix}.engram")
    yield from _experts(config, f"{prefix}.ffn")


def _engram(config: V41Config, layer: int, prefix: str) -> Iterator[Expected]:
    dim, count = config.engram_head_dim, config.hc_mult
    rows = config.engram_rows[config.engram_layers.index(layer)]
    table = f"{prefix}.embed"
    yield Expected(table, f"{table}.weight", f"{table}.scale", (rows, dim), ROWS, table, f"{table}_scale")
    hashes = (config.engram_order - 1) * config.engram_heads
    yield _scaled(f"{prefix}.wkv", ((count + 1) * config.hidden_size, hashes * dim))
    for leaf in ("q_weight", "k_weight"):
        name = f"{prefix}.{leaf}"
        yield Expected(name, name, "", (count, config.hidden_size), BF16, name, "")


def _experts(config: V41Config, prefix: str) -> Iterator[Expected]:
    hidden, inner, count = config.hidden_size, config.intermediate_size, config.num_experts
    yield _floating(f"{prefix}.gate", (count, hidden))
    for bias in ("bias", "bias_vl"):
        name = f"{prefix}.gate.{bias}"
        yield Expected(name, name, "", (count,), F32, name, "")
    groups: list[tuple[str, int | None, str, str]] = [("shared_experts", None, "shared_experts", E4M3)]
    groups += [(f"experts.{expert}", expert, "experts", E2M1) for expert in range(count)]
    for group, expert, module, storage in groups:
        for leaf, shape, target, rows in (
            ("w1", (inner, hidden), "w13", (0, inner)),
            ("w3", (inner, hidden), "w13", (inner, 2 * inner)),
            ("w2", (hidden, inner), "w2", None),
        ):
            name, parameter = f"{prefix}.{group}.{leaf}", f"{prefix}.{module}.{target}"
            parts = f"{name}.weight", f"{name}.scale"
            yield Expected(name, *parts, shape, storage, parameter, f"{parameter}_scale", expert, rows)


def _floating(name: str, shape: tuple[int, ...]) -> Expected:
    return Expected(name, f"{name}.weight", "", shape, BF16, f"{name}.weight", "")


def _scaled(name: str, shape: tuple[int, ...]) -> Expected:
    return Expected(name, f"{name}.weight", f"{name}.scale", shape, E4M3, f"{name}.weight", f"{name}.scale")
