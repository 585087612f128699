"""How the weights of a model are split over ranks, and which numbers of ranks divide it.

Projections to heads and groups are split by their rows, projections back to hidden by their columns, so that one
all-reduce ends a sub-layer. A part is proportional, so scales and packed bytes split as the weights that they belong
to, if blocks of quantisation are whole. Not DTensor: ops of this package have no sharding rules, and linears of one
input are rows of one matrix, which plain parameters can share.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import DeepseekV4Config
from ..errors import check, fail
from ..layout import WEIGHT_TILE
from .ranks import Ranks

EXPERT_LAYOUTS = ("experts", "rows")
"""Routed experts by expert, or each expert by rows of its intermediate size."""


class Split(NamedTuple):
    """Dim of a tensor that ranks have equal parts of; `halves` are split each, as gate and up in one matrix."""

    dim: int
    halves: int = 1


class Whole(NamedTuple):
    """A size that must be a multiple of `unit` on every rank. `name` says what it counts."""

    name: str
    size: int
    unit: int = 1


_ATTENTION = {
    "wq_b": Split(0),
    "attn_sink": Split(0),
    "wo_a": Split(0),
    "wo_b": Split(1),
    "q_b_proj": Split(0),
    "sinks": Split(0),
    "o_a_proj": Split(0),
    "o_b_proj": Split(1),
}
_SHARED = {"gate_proj": Split(0), "up_proj": Split(0), "down_proj": Split(1)}
_EXPERTS = {
    "experts": {"gate_up_proj": Split(0), "down_proj": Split(0)},
    "rows": {"gate_up_proj": Split(1, 2), "down_proj": Split(2)},
}
_RULES = (
    (re.compile(r"(?:.*\.)?self_attn\.(\w+?)(?:\.weight(?:_scale_inv)?)?"), _ATTENTION),
    (re.compile(r"(?:.*\.)?mlp\.shared_experts\.(\w+)\.weight(?:_scale_inv)?"), _SHARED),
    (re.compile(r"(?:.*\.)?(embed_tokens|lm_head)\.weight"), {"embed_tokens": Split(0), "lm_head": Split(0)}),
)
_ROUTED = re.compile(r"(?:.*\.)?mlp\.experts\.(\w+?)(?:_scale_inv)?")
_OFFICIAL = re.compile(r"(\w+?)(?:\.weight|\.scale)?")


def split_of(name: str, expert_layout: str = "experts") -> Split | None:
    """Return how a parameter, or its scales, of a transformers model is split; None if every rank has all of it."""
    if match := _ROUTED.fullmatch(name):
        return _EXPERTS[expert_layout].get(match[1])
    return next((table.get(match[1]) for rule, table in _RULES if (match := rule.fullmatch(name))), None)


def attention_split_of(name: str) -> Split | None:
    """Return how a parameter of `DeepseekV4Attention`, by its official name, is split; None if it is not."""
    match = _OFFICIAL.fullmatch(name)
    return None if match is None else _ATTENTION.get(match[1])


def part_of(tensor: Tensor, split: Split | None, ranks: Ranks, *, ragged: bool = False) -> Tensor:
    """Return this rank's part of `tensor`: a view, or a copy where gate and up lie apart; all of it without `split`.

    Raises E701 unless the dim divides, or is `ragged`: then the last ranks may have less.
    """
    if split is None or ranks.size == 1:
        return tensor
    dim, halves = split
    size = tensor.shape[dim]
    if size % (halves * ranks.size) and not ragged:
        _fail_to_divide([Whole(f"dim {dim} of a tensor {tuple(tensor.shape)}", size, halves)], ranks)
    begin, end = ranks.part(size // halves)
    parts = [half.narrow(dim, begin, end - begin) for half in tensor.chunk(halves, dim)]
    return parts[0] if halves == 1 else torch.cat(parts, dim)


def attention_config(config: DeepseekV4Config, ranks: Ranks, *, fp8: bool) -> DeepseekV4Config:
    """Return the configuration of a rank's part of every attention layer: its heads and groups.

    Args:
        fp8: weights are e4m3 with scales of blocks, which ranks have whole.

    Raises E701 if the ranks do not divide heads, groups or blocks.
    """
    check_divides(attention_sizes(config, fp8=fp8), ranks)
    return replace(config, num_heads=config.num_heads // ranks.size, o_groups=config.o_groups // ranks.size)


def attention_sizes(config: DeepseekV4Config, *, fp8: bool) -> list[Whole]:
    """Return the sizes of attention that ranks divide."""
    sizes = [Whole("attention heads", config.num_heads), Whole("output groups", config.o_groups)]
    if fp8:
        sizes.append(Whole("rows of wq_b", config.num_heads * config.head_dim, WEIGHT_TILE))
        sizes.append(Whole("rows of wo_a", config.o_groups * config.o_lora_rank, WEIGHT_TILE))
    return sizes


def check_divides(sizes: Sequence[Whole], ranks: Ranks) -> None:
    """Raise E701, with the numbers of ranks that would do, unless `ranks` divide all `sizes`."""
    if not _divides(sizes, ranks.size):
        _fail_to_divide(sizes, ranks)


def _divides(sizes: Sequence[Whole], number: int) -> bool:
    return all(dim.size % (dim.unit * number) == 0 for dim in sizes)


def _fail_to_divide(sizes: Sequence[Whole], ranks: Ranks) -> None:
    wrong = [dim for dim in sizes if dim.size % (dim.unit * ranks.size)]
    numbers = [str(n) for n in range(1, min(dim.size for dim in sizes) + 1) if _divides(sizes, n)]
    units = ", ".join(f"{dim.size} {dim.name}" + f" in blocks of {dim.unit}" * (dim.unit > 1) for dim in wrong)
    fail(
        "E701",
        got=f"{ranks.size} ranks",
        why=f"the model has {units}",
        fix=f"use {' or '.join(numbers)} ranks" if numbers else "its blocks end within an expert: dequantise it",
    )


def check_layout(expert_layout: str) -> None:
    """Raise E701 for an unknown layout of experts."""
    check(
        expert_layout in EXPERT_LAYOUTS,
        "E701",
        got=f"expert_layout={expert_layout!r}",
        fix=f"pass one of {', '.join(EXPERT_LAYOUTS)}",
    )
