"""Folders of a checkpoint: configuration, index, and the headers of its safetensors files, with official names.

Headers name every tensor with its dtype, shape and place, so that a folder is checked without reading a weight. Three
sets of names are understood: DeepSeek's, transformers' modules, and the mixture that `save_pretrained` writes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...checkpoints.header import Source, Stored, read_header
from ...checkpoints.index import INDEX, other_weights, read_index, weight_files
from ...checkpoints.json_text import MOST_TENSORS, read_json
from ...checkpoints.paths import folder_of, shown
from ...errors import DSV4Error, check, error
from ...loading import HF_NAMES

MOST_PROBLEMS = 1000
"""Errors that are built of one folder; more are counted."""

_SHARED = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{theirs}": f"attn.{ours}" for ours, theirs in HF_NAMES.items()},
    "attn.norm": "attn.kv_norm",
    **{f"{part}_hc.{leaf}": f"hc_{part}_{leaf}" for part in ("attn", "ffn") for leaf in ("fn", "base", "scale")},
    "mlp.gate": "ffn.gate",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    **{f"mlp.shared_experts.{theirs}": f"ffn.shared_experts.{ours}" for theirs, ours in _SHARED.items()},
    **{
        f"{mlp}.experts.{name}{theirs}": f"ffn.experts.{name}{ours}"
        for mlp in ("mlp", "ffn")
        for name in ("gate_up_proj", "down_proj")
        for theirs, ours in (("", ""), ("_scale_inv", ".scale"))
    },
}
"""Names within a layer, with or without suffix: transformers' -> DeepSeek's."""
_MODEL_NAMES = {
    "embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    **{f"hc_head.hc_{leaf}": f"hc_head_{leaf}" for leaf in ("fn", "base", "scale")},
}
_LAYER = re.compile(r"layers\.([0-9]{1,9})\.(.+)")
_EXPERT = re.compile(r"(?:mlp|ffn)\.experts\.([0-9]{1,9})\.(\w+)\.(\w+)")


class Problems:
    """Errors that have not been raised: the first `MOST_PROBLEMS`, and the number of all."""

    def __init__(self) -> None:
        self.kept: list[DSV4Error] = []
        self.count = 0

    def add(self, code: str, *, got: str, why: str = "", fix: str = "") -> None:
        """Add an error by its code and lines."""
        self.append(error(code, got=got, why=why, fix=fix) if len(self.kept) < MOST_PROBLEMS else None)

    def append(self, problem: DSV4Error | None) -> None:
        """Add an error; None is counted alone."""
        self.count += 1
        if problem is not None and len(self.kept) < MOST_PROBLEMS:
            self.kept.append(problem)


@dataclass(slots=True)
class Checkpoint:
    """A folder whose headers have been read.

    Attributes:
        folder: where `config.json` is.
        config: content of `config.json`.
        files: safetensors files, in the order of their names.
        sources: files whose headers were read, to read tensors from.
        tensors: tensors of the model by official name.
        drafts: tensors of draft layers (`mtp.*`), which are not loaded.
        problems: all that is wrong, as errors that have not been raised.
    """

    folder: Path
    config: dict[str, Any]
    files: list[Path] = field(default_factory=list)
    sources: dict[Path, Source] = field(default_factory=dict)
    tensors: dict[str, Stored] = field(default_factory=dict)
    drafts: dict[str, Stored] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)


def official_name(name: str) -> str:
    """Return DeepSeek's name of a tensor that has DeepSeek's or one of transformers' names; others are kept.

    Weights of all experts in one tensor are `layers.N.ffn.experts.gate_up_proj` and `down_proj`, their scales have
    the suffix `.scale`: DeepSeek stores experts one by one and has no name for them.
    """
    name = name.removeprefix("model.")
    name = _MODEL_NAMES.get(name, name)
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return name
    number, rest = layer.groups()
    return f"layers.{number}.{_official_in_layer(rest)}"


def _official_in_layer(rest: str) -> str:
    if rest in _LAYER_NAMES:
        return _LAYER_NAMES[rest]
    stem, _, suffix = rest.rpartition(".")
    suffix = "scale" if suffix == "weight_scale_inv" else suffix
    expert = _EXPERT.fullmatch(f"{stem}.{suffix}")
    if expert is not None:
        number, matrix, suffix = expert.groups()
        return f"ffn.experts.{number}.{_SHARED.get(matrix, matrix)}.{suffix}"
    return f"{_LAYER_NAMES.get(stem, stem)}.{suffix}" if stem else rest


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read the configuration, the index and all headers of a folder.

    Raises E209 if there is no such folder or nothing in it to check. Whatever else is wrong is in `problems`.
    """
    folder = _folder(path)
    checkpoint = Checkpoint(folder, read_json(folder, folder / "config.json"))
    index = read_index(folder)
    checkpoint.files = _files(folder, index)
    listed: dict[Path, set[str]] = {}
    for name, other in index.items():
        listed.setdefault(folder / other, set()).add(name)
    for file in checkpoint.files:
        names = listed.get(file, set())
        if not os.path.lexists(file):
            why = f"holds {len(names)} tensors by the index, {min(names)} first" if names else ""
            checkpoint.problems.add("E209", got=f"no file {file}", why=why, fix="finish the download")
            continue
        tensors, source, problem = read_header(folder, file)
        if source is not None:
            checkpoint.sources[file] = source
        if problem is not None:
            checkpoint.problems.append(problem)
        elif index:
            _compare(checkpoint, file, tensors, names, index)
        for stored in tensors.values():
            _add(checkpoint, stored)
        most = len(checkpoint.tensors) + len(checkpoint.drafts) <= MOST_TENSORS
        check(most, "E209", got=f"more than {MOST_TENSORS} tensors in {folder}", why="DeepSeek-V4 has fewer")
    return checkpoint


