"""Configuration of the draft layers of DeepSeek-V4.1 (`mtp.*`): a block that drafts all tokens of a step at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...checkpoints.config_fields import Fields, Rule, check_fields, integer, list_of, without_nulls
from ...errors import check
from .config import RULE, V41Config

_NAMES = {
    "stages": "num_nextn_predict_layers",
    "block": "dspark_block_size",
    "noise_token": "dspark_noise_token_id",
    "taps": "dspark_target_layer_ids",
    "markov_rank": "dspark_markov_rank",
    "num_experts": "dspark_n_routed_experts",
    "experts_per_token": "dspark_num_experts_per_tok",
}
"""Fields of `V41DraftConfig` and their names in `text_config`."""
_MOST_LAYERS = 512
FIELDS: dict[str, Rule] = {
    "num_nextn_predict_layers": integer(0, 16),
    "dspark_block_size": integer(0, 16),
    "dspark_noise_token_id": integer(0, 1 << 31),
    "dspark_target_layer_ids": list_of(integer(0, _MOST_LAYERS), 64),
    "dspark_markov_rank": integer(1, 1 << 16),
    "dspark_n_routed_experts": integer(1, 4096),
    "dspark_num_experts_per_tok": integer(1, 64),
}
"""Fields of `text_config` that draft layers are built from."""


@dataclass(frozen=True, slots=True)
class V41DraftConfig:
    """Sizes of the draft layers. The defaults are those of DeepSeek-V4.1-Flash.

    Attributes:
        stages: layers of the block, each with a window alone.
        block: rows of the block, and drafts of a step, N.
        noise_token: token of all rows of a block but the first.
        taps: layers of the target whose inputs the stages read, in the order of `main_proj`.
        markov_rank: inner size of the head of token pairs.
        num_experts, experts_per_token: of a stage.
    """

    stages: int = 3
    block: int = 5
    noise_token: int = 128799
    taps: tuple[int, ...] = (37, 38, 39)
    markov_rank: int = 256
    num_experts: int = 128
    experts_per_token: int = 3

    @property
    def step_tokens(self) -> int:
        """Tokens of a request that a step verifies: its last one and the drafts."""
        return self.block + 1

    def stage_config(self, config: V41Config) -> V41Config:
        """Return the configuration of the stages as layers: windows alone, with fewer experts, without engrams."""
        return replace(
            config,
            num_layers=self.stages,
            compress_ratios=(0,) * self.stages,
            kv_sources=(),
            index_sources=(),
            engram_layers=(),
            engram_rows=(),
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
        )

    def check(self, config: V41Config) -> None:
        """Raise E205 for draft layers that do not fit the target's configuration."""
        ratios = config.compress_ratios[config.num_layers :]
        for good, got, why in (
            (self.stages > 0 and self.block > 0, f"{self.stages} draft layers of {self.block} tokens", "at least 1"),
            (
                bool(self.taps) and len(set(self.taps)) == len(self.taps) and max(self.taps) < config.num_layers,
                f"dspark_target_layer_ids={list(self.taps)}",
                f"the model has layers 0 to {config.num_layers - 1}",
            ),
            (
                config.last_source >= config.num_layers or min(self.taps, default=0) >= config.last_source,
                f"dspark_target_layer_ids={list(self.taps)}",
                f"prompts run layers from {config.last_source} on for all tokens that drafts read",
            ),
            (
                self.noise_token < config.vocab_size,
                f"dspark_noise_token_id={self.noise_token}",
                f"vocab_size={config.vocab_size}",
            ),
            (not any(ratios[: self.stages]), f"compress_ratios {list(ratios)} of draft layers", "they are 0"),
        ):
            check(good, "E205", got=got, why=why, rule=RULE)
        self.stage_config(config)  # its own checks

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], config: V41Config) -> V41DraftConfig:
        """Read the content of an official `config.json` with the text model `config`. Raises E205 for others."""
        check_fields(raw, {"text_config": Fields(FIELDS)})
        values = without_nulls(raw)["text_config"]
        missing = sorted(name for name in _NAMES.values() if name not in values)
        check(not missing, "E205", got=f"draft layers, and a text_config without {', '.join(missing)}", rule=RULE)
        fields = {ours: values[theirs] for ours, theirs in _NAMES.items()}
        drafts = cls(**fields | {"taps": tuple(fields["taps"])})
        drafts.check(config)
        return drafts

    def to_json(self) -> dict[str, Any]:
        """Return the fields of `text_config`."""
        fields = {theirs: getattr(self, ours) for ours, theirs in _NAMES.items()}
        return fields | {_NAMES["taps"]: list(self.taps)}
