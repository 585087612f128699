"""Places of a folder's stored tensors in the modules, decided from headers alone, and errors for the others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ...checkpoints.header import Stored
from ...errors import DSV4Error, check, error
from ...hf.loading.checkpoint import Checkpoint, Problems
from ...layout import MX_TILE
from .config import V41Config
from .draft_config import V41DraftConfig
from .tensors import E2M1, E4M3, SKIPPED, Expected, draft_tensors, expected_tensors

_LAYER = re.compile(r"layers\.([0-9]{1,9})\.")
_EXPERT = re.compile(r"layers\.[0-9]{1,9}\.ffn\.experts\.([0-9]{1,9})\.w1\.weight")
_STAGE = re.compile(r"mtp\.([0-9]{1,9})\.")
_STAGE_EXPERT = re.compile(r"mtp\.[0-9]{1,9}\.ffn\.experts\.([0-9]{1,9})\.w1\.weight")
WITHOUT_DRAFTS = 'v41.load(..., drafts="off") loads the model without its draft layers'
_BYTES = ("I8", "U8")
_SCALES = ("F8_E8M0", "U8")
_FLOATS = ("BF16", "F16", "F32")


class Found(NamedTuple):
    """An expected tensor, its stored weight, and its stored scales or None."""

    expected: Expected
    weight: Stored
    scale: Stored | None

    @property
    def nbytes(self) -> int:
        """Bytes of weight and scales."""
        return self.weight.nbytes + (0 if self.scale is None else self.scale.nbytes)


@dataclass(slots=True)
class V41Placement:
    """Tensors of the text model, those that are left out, and all that does not fit as errors not yet raised.

    Attributes:
        drafts: sizes of the draft layers that are loaded, or None; `draft_tensors` are theirs, `left_out` drafts that
            are not.
    """

    config: V41Config
    drafts: V41DraftConfig | None = None
    matched: list[Found] = field(default_factory=list)
    draft_tensors: list[Found] = field(default_factory=list)
    vision: list[Stored] = field(default_factory=list)
    left_out: list[Stored] = field(default_factory=list)
    problems: Problems = field(default_factory=Problems)

    @property
    def nbytes(self) -> int:
        """Bytes of the text model and of draft layers that are loaded, as they are stored."""
        return sum(tensor.nbytes for tensor in (*self.matched, *self.draft_tensors))


def place(checkpoint: Checkpoint, *, drafts: bool = True) -> V41Placement:
    """Match a folder's tensors with those of its configuration, draft layers too unless `drafts` is False.

    Raises E205 for a configuration of a different model, and E207 for one of more layers or experts than are stored.
    """
    config = V41Config.from_json(checkpoint.config)
    inner = config.intermediate_size
    check(inner % MX_TILE == 0, "E205", got=f"moe_intermediate_size={inner}", rule=f"a multiple of {MX_TILE}")
    _check_counts(config, checkpoint.tensors)
    placement = V41Placement(config)
    left = dict(checkpoint.tensors)
    placement.matched = _matched(placement.problems, expected_tensors(config), left)
    for name, stored in left.items():
        if SKIPPED.match(name):
            placement.vision.append(stored)
        else:
            placement.problems.add("E207", got=f"{stored}, which the configuration does not have")
    if not drafts:
        placement.left_out = list(checkpoint.drafts.values())
    elif checkpoint.drafts:
        _place_drafts(checkpoint, placement)
    return placement


def _place_drafts(checkpoint: Checkpoint, placement: V41Placement) -> None:
    """Match the draft layers of a folder."""
    config = placement.config
    try:
        placement.drafts = drafts = V41DraftConfig.from_json(checkpoint.config, config)
    except DSV4Error as fault:
        raise error(fault.code, got=fault.got, why=fault.why, fix=WITHOUT_DRAFTS) from None
    for what, wanted, pattern in (
        ("num_nextn_predict_layers", drafts.stages, _STAGE),
        ("dspark_n_routed_experts", drafts.num_experts, _STAGE_EXPERT),
    ):
        stored = len({match[1] for name in checkpoint.drafts if (match := pattern.match(name))})
        got = f"{what}={wanted}, where the files have {stored}"
        check(wanted <= stored, "E207", got=got, why="draft layers are missing", fix=WITHOUT_DRAFTS)
    left = dict(checkpoint.drafts)
    placement.draft_tensors = _matched(placement.problems, draft_tensors(config, drafts), left)
    for stored_too_many in left.values():
        placement.problems.add("E207", got=f"{stored_too_many}, which draft layers do not have", fix=WITHOUT_DRAFTS)


def _matched(problems: Problems, tensors: Iterable[Expected], left: dict[str, Stored]) -> list[Found]:
    """Take expected tensors out of those that are `left`; report missing ones and those that do not fit."""
    matched = []
    for expected in tensors:
        weight = left.pop(expected.weight, None)
        scale = left.pop(expected.scale, None) if expected.scale else None
        if weight is None:
            problems.add("E207", got=f"no tensor {expected.weight}", why=f"{expected.storage} {expected.shape}")
        elif _fits(problems, expected, weight, scale):
            matched.append(Found(expected, weight, scale))
    return matched


def _check_counts(config: V41Config, tensors: Iterable[str]) -> None:
    """Raise E207 for a configuration of more layers or experts than are stored, so that files bound the work."""
    names = list(tensors)
    layers = {match[1] for name in names if (match := _LAYER.match(name))}
    experts = {match[1] for name in names if (match := _EXPERT.fullmatch(name))}
    why = "config.json and the files belong to different checkpoints, or files are missing"
    for what, wanted, stored in (
        ("num_hidden_layers", config.num_layers, len(layers)),
        ("n_routed_experts", config.num_experts, len(experts)),
    ):
        check(wanted <= stored, "E207", got=f"{what}={wanted}, where the files have {stored}", why=why)


def _fits(problems: Problems, expected: Expected, weight: Stored, scale: Stored | None) -> bool:
    """Report what is wrong with a stored tensor, and return whether nothing is."""
    dtype, shape = expected.stored
    got = f"{weight} {weight.dtype} {list(weight.shape)}"
    allowed: tuple[str, ...] = _BYTES if expected.storage == E2M1 else (dtype,)
    if dtype in _FLOATS:
        allowed = _FLOATS
    if weight.dtype not in allowed or weight.shape != shape:
        problems.add("E207", got=got, why=f"V4.1 has {dtype} {list(shape)} there")
        return False
    if not expected.scale:
        return True
    blocks = "32x32 elements" if expected.storage == E4M3 else "32 columns of a row"
    wanted = f"one F8_E8M0 scale for {blocks}: {list(expected.scale_shape)}"
    if scale is None:
        problems.add("E207", got=f"{weight} without {expected.scale}", why=f"V4.1 has {wanted}")
        return False
    if scale.dtype not in _SCALES or scale.shape != expected.scale_shape:
        why = f"V4.1 has {wanted}"
        if expected.storage == E4M3 and scale.shape == tuple(-(-size // 128) for size in shape):
            why += "; V4 has one for 128x128"
        problems.add("E207", got=f"{scale} {scale.dtype} {list(scale.shape)}", why=why)
        return False
    return True


def stored_kinds(matched: Iterable[Found]) -> Mapping[str, int]:
    """Return the bytes of each kind of weight, largest first."""
    kinds = {
        "engram": r"\.engram\.",
        "experts": r"\.ffn\.experts\.",
        "shared experts": r"\.ffn\.shared_experts\.",
        "attention": r"\.attn\.",
        "embedding, head": r"^(embed|head)$",
    }
    sizes: dict[str, int] = {}
    for tensor in matched:
        name = next((kind for kind, pattern in kinds.items() if re.search(pattern, tensor.expected.name)), "others")
        sizes[name] = sizes.get(name, 0) + tensor.nbytes
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))
