"""Tilings of the kernel of scenario `preprocess_insert`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dsv4_compile.bench import preprocess_insert
from dsv4_compile.bench.problem import Only, Prepare, Problem, on_gpu
from dsv4_compile.config import DeepseekV4Config
from dsv4_compile.ops.common.kernels import kernel_module, launcher

COLUMNS = preprocess_insert.COLUMNS
_Changes = tuple[Mapping[str, int], ...]
_DEFAULT: _Changes = ({}, *({"tokens": t, "warps": w} for t, w in ((1, 4), (2, 4), (8, 4), (4, 8), (8, 8))))
_DEFAULT += tuple({"splits": n} for n in (1, 2, 3))
_DEFAULT += tuple({"registers": n} for n in (64, 80, 96, 102, 112, 168, 255))
CHANGES: Mapping[str, _Changes] = {
    "swa": _DEFAULT,
    "csa": (*_DEFAULT, *({"pooled": n} for n in (1, 2, 4, 8))),
    "hca": (
        *_DEFAULT,
        *({"pooled": n} for n in (1, 4, 32, 128)),
        *({"parts": n} for n in (8, 32)),
    ),
}
"""Changes of the default tiling by kind of layer: fields of `Tiling` in kernels/preprocess/preprocess_insert.py."""


def problems(device: torch.device, only: Only) -> Iterator[Problem]:
    """Yield the problems of `preprocess_insert` with an implementation for each change: `parts 8`, or `default`."""
    for problem in preprocess_insert.problems(device, only):
        kind, tokens = str(problem.params["kind"]), int(problem.params["tokens"])
        ways: dict[str, Prepare] = {
            _name_of(changes): partial(_prepare, kind, tokens, changes) for changes in CHANGES[kind]
        }
        yield replace(problem, implementations=ways)


def _name_of(changes: Mapping[str, int]) -> str:
    return " ".join(f"{name} {n}" for name, n in changes.items()) or "default"


def tiling(kind: str, tokens: int, changes: Mapping[str, int]) -> Any:
    """Return the kernel's tiling of a step with `changes`."""
    config = DeepseekV4Config.flash()
    module = kernel_module("preprocess_insert")
    default = module.tiling_of(tokens, preprocess_insert.KINDS[kind], config.head_dim)
    return default._replace(**changes)


def _prepare(kind: str, tokens: int, changes: Mapping[str, int]) -> Callable[..., Any]:
    return on_gpu(partial(launcher("preprocess_insert"), tiling=tiling(kind, tokens, changes)))
