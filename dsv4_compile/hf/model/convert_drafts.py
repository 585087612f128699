"""Conversion of draft layers, which attaches them to a converted model, and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...cache import CacheFormat
from ...config import DeepseekV4Config
from ...errors import check
from ...parallel import Ranks, agreement, attention_config
from ...parallel.split import split_of
from . import split
from .convert_stack import check_stack, convert_stack, revert_stack
from .draft_columns import TOLD
from .draft_generate import COMPILED, STEPS
from .draft_model import DraftModel
from .draft_settings import check_step
from .undo_convert import Before
from .weight_types import embedding_weight

_SAME = (
    *("hidden_size", "vocab_size", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank"),
    *("sliding_window", "hc_mult", "rms_norm_eps", "qk_rope_head_dim"),
)
"""Settings that draft layers share with their target."""


def check_drafts(drafts: Any, model: Any, max_step_tokens: int | None) -> None:
    """Raise E208 for draft layers that do not belong to `model`, a model of transformers or a converted one."""
    if drafts is None:
        return
    fix = "pass what hf.load made, or a DraftModel of dsv4_compile.hf"
    check(isinstance(drafts, DraftModel), "E208", got=f"drafts, a {type(drafts).__name__}", fix=fix)
    attached = drafts.target is not None
    check(not attached, "E208", got="draft layers of a converted model", fix="revert that one, or deepcopy(drafts)")
    for name in _SAME:
        theirs, ours = getattr(drafts.config, name, None), getattr(model.config, name, None)
        check(theirs == ours, "E208", got=f"draft layers with {name}={theirs}", why=f"the model has {ours}")
    layers = model.config.num_hidden_layers
    beyond = [layer for layer in drafts.tap_layers if layer >= layers]
    check(not beyond, "E208", got=f"draft layers that read layers {beyond}", why=f"the model has {layers} layers")
    embedding = embedding_weight(model.model)
    for name, parameter in drafts.named_parameters():
        device = parameter.device
        check(device == embedding.device, "E208", got=f"{name} of drafts on {device}", why=f"not {embedding.device}")
    check_step(drafts.settings, max_step_tokens)
    drafts.model.__dict__["embed_tokens"] = model.model.embed_tokens
    try:
        check_stack(drafts.model, DeepseekV4Config.from_hf(drafts.config), attention_only=False)
    finally:
        drafts.model.__dict__["embed_tokens"] = None


def draft_facts(drafts: DraftModel | None, expert_layout: str) -> dict[str, Any]:
    """Return facts about draft layers that must be equal on all ranks of a mesh."""
    if drafts is None:
        return {"drafts": None}
    whole = [each for name, each in drafts.named_parameters() if split_of(name, expert_layout) is None]
    return {
        "drafts": repr(drafts.settings),
        "configuration of drafts": drafts.config.to_json_string(),
        "bits of draft weights that all ranks have": agreement.digest(*whole),
    }


def convert_drafts(
    drafts: DraftModel,
    model: Any,
    cache_format: CacheFormat,
    *,
    max_batch_size: int,
    max_seq_len: int,
    ranks: Ranks | None,
    expert_layout: str,
) -> None:
    """Convert `drafts`, which have passed `check_drafts`, and attach them to `model`, which is converted.

    Args:
        max_seq_len: longest sequence of the model, from which drafts go on.
        ranks: a mesh whose ranks all call this. Each keeps its part of the weights.
    """
    config = DeepseekV4Config.from_hf(drafts.config)
    before = Before(drafts, values=False)
    try:
        if ranks is not None:
            _keep_part(drafts, ranks, expert_layout)
            config = attention_config(config, ranks, fp8=False)
        weight = embedding_weight(model.model)
        options: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        caches = drafts.allocate_caches(config, cache_format, max_batch_size=max_batch_size, **options)
        drafts.attach(model, caches, cache_format)
        convert_stack(
            drafts.eval(),
            config,
            cache_format,
            max_seq_len + drafts.num_drafts,
            ranks=ranks,
            expert_layout=expert_layout,
        )
    except BaseException:
        before.restore()
        raise
    model.__dict__["dsv4_drafts"] = drafts


def _keep_part(drafts: DraftModel, ranks: Ranks, expert_layout: str) -> None:
    """Keep this rank's part of the weights. Raises E701 if ranks do not divide them."""
    wanted = replace(ranks, symmetric=False), expert_layout
    part = drafts.__dict__.get("dsv4_part")
    if part is None:
        split.keep_part(drafts, ranks, expert_layout)
    else:
        check(part == wanted, "E701", got=f"a part of drafts for {part}", why=f"convert is for {wanted}")


@torch.no_grad()
def revert_drafts(model: Any) -> None:
    """Detach a converted model's draft layers, if it has some, restore their classes, and drop steps that call them."""
    for name in (STEPS, TOLD, COMPILED):
        model.__dict__.pop(name, None)
    drafts = model.__dict__.pop("dsv4_drafts", None)
    if drafts is not None:
        revert_stack(drafts)
        drafts.detach()
