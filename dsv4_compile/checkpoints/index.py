"""Index and safetensors files of a checkpoint folder."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ..errors import check, error
from .json_text import MOST_INDEX, read_json
from .paths import is_name, shown, why_bad_file_name

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MOST_FILES = 10_000
"""Safetensors files of a folder: V4-Pro has 64."""
_OF_MANY = re.compile(r"(.*-)([0-9]{1,9})-of-([0-9]{1,5})\.safetensors")


def read_index(folder: Path) -> dict[str, str]:
    """Return the index of a folder, tensor -> file name, empty if it has none. Raises E209 for a damaged one."""
    if not os.path.lexists(folder / INDEX):
        return {}
    check(
        not os.path.lexists(folder / SINGLE),
        "E209",
        got=f"{INDEX} and {SINGLE} in {folder}",
        why="one of them is left over from an earlier save",
        fix="remove the one that does not belong to config.json",
    )
    weights = read_json(folder, folder / INDEX, most_bytes=MOST_INDEX).get("weight_map")
    if not isinstance(weights, dict) or not weights or not all(isinstance(file, str) for file in weights.values()):
        raise error("E209", got=f"{folder / INDEX} without a weight_map", fix="download the file again")
    files = set(weights.values())
    _check_number(folder, len(files))
    for file in files:
        why = why_bad_file_name(file)
        location = f", outside of {folder}" if why.startswith("it names") else ""
        check(not why, "E209", got=f"{INDEX} with {file if is_name(file) else shown(file)}{location}", why=why)
    bad = next((name for name in weights if not is_name(name)), None)
    check(bad is None, "E209", got=f"{INDEX} with a tensor named {shown(bad)}", fix="download the file again")
    return weights


def weight_files(folder: Path, index: Mapping[str, str]) -> list[Path]:
    """Return the safetensors files of a folder in the order of their names, those that are missing included."""
    if index:
        return sorted(folder / file for file in set(index.values()))
    if os.path.lexists(folder / SINGLE):
        return [folder / SINGLE]
    names = sorted(os.listdir(folder))
    files = [name for name in names if name.endswith(".safetensors") and not name.startswith("adapter_")]
    _check_number(folder, len(files))
    bad = next((name for name in files if why_bad_file_name(name)), None)
    check(bad is None, "E209", got=f"a file named {shown(bad)}", why=why_bad_file_name(bad), fix="rename it")
    numbered = [match for name in files if (match := _OF_MANY.fullmatch(name))]
    if numbered and len(numbered) == len(files):
        stem, digits, count = numbered[0].groups()
        _check_number(folder, int(count))
        files += (f"{stem}{i:0{len(digits)}}-of-{count}.safetensors" for i in range(1, int(count) + 1))
    return sorted({folder / name for name in files})


def _check_number(folder: Path, count: int) -> None:
    check(
        count <= MOST_FILES, "E209", got=f"{count} safetensors files in {folder}", why=f"at most {MOST_FILES} are read"
    )


def other_weights(folder: Path) -> str:
    """Return the name of a file with weights in a format other than safetensors, or ""."""
    names = sorted(os.listdir(folder))
    return next((shown(name) for name in names if name.endswith((".bin", ".gguf", ".pt", ".pth"))), "")
