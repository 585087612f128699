"""A model that is split over ranks: each has its part of the weights, the same caches, and makes the same calls.

| part | split by |
|---|---|
| queries, sinks, output projections | heads and output groups |
| routed experts | expert, or rows of each |
| shared expert | rows |
| embedding, head | token |
| engram | rows of the table, rows of the projection |

All else is on every rank: the latents' projections, compressors, indexers, hyper-connections and router, and heads of
drafts. A layer, or a draft layer, has two all-reduces, one with an engram a third, and a gather.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from ...errors import check
from ...hf.model.in_step import InStep
from ...hf.model.split import facts_of_weights, with_collectives
from ...hf.model.split import on_all_ranks as on_all_ranks
from ...layout import MX_TILE
from ...parallel import Ranks, agreement, watchdog
from ...parallel.split import Split, Whole, check_divides, check_layout, part_of
from .config import V41Config
from .draft_config import V41DraftConfig
from .layers import Layer
from .model import V41Model
from .tables import TABLE

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_EXPERTS = {
    "experts": {"w13": Split(0), "w2": Split(0)},
    "rows": {"w13": Split(1, 2), "w2": Split(2)},
}
_WHERE = r"(?:layers|mtp)\.\d+\."
_RULES: tuple[tuple[str, Split], ...] = (
    (r"(embed|head)\.weight", Split(0)),
    (_WHERE + r"attn\.(wq_b|wo_a)\.\w+", Split(0)),
    (_WHERE + r"attn\.attn_sink", Split(0)),
    (_WHERE + r"attn\.wo_b\.\w+", Split(1)),
    (_WHERE + r"ffn\.shared_experts\.w13(_scale)?", Split(0, 2)),
    (_WHERE + r"ffn\.shared_experts\.w2(_scale)?", Split(1)),
    (TABLE.pattern, Split(0)),
    (_WHERE + r"engram\.wkv\.\w+", Split(0)),
)
_ROUTED = re.compile(_WHERE + r"ffn\.experts\.(w13|w2)(?:_scale)?")


def split_of(name: str, expert_layout: str) -> Split | None:
    """Return how a parameter of `V41Model` is split; None if every rank has all of it."""
    if match := _ROUTED.fullmatch(name):
        return _EXPERTS[expert_layout][match[1]]
    return next((how for pattern, how in _RULES if re.fullmatch(pattern, name)), None)


def sizes(
    config: V41Config, expert_layout: str, *, quantised: bool, drafts: V41DraftConfig | None = None
) -> list[Whole]:
    """Return the sizes that ranks divide, those of `drafts` too, in blocks of scales if weights are `quantised`."""
    unit = MX_TILE if quantised else 1
    divided = [
        Whole("tokens in the vocabulary", config.vocab_size),
        Whole("attention heads", config.num_heads),
        Whole("output groups", config.o_groups),
        Whole("rows of wq_b", config.num_heads * config.head_dim, unit),
        Whole("columns of wo_b", config.o_groups * config.o_lora_rank, unit),
        Whole("rows of an expert", config.intermediate_size, unit),
    ]
    if config.engram_layers:
        divided.append(Whole("rows of the engram's projection", (config.hc_mult + 1) * config.hidden_size, unit))
    if expert_layout == "experts":
        divided.append(Whole("experts", config.num_experts))
        if drafts is not None:
            divided.append(Whole("experts of a draft layer", drafts.num_experts))
    return divided


def keep_part(model: V41Model, ranks: Ranks, expert_layout: str, *, quantised: bool) -> None:
    """Let a model, possibly on the meta device, keep this rank's part of its weights, and free the rest.

    Raises E701, before anything is changed, if the ranks do not divide the model, or if it is split already.
    """
    check(model.ranks is None, "E701", got="a model that is split already", fix="split a whole model")
    host = any(layer.has_engram and layer.engram.ahead for layer in model._stack())
    check(not host, "E701", got="split of a model with tables in host memory", fix="v41.load(path, mesh=mesh)")
    check_layout(expert_layout)
    drafts = None if model.mtp is None else model.mtp.config
    check_divides(sizes(model.config, expert_layout, quantised=quantised, drafts=drafts), ranks)
    for name, parameter in model.named_parameters():
        if (how := split_of(name, expert_layout)) is not None:
            ragged = TABLE.fullmatch(name) is not None
            parameter.data = part_of(parameter.data, how, ranks, ragged=ragged).clone()
    config = model.config
    named = [name for name, _ in model.named_parameters()]
    model.shared_weights = frozenset(name for name in named if split_of(name, expert_layout) is None)
    model.ranks, model.first_token = ranks, ranks.part(config.vocab_size)[0]
    for layer in cast("list[Layer]", [*model.layers, *(model.mtp or ())]):
        attn, ffn = layer.attn, layer.ffn
        attn.ranks = ffn.ranks = ranks
        attn.heads, attn.groups = config.num_heads // ranks.size, config.o_groups // ranks.size
        ffn.first_expert = ranks.part(ffn.num_experts)[0] if expert_layout == "experts" else 0
        if layer.has_engram:
            rows = config.engram_rows[config.engram_layers.index(layer.layer)]
            layer.engram.ranks, layer.engram.first_row = ranks, ranks.part(rows)[0]


def ready_ranks(mesh: DeviceMesh, collectives: str, device: Any) -> Ranks:
    """Return the ranks of a mesh, with their collectives ready on `device`. Raises E701, and E302 for collectives."""
    return with_collectives(Ranks.of(mesh), collectives, device)


def watch(model: V41Model, facts: Mapping[str, Any], rank_timeout: float) -> None:
    """Compare what ranks have loaded, and watch their calls from now on. Raises E702 on all ranks if they differ.

    Args:
        facts: what else must be equal.
        rank_timeout: seconds that a rank must be gone before waits for it end.
    """
    ranks = model.ranks
    assert ranks is not None
    model.in_step = InStep(ranks, model.device, rank_timeout)
    # Both layouts of experts split the same parameters.
    shared = facts_of_weights(model, lambda name: split_of(name, "experts"), model.device, model.token_map)
    agreement.check_agree("v41.load", {**facts, "configuration": repr(model.config), **shared}, ranks)


@on_all_ranks
def split(
    model: V41Model,
    *,
    mesh: DeviceMesh,
    expert_layout: str = "experts",
    collectives: str = "functional",
    rank_timeout: float = watchdog.TIMEOUT,
) -> V41Model:
    """Make a model, the same on every rank, that of one rank, in place; `load(mesh=)` reads nothing else instead.

    Args:
        mesh: one dim, of ranks that all call this.
        expert_layout: "experts", routed experts by expert, or "rows", each by rows of its intermediate size.
        collectives: "functional", those of the group's backend, or "symmetric", over symmetric memory of GPUs.
        rank_timeout: seconds that a rank must be gone before waits for it end.

    Raises E701 for a mesh or layout that does not divide the model, E702 on all ranks if they differ, E302 for
    collectives that the device does not have.
    """
    quantised = any(parameter.dtype.itemsize == 1 for parameter in model.parameters())
    keep_part(model, ready_ranks(mesh, collectives, model.device), expert_layout, quantised=quantised)
    watch(model, {"expert_layout": expert_layout, "quantised": quantised}, rank_timeout)
    return model
