"""Folders of a checkpoint: configuration, index, and the headers of its safetensors files, with official names.

Headers name every tensor with its dtype, shape and place, so that a folder is checked without reading a weight. Three
sets of names are understood: DeepSeek's, transformers' modules, and the mixture that `save_pretrained` writes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import DSV4Error, check, error
from ..loading import HF_NAMES

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes of safetensors that a header is understood with."""
_MAX_HEADER = 100_000_000
"""Bytes of the longest header that safetensors itself accepts."""
_LENGTH = 8
"""Bytes before the header, which hold its length."""

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
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?:mlp|ffn)\.experts\.(\d+)\.(\w+)\.(\w+)")
_OF_MANY = re.compile(r"(.*-)(\d+)-of-(\d{1,5})\.safetensors")


class Stored(NamedTuple):
    """A tensor in a file: its name there, the file, dtype in safetensors' words, shape, and its bytes' place."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.name} of {self.file.name}"


@dataclass(slots=True)
class Checkpoint:
    """A folder whose headers have been read.

    Attributes:
        folder: where `config.json` is.
        config: content of `config.json`.
        files: safetensors files, in the order of their names.
        tensors: tensors of the model by official name.
        drafts: tensors of draft layers (`mtp.*`), which are not loaded.
        problems: all that is wrong, as errors that have not been raised.
    """

    folder: Path
    config: dict[str, Any]
    files: list[Path] = field(default_factory=list)
    tensors: dict[str, Stored] = field(default_factory=dict)
    drafts: dict[str, Stored] = field(default_factory=dict)
    problems: list[DSV4Error] = field(default_factory=list)


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
    found = Checkpoint(folder, read_json(folder / "config.json"))
    index = _index(folder)
    found.files = _files(folder, index)
    listed: dict[Path, list[str]] = {}
    for name, other in index.items():
        listed.setdefault(folder / other, []).append(name)
    for file in found.files:
        names = listed.get(file, [])
        if not file.is_file():
            why = f"holds {len(names)} tensors by the index, {names[0]} first" if names else ""
            found.problems.append(error("E209", got=f"no file {file}", why=why, fix="finish the download"))
            continue
        tensors, problem = read_header(file)
        if problem is not None:
            found.problems.append(problem)
        elif index:
            _compare(found, file, tensors, set(names), index)
        for stored in tensors.values():
            _add(found, stored)
    return found


def _compare(
    found: Checkpoint, file: Path, tensors: Mapping[str, Stored], listed: set[str], index: Mapping[str, str]
) -> None:
    """Report tensors that are in `file` and not listed there by the index, and the reverse."""
    for name, stored in tensors.items():
        if name not in listed:
            where = f"names {index[name]}" if name in index else "does not name it"
            found.problems.append(error("E209", got=f"{stored}, for which {INDEX} {where}", fix=_REPAIR))
    for name in sorted(listed - tensors.keys()):
        got = f"no tensor {name} in {file.name}, where {INDEX} says it is"
        found.problems.append(error("E209", got=got, fix=_REPAIR))


_REPAIR = "download the index and the file again: they belong to different checkpoints"


def _add(found: Checkpoint, stored: Stored) -> None:
    name = official_name(stored.name)
    group = found.drafts if name.startswith("mtp.") else found.tensors
    if name in group:
        got = f"{name} twice: {group[name]} and {stored}"
        found.problems.append(error("E207", got=got, fix="remove the copy that does not belong to the model"))
    group.setdefault(name, stored)


def _folder(path: str | Path) -> Path:
    """Return the folder at `path`, or raise E209 with what the caller may have meant."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return folder
        nested = sorted(each.parent for depth in ("*", "snapshots/*") for each in folder.glob(f"{depth}/config.json"))
        found = ", ".join(map(str, nested[:3]))
        fix = f"pass the folder that holds it: {found}" if nested else "pass the folder of a whole checkpoint"
        why = "adapters alone are no model" if (folder / "adapter_config.json").is_file() else ""
        raise error("E209", got=f"no config.json in {folder}", why=why, fix=fix)
    if folder.is_file():
        raise error("E209", got=f"{folder}, a file", fix=f"pass its folder, {folder.parent}")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        raise error(
            "E209",
            got=f"no folder {path}",
            why="a name on the Hugging Face Hub is not downloaded: nothing here opens a network connection",
            fix=f"hf download {path} --local-dir FOLDER, and pass FOLDER",
        )
    raise error("E209", got=f"no folder {folder}", fix="pass the folder with config.json and *.safetensors")


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or raise E209."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise error("E209", got=f"{file} is not JSON", why=str(fault), fix="download the file again") from None
    check(isinstance(value, dict), "E209", got=f"{file} holds a {type(value).__name__}, not an object")
    return dict(value)


