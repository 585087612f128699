"""Loading of weights into `DeepseekV4Attention`, from tensors or safetensors with DeepSeek's or Hugging Face's names.

The module's own names are DeepSeek's (`wq_a.weight`, `wq_a.scale`, ...). An e4m3 weight with scales is copied into an
fp8 module, and dequantised for a module with floating weights. A tensor that is missing, left over or of a wrong shape
raises E207 with its name, before any parameter is written.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoints.header import DTYPES, Source, Stored, read_header
from .checkpoints.index import read_index, weight_files
from .checkpoints.paths import folder_of
from .checkpoints.reader import Reader
from .errors import check, fail
from .layout import WEIGHT_TILE, cdiv
from .parallel.split import attention_split_of, part_of
from .reference.common.block_scale import dequantize_weight

HF_NAMES: dict[str, str] = {
    "wq_a": "q_a_proj",
    "q_norm": "q_a_norm",
    "wq_b": "q_b_proj",
    "wkv": "kv_proj",
    "kv_norm": "kv_norm",
    "attn_sink": "sinks",
    "wo_a": "o_a_proj",
    "wo_b": "o_b_proj",
    "compressor.wkv": "compressor.kv_proj",
    "compressor.wgate": "compressor.gate_proj",
    "compressor.ape": "compressor.position_bias",
    "compressor.norm": "compressor.kv_norm",
    "indexer.wq_b": "compressor.indexer.q_b_proj",
    "indexer.weights_proj": "compressor.indexer.scorer.weights_proj",
    "indexer.compressor.wkv": "compressor.indexer.kv_proj",
    "indexer.compressor.wgate": "compressor.indexer.gate_proj",
    "indexer.compressor.ape": "compressor.indexer.position_bias",
    "indexer.compressor.norm": "compressor.indexer.kv_norm",
}
"""Names of the weights of an attention layer without suffix: DeepSeek's name -> transformers' name."""

_E4M3, _E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_SCALES = (torch.float32, _E8M0, torch.uint8)
_NAN = 0xFF
"""The byte of NaN in e8m0."""
_HF_SUFFIX = {"weight": "weight", "scale": "weight_scale_inv"}


def hf_name(official: str) -> str:
    """Return the name in transformers of an official parameter name: `wq_a.scale` -> `q_a_proj.weight_scale_inv`."""
    if official in HF_NAMES:
        return HF_NAMES[official]
    stem, suffix = official.rsplit(".", 1)
    return f"{HF_NAMES[stem]}.{_HF_SUFFIX[suffix]}"


def load_attention(
    module: nn.Module, tensors: Mapping[str, Tensor], *, prefix: str = "", naming: str = "official"
) -> None:
    """Copy the tensors under `prefix` into `module`, a `DeepseekV4Attention`; this rank's part of them if it is split.

    Args:
        tensors: checkpoint tensors by name; names outside `prefix` are ignored.
        prefix: e.g. `layers.3.attn.` (official) or `model.layers.3.self_attn.` (hf).
        naming: `official` or `hf`.
    """
    check(naming in ("official", "hf"), "E207", got=f"naming={naming!r}", rule="naming is official or hf")
    unused = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

    def take(name: str, why: str) -> Tensor:
        if name not in unused:
            fail("E207", got=f"no tensor {prefix}{name}", why=why)
        return unused.pop(name)

    ranks: Any = getattr(module, "ranks", None)
    plan: list[tuple[nn.Parameter, Tensor]] = []
    for name, parameter in module.named_parameters():
        source = name if naming == "official" else hf_name(name)
        value = take(source, f"parameter {name} {tuple(parameter.shape)} needs it")
        if value.dtype is _E4M3 and parameter.dtype is not _E4M3:
            scale_name = _scale_name(source, naming)
            scale = take(scale_name, f"{source} is e4m3 and needs its block scales")
            value = _dequantize(value, scale, f"{prefix}{source}", f"{prefix}{scale_name}")
        if ranks is not None:
            value = part_of(value, attention_split_of(name), ranks)
        _check_shape(value, tuple(parameter.shape), f"{prefix}{source}")
        plan.append((parameter, as_parameter(value, parameter.dtype, f"{prefix}{source}")))
    left = ", ".join(prefix + name for name in sorted(unused)[:8])
    check(not unused, "E207", got=f"{len(unused)} tensors without a parameter: {left}")
    check(
        not any(parameter.is_meta for parameter, _ in plan),
        "E207",
        got="a module on the meta device",
        fix="allocate its memory first: module.to_empty(device=...)",
    )
    with torch.no_grad():
        for parameter, value in plan:
            parameter.copy_(value)


def _scale_name(source: str, naming: str) -> str:
    suffix = "scale" if naming == "official" else _HF_SUFFIX["scale"]
    return f"{source.removesuffix('.weight')}.{suffix}"


def _check_shape(value: Tensor, shape: tuple[int, ...], name: str) -> None:
    check(tuple(value.shape) == shape, "E207", got=f"{name} of shape {tuple(value.shape)}", why=f"{shape} is needed")


def _dequantize(weight: Tensor, scale: Tensor, name: str, scale_name: str) -> Tensor:
    check(
        weight.dim() == 2, "E207", got=f"{name}: e4m3 of shape {tuple(weight.shape)}", why="only matrices have scales"
    )
    _check_shape(scale, tuple(cdiv(size, WEIGHT_TILE) for size in weight.shape), scale_name)
    check(scale.dtype in _SCALES, "E207", got=f"{scale_name} of dtype {scale.dtype}", why="it scales an e4m3 weight")
    check_scales(scale, scale_name)
    return dequantize_weight(weight, scale)


def check_scales(scale: Tensor, name: str) -> None:
    """Raise E207 for scales that are NaN, which is byte 255 in e8m0, or infinite."""
    if scale.is_meta or not scale.numel():
        return
    if scale.dtype in (_E8M0, torch.uint8):
        good = int(scale.view(torch.uint8).max()) < _NAN
    else:
        good = bool(scale.isfinite().all())
    check(good, "E207", got=f"{name} with scales that are not numbers", why="weights times NaN are NaN")


def as_parameter(value: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return `value` in a form that copies into a parameter of `dtype`, or raise E207.

    Only floating weights may be rounded. Weights are not quantised here, and scales must be powers of two.
    """
    if dtype is _E8M0 and value.dtype in _SCALES:
        check_scales(value, name)
    if dtype is _E8M0 and value.dtype is torch.uint8:
        return value.view(_E8M0)
    if dtype is _E8M0 and value.dtype is torch.float32:
        check(
            torch.equal(value.to(_E8M0).float(), value),
            "E207",
            got=f"{name} with values that are not powers of two",
            fix="build the module with fp8=False, which dequantises the weight",
        )
        return value
    allowed = (dtype,) if dtype in (_E4M3, _E8M0) else _FLOATS
    check(
        value.dtype in allowed,
        "E207",
        got=f"{name} of dtype {value.dtype}",
        why=f"its parameter is {dtype}",
        fix="build the module with fp8=False" if dtype is _E4M3 else "",
    )
    return value


