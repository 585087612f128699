"""Scenario `preprocess_insert_tiles`: the kernel of `preprocess_insert` with other cuts than the one it chooses."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..config import DeepseekV4Config
from ..ops.common.kernels import KERNELS, launcher
from . import preprocess_insert
from .implementations import on_gpu
from .problem import Only, Prepare, Problem

COLUMNS = preprocess_insert.COLUMNS
_Changes = tuple[Mapping[str, int], ...]
_USUAL: _Changes = ({}, *({"tokens": t, "warps": w} for t, w in ((1, 4), (2, 4), (8, 4), (4, 8), (8, 8))))
_USUAL += tuple({"shares": n} for n in (1, 2, 3))
_USUAL += tuple({"registers": n} for n in (64, 80, 96, 102, 112, 168, 255))
CHANGES: Mapping[str, _Changes] = {
    "swa": _USUAL,
    "csa": (*_USUAL, *({"pooled": n} for n in (1, 2, 4, 8))),
    "hca": (
        *_USUAL,
        *({"pooled": n} for n in (1, 4, 32, 128)),
        *({"parts": n} for n in (8, 32)),
    ),
}
"""By kind of layer, what is changed of the usual cut; fields of `Tile` in kernels/preprocess/preprocess_insert.py."""


def problems(device: torch.device, only: Only) -> Iterator[Problem]:
    """The problems of `preprocess_insert`, with a cut for each implementation: `parts 8`, or `usual`."""
    for problem in preprocess_insert.problems(device, only):
        kind, tokens = str(problem.params["kind"]), int(problem.params["tokens"])
        ways: dict[str, Prepare] = {
            " ".join(f"{name} {n}" for name, n in changes.items()) or "usual": partial(_prepare, kind, tokens, changes)
            for changes in CHANGES[kind]
        }
        yield replace(problem, implementations=ways)


def cut(kind: str, tokens: int, changes: Mapping[str, int]) -> Any:
    """The kernel's cut of a step, changed."""
    config = DeepseekV4Config.flash()
    module = importlib.import_module(f"dsv4_compile.kernels.{KERNELS['preprocess_insert']}")
    usual = module.tile(tokens, preprocess_insert.KINDS[kind], config.head_dim)
    return usual._replace(**changes)


def _prepare(kind: str, tokens: int, changes: Mapping[str, int]) -> Callable[..., Any]:
    return on_gpu(partial(launcher("preprocess_insert"), cut=cut(kind, tokens, changes)))