def _index(folder: Path) -> dict[str, str]:
    """Return the index, tensor -> file, empty if the folder has none."""
    if not (folder / INDEX).is_file():
        return {}
    check(
        not (folder / SINGLE).is_file(),
        "E209",
        got=f"{INDEX} and {SINGLE} in {folder}",
        why="one of them is left over from another save",
        fix="remove the one that does not belong to config.json",
    )
    weights = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weights, dict) or not weights or not all(isinstance(file, str) for file in weights.values()):
        raise error("E209", got=f"{folder / INDEX} without a weight_map", fix="download the file again")
    for file in set(weights.values()):
        inside = not Path(file).is_absolute() and ".." not in Path(file).parts
        check(inside, "E209", got=f"{INDEX} with {file}, outside of {folder}", why="it names files of its folder")
    return weights


def _files(folder: Path, index: Mapping[str, str]) -> list[Path]:
    """Return the safetensors files of the model, those that are missing included."""
    if index:
        return sorted(folder / file for file in set(index.values()))
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("adapter_"))
    others = sorted(each.name for pattern in ("*.bin", "*.gguf", "*.pt", "*.pth") for each in folder.glob(pattern))
    check(
        bool(files),
        "E209",
        got=f"no .safetensors in {folder}" + (f", but {others[0]}" if others else ""),
        fix="download the safetensors files, or save the model with transformers' save_pretrained",
    )
    numbered = [match for file in files if (match := _OF_MANY.fullmatch(file.name))]
    if numbered and len(numbered) == len(files):
        stem, digits, count = numbered[0].groups()
        names = (f"{stem}{i:0{len(digits)}}-of-{count}.safetensors" for i in range(1, int(count) + 1))
        return sorted({*files, *(folder / name for name in names)})
    return files


def read_header(file: Path) -> tuple[dict[str, Stored], DSV4Error | None]:
    """Read the header of a safetensors file and compare it with the size of the file.

    Returns tensors by name, and what is wrong with the file, or None.
    """

    def damaged(got: str, why: str = "", fix: str = "download the file again") -> DSV4Error:
        return error("E209", got=f"{file}: {got}", why=why, fix=fix)

    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            first = stream.read(_LENGTH)
            length = int.from_bytes(first, "little")
            header = stream.read(length) if length <= min(_MAX_HEADER, size) else b""
    except OSError as fault:
        return {}, damaged("cannot be read", str(fault), "let this user read it")
    if first == b"version ":
        return {}, damaged("a Git LFS pointer instead of weights", fix="git lfs pull in that folder")
    if len(first) < _LENGTH or len(header) < length or not length:
        return {}, damaged(f"{size} bytes, in which no safetensors header fits", "it is truncated, or another format")
    try:
        tensors, end = _tensors(file, json.loads(header))
    except (ValueError, KeyError, TypeError, AttributeError) as fault:
        return {}, damaged("a damaged header", f"{type(fault).__name__}: {fault}")
    data = size - _LENGTH - length
    if data == end:
        return tensors, None
    if data > end:
        return tensors, damaged(f"{data - end} bytes after the last tensor", "the header describes another file")
    cut = next(name for name, stored in tensors.items() if stored.begin + stored.nbytes > data)
    why = f"{cut} is the first tensor that is not whole"
    return tensors, damaged(f"truncated, {end - data} of {end + length + _LENGTH} bytes are missing", why)


def _places(header: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return where the tensors of a header begin and end, in the order of their places."""
    places = {name: tuple(entry["data_offsets"]) for name, entry in header.items() if name != "__metadata__"}
    return dict(sorted(places.items(), key=lambda item: item[1]))


def _tensors(file: Path, header: Mapping[str, Any]) -> tuple[dict[str, Stored], int]:
    """Return the tensors of a header and the bytes that they take, or raise ValueError for one that cannot be."""
    tensors: dict[str, Stored] = {}
    end = 0
    for name, (begin, after) in _places(header).items():
        dtype, shape = header[name]["dtype"], tuple(header[name]["shape"])
        if begin != end:
            raise ValueError(f"{name} begins at {begin}, where the tensor before ends at {end}")
        if not all(isinstance(dim, int) and dim >= 0 for dim in shape):
            raise ValueError(f"{name} of shape {shape}")
        if dtype in DTYPES and after - begin != math.prod(shape) * DTYPES[dtype].itemsize:
            raise ValueError(f"{name} has {after - begin} bytes, which {dtype} of shape {shape} does not take")
        end = max(after, begin)
        tensors[name] = Stored(name, file, dtype, shape, begin, after - begin)
    return tensors, end