def _compare(
    found: Checkpoint, file: Path, tensors: Mapping[str, Stored], listed: set[str], index: Mapping[str, str]
) -> None:
    """Report tensors that are in `file` and not listed there by the index, and the reverse."""
    for name, stored in tensors.items():
        if name not in listed:
            where = f"names {index[name]}" if name in index else "does not name it"
            found.problems.add("E209", got=f"{stored}, for which {INDEX} {where}", fix=_REPAIR)
    for name in sorted(listed - tensors.keys()):
        got = f"no tensor {name} in {file.name}, where {INDEX} says it is"
        found.problems.add("E209", got=got, fix=_REPAIR)


_REPAIR = "download the index and the file again: they belong to different checkpoints"


def _add(found: Checkpoint, stored: Stored) -> None:
    name = official_name(stored.name)
    group = found.drafts if name.startswith("mtp.") else found.tensors
    if name in group:
        got = f"{name} twice: {group[name]} and {stored}"
        found.problems.add("E207", got=got, fix="remove the copy that does not belong to the model")
    group.setdefault(name, stored)


def _folder(path: str | Path) -> Path:
    """Return the folder at `path`, or raise E209 with a likely fix."""
    folder, name = folder_of(path), shown(str(path))[1:-1]
    if os.path.isdir(folder):
        if os.path.lexists(folder / "config.json"):
            return folder
        nested = sorted(
            config.parent for depth in ("*", "snapshots/*") for config in folder.glob(f"{depth}/config.json")
        )
        candidates = ", ".join(map(str, nested[:3]))
        fix = f"pass the folder that holds it: {candidates}" if nested else "pass the folder of a whole checkpoint"
        why = "adapters alone are not a model" if os.path.isfile(folder / "adapter_config.json") else ""
        raise error("E209", got=f"no config.json in {folder}", why=why, fix=fix)
    if os.path.isfile(folder):
        raise error("E209", got=f"{folder}, a file", fix=f"pass its folder, {folder.parent}")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        raise error(
            "E209",
            got=f"no folder {name}",
            why="a name on the Hugging Face Hub is not downloaded: nothing here opens a network connection",
            fix=f"hf download {name} --local-dir FOLDER, and pass FOLDER",
        )
    raise error("E209", got=f"no folder {name}", fix="pass the folder with config.json and *.safetensors")


def _files(folder: Path, index: Mapping[str, str]) -> list[Path]:
    """Return the safetensors files of the model, those that are missing included, or raise E209 if there is none."""
    files = weight_files(folder, index)
    other = "" if files else other_weights(folder)
    check(
        bool(files),
        "E209",
        got=f"no .safetensors in {folder}" + (f", but {other}" if other else ""),
        fix="download the safetensors files, or save the model with transformers' save_pretrained",
    )
    return files


def without_drafts(checkpoint: Checkpoint) -> DSV4Error:
    """Return the error of a folder that draft layers are asked of, and that has none."""
    return error(
        "E209",
        got=f"no draft layers (mtp.*) in {checkpoint.folder}",
        why='drafts="on" asks for them',
        fix='drafts="auto" loads the model without them, or download the whole checkpoint',
    )