def load_attention_from_safetensors(
    module: nn.Module, path: str | pathlib.Path, *, prefix: str, naming: str = "official"
) -> None:
    """Run `load_attention` on a `.safetensors` file or a folder, with `model.safetensors.index.json` or without.

    Only the tensors under `prefix` are read. Files are read as `hf.load` reads them: raises E209 for a damaged file or
    index, and for a name or link that leaves the folder.
    """
    entries = list(_stored(folder_of(path), prefix))
    total = sum(stored.nbytes for _, stored in entries)
    most = _MOST_BYTES * sum(parameter.numel() for parameter in module.parameters()) + _SLACK
    check(total <= most, "E207", got=f"{total} bytes under {prefix} in {path}", why="the module has fewer weights")
    tensors: dict[str, Tensor] = {}
    for source, group in groupby(entries, lambda item: item[0]):
        with Reader(source) as reader:
            for _, stored in group:
                check(stored.name not in tensors, "E207", got=f"{stored.name} in two files of {path}")
                check(stored.dtype in DTYPES, "E207", got=f"{stored} of dtype {stored.dtype}")
                tensors[stored.name] = reader.read(stored)
    load_attention(module, tensors, prefix=prefix, naming=naming)


_MOST_BYTES, _SLACK = 8, 1 << 20
"""Maximum bytes of a stored value, and bytes allowed in addition: scales and padding."""


def _stored(path: pathlib.Path, prefix: str) -> Iterator[tuple[Source, Stored]]:
    """Yield the tensors under `prefix` with the files to read them from."""
    for file in _files_with(path, prefix):
        check(os.path.isfile(file), "E207", got=f"no file {file}")
        # A file that the caller names may be a link: nobody else chose where it leads.
        named = pathlib.Path(os.path.realpath(file)) if file == path else file
        tensors, source, problem = read_header(named.parent if file == path else path, named)
        if problem is not None:
            raise problem
        if source is not None:
            yield from ((source, stored) for name, stored in tensors.items() if name.startswith(prefix))


def _files_with(path: pathlib.Path, prefix: str) -> list[pathlib.Path]:
    """Return the file, or the folder's files with tensors under `prefix`: all of them if there is no index."""
    if not os.path.isdir(path):
        return [path]
    index = read_index(path)
    needed = {name: file for name, file in index.items() if name.startswith(prefix)}
    if index and not needed:
        return []
    files = weight_files(path, needed)
    check(bool(files), "E207", got=f"no .safetensors in {path}")
    return files
