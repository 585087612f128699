"""Places of a checkpoint's draft tensors (`mtp.*`) in a `DraftModel`, decided from headers alone."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...cache import CacheFormat
from ...checkpoints.config_fields import DRAFTS, check_fields
from ...checkpoints.header import Stored
from ...checkpoints.json_text import read_json
from ...config import DeepseekV4Config
from ...errors import check
from ..model.draft_kinds import KINDS
from ..model.draft_model import PROJECTIONS, DraftProjection
from ..model.draft_names import draft_name
from ..model.draft_settings import DSPARK, MTP, settings_of
from .checkpoint import Checkpoint
from .placement import QUANTISED, Placement, Planner

_KINDS = {DSPARK: "mtp.0.main_proj.weight", MTP: "mtp.0.e_proj.weight"}
"""Tensor by which a kind is recognised."""
_STAGE = re.compile(r"mtp\.([0-9]{1,9})\.(.+)")
WITHOUT = 'load(..., drafts="off") loads the model without its draft layers'


def place_drafts(
    checkpoint: Checkpoint, target: Placement, *, dequantize: bool = False, num_drafts: int | None = None
) -> Placement | None:
    """Decide where every draft tensor of `checkpoint` goes; None if it has none.

    Args:
        target: placement of the model that they draft for.
        dequantize: make e4m3 and MXFP4 weights floating.
        num_drafts: see `settings_of`.

    Raises E207 for tensors of both kinds or of neither, E205 for a configuration that they do not fit, E201 for a wrong
    `num_drafts`. Other tensors that do not fit are `problems`.
    """
    if not checkpoint.drafts:
        return None
    kind, stages = kind_of(checkpoint), _stages(checkpoint)
    config = target.model.config
    settings = settings_of(checkpoint.config | {"vocab_size": config.vocab_size}, kind, stages, num_drafts)
    with torch.device("meta"):
        placement = Placement(KINDS[kind](config, settings))
        planner = DraftPlanner(checkpoint.drafts, placement, dequantize)
        planner.quantise_modules()
    planner.fill_all(config.dtype)
    return placement


def kind_of(checkpoint: Checkpoint) -> str:
    """Return the kind of a checkpoint's draft layers. Raises E207 for both, or neither."""
    kinds = [kind for kind, name in _KINDS.items() if name in checkpoint.drafts]
    names = " and ".join(_KINDS.values()) if kinds else f"draft layers without {' or '.join(_KINDS.values())}"
    why = "draft layers are DSpark or MTP" if kinds else f"{min(checkpoint.drafts)} belongs to one kind or the other"
    check(len(kinds) == 1, "E207", got=names, why=why, fix=WITHOUT)
    return kinds[0]


def _stages(checkpoint: Checkpoint) -> int:
    """Return the number of draft layers, which `num_nextn_predict_layers` does not say.

    Raises E207 unless tensors are stored for each.
    """
    numbers = sorted({int(match[1]) for name in checkpoint.drafts if (match := _STAGE.match(name))})
    raw = checkpoint.config
    check_fields(raw, DRAFTS)
    source, wanted = "n_mtp_layers", raw.get("n_mtp_layers") or _of_inference(checkpoint)
    ratios = raw.get("compress_ratios")
    if not wanted and ratios is not None and len(ratios) > raw["num_hidden_layers"]:
        rest = ratios[raw["num_hidden_layers"] :]
        source, wanted = "compress_ratios", len(rest)
        windows = all(ratio in (0, 1) for ratio in rest)
        check(windows, "E205", got=f"draft layers of ratios {rest}", why="draft layers see a window alone", fix=WITHOUT)
    wanted = wanted or len(numbers)
    check(
        numbers == list(range(wanted)),
        "E207",
        got=f"tensors of draft layers {numbers}",
        why=f"{source} of the configuration says {wanted} draft layers, from mtp.0 on",
        fix=f"download the missing files, or use the configuration of this checkpoint; {WITHOUT}",
    )
    return wanted


def _of_inference(checkpoint: Checkpoint) -> int | None:
    """Return `n_mtp_layers` of DeepSeek's `inference/config.json`, None without one."""
    file = checkpoint.folder / "inference" / "config.json"
    if not os.path.lexists(file):
        return None
    raw = read_json(checkpoint.folder, file)
    check_fields({"n_mtp_layers": raw.get("n_mtp_layers")}, {"n_mtp_layers": DRAFTS["n_mtp_layers"]}, where=f"{file}: ")
    return raw.get("n_mtp_layers")


class DraftPlanner(Planner):
    """Pairs stored tensors with the parameters of a `DraftModel`."""

    def __init__(self, tensors: Mapping[str, Stored], placement: Placement, dequantize: bool) -> None:
        super().__init__(tensors, placement, dequantize)
        config = self.model.config
        self.own: dict[str, str] = {}
        for name, module in (("own_embed", nn.Embedding), ("own_head", nn.Linear)):
            leaf = name.removeprefix("own_")
            stored = [key for key in tensors if re.fullmatch(rf"mtp\.[0-9]+\.{leaf}\.weight", key)]
            if stored:
                shape = config.vocab_size, config.hidden_size
                options: dict[str, Any] = {"bias": False} if module is nn.Linear else {}
                setattr(self.model, name, module(*(shape if module is nn.Embedding else shape[::-1]), **options))
                self.own[f"{name}.weight"] = min(stored)

    def official(self, name: str) -> str:
        """Return the name under which checkpoints store a parameter of the draft model."""
        return self.own.get(name) or draft_name(name, self.model.settings.stages)

    def problem(self, got: str, why: str = "", fix: str = "") -> None:
        """Record a problem, with how to load the model without drafts."""
        super().problem(got, why, "; ".join(filter(None, (fix, WITHOUT))))

    def quantise_modules(self) -> None:
        """Replace modules whose weights are quantised; projections read their format, whatever the layers have."""
        super().quantise_modules()
        for name in PROJECTIONS:
            module: Any = getattr(self.model, name, None)
            kind, scale = ("float", None) if module is None else self.first(name)
            if kind == "e4m3" and not self.dequantize:
                scale_dtype = torch.float32 if scale is not None and scale.dtype == "F32" else torch.float8_e8m0fnu
                rows, columns = module.weight.shape
                setattr(self.model, name, DraftProjection(rows, columns, scale_dtype=scale_dtype))
        self.quantised = (*QUANTISED, *PROJECTIONS)

    def finish(self) -> None:
        """Report tensors that no parameter takes."""
        for name, stored in self.stored.items():
            if name not in self.used:
                why = f"no parameter of {self.model.kind} draft layers has this name"
                self.problem(f"a tensor too many: {stored}", why)


def describe_drafts(checkpoint: Checkpoint) -> str:
    """Return number, names and bytes of the draft layers in a folder."""
    layers = sorted({".".join(name.split(".")[:2]) for name in checkpoint.drafts})
    size = sum(stored.nbytes for stored in checkpoint.drafts.values())
    return f"{', '.join(layers)}: {len(checkpoint.drafts)} tensors, {size / 1e9:.2f} GB"


def cache_bytes(placement: Placement, formats: CacheFormat) -> int:
    """Return the bytes of the caches that draft layers need for one request."""
    config = DeepseekV4Config.from_hf(placement.model.config)
    options: dict[str, Any] = {"dtype": placement.model.config.dtype, "device": "meta"}
    return int(placement.model.allocate_caches(config, formats, max_batch_size=1, **options).nbytes)
