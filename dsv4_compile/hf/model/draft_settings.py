"""Kind and sizes of a model's draft layers, from the fields of `config.json`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...checkpoints.config_fields import DRAFTS, check_fields
from ...errors import check
from .taps import Taps

DSPARK, MTP = "dspark", "mtp"
MOST_MTP = 3
"""Largest number of drafts of one MTP layer."""


class DraftSettings(NamedTuple):
    """Kind and sizes of the draft layers of a checkpoint.

    Attributes:
        kind: `dspark`, a block of layers that drafts all tokens at once, or `mtp`, a layer that is called in turn.
        stages: number of draft layers.
        num_drafts: tokens that are drafted in a step, N.
        taps: what they read of the target model.
        noise_token: token of all rows of a DSpark block but the first.
        markov_rank: inner size of DSpark's Markov head.
    """

    kind: str
    stages: int
    num_drafts: int
    taps: Taps
    noise_token: int = 0
    markov_rank: int = 256

    @property
    def step_tokens(self) -> int:
        """Tokens that a step verifies: the last one and its drafts."""
        return self.num_drafts + 1


def settings_of(raw: Mapping[str, Any], kind: str, stages: int, num_drafts: int | None = None) -> DraftSettings:
    """Return the settings of draft layers of `kind`, whose number the caller has found.

    Args:
        raw: fields of `config.json`.
        num_drafts: tokens that an MTP layer drafts, 1 to `MOST_MTP` (None = 1). DSpark drafts a block of
            `dspark_block_size`, for which it was trained.

    Raises E205 for fields that contradict each other, E201 for a `num_drafts` that is not possible.
    """
    check_fields(raw, DRAFTS)
    layers = raw["num_hidden_layers"]
    if kind == MTP:
        check(stages == 1, "E205", got=f"{stages} MTP layers", why="DeepSeek-V4 has one")
        wanted = 1 if num_drafts is None else num_drafts
        possible = type(wanted) is int and 1 <= wanted <= MOST_MTP
        check(possible, "E201", got=f"num_drafts={wanted!r}", rule=f"an MTP layer drafts 1 to {MOST_MTP} tokens")
        return DraftSettings(kind, stages, wanted, Taps((layers - 1,), mean=False))
    block, tapped = raw.get("dspark_block_size") or 0, tuple(raw.get("dspark_target_layer_ids") or ())
    got = f"dspark_block_size={block}, dspark_target_layer_ids={list(tapped)} with DSpark layers"
    check(block > 0 and bool(tapped), "E205", got=got, why="both are positive", fix="use the checkpoint's config.json")
    good = all(layer < layers for layer in tapped) and len(set(tapped)) == len(tapped)
    check(good, "E205", got=f"dspark_target_layer_ids={list(tapped)}", why=f"the model has layers 0 to {layers - 1}")
    noise = raw.get("dspark_noise_token_id") or 0
    vocabulary = raw["vocab_size"]
    check(noise < vocabulary, "E205", got=f"dspark_noise_token_id={noise} with vocab_size={vocabulary}")
    fixed = num_drafts in (None, block)
    check(fixed, "E201", got=f"num_drafts={num_drafts!r}", rule=f"these DSpark layers draft {block} tokens")
    rank = raw.get("dspark_markov_rank") or 256
    return DraftSettings(kind, stages, block, Taps(tapped), noise, rank)


def stage_config(config: Any, stages: int) -> Any:
    """Return transformers' configuration of the decoder stack of draft layers: window layers without hash routing."""
    found = copy.deepcopy(config)
    found.num_hidden_layers = stages
    found.layer_types = ["sliding_attention"] * stages
    found.mlp_layer_types = ["moe"] * stages
    found.tie_word_embeddings = False
    return found


def check_step(settings: DraftSettings, max_step_tokens: int | None) -> None:
    """Raise E204 for caches of a model that cannot verify its drafts in one step."""
    step = settings.step_tokens
    check(
        max_step_tokens is None or max_step_tokens >= step,
        "E204",
        got=f"max_step_tokens={max_step_tokens} with {settings.num_drafts} drafts",
        why="a step verifies the last token and its drafts",
        fix=f"pass at least {step}, or leave the drafts out",
    )
