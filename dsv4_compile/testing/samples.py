"""Arguments for every op of this package, with equal values on every device.

All describe one small step: a decode at a group boundary of both ratios, a decode of two tokens, a chunk of a prefill
that passes one, a graph-padded request and a padding token. Caches are full and their page padding is NaN; index rows
hold values that are no index. Functions decorated with `sample`, in the files `_samples_<family>.py`, build them.
"""

from __future__ import annotations

import importlib
import pkgutil

import torch

from ..ops.common.arguments import map_tensors
from ._samples_step import BUILDERS, Args, Step
from .generate import to_device

__all__ = ["BUILDERS", "op_samples", "samples"]

for _file in pkgutil.iter_modules(importlib.import_module(__package__).__path__):
    if _file.name.startswith("_samples_"):
        importlib.import_module(f"{__package__}.{_file.name}")  # registers its samples


def op_samples(op: str, device: torch.device | str = "cpu") -> list[Args]:
    """Return positional arguments for one op, fresh at each call and independent of other ops."""

    def move(args: Args) -> Args:
        return map_tensors(lambda x: to_device(x, device), args)

    return [move(args) for args in BUILDERS[op](Step(op))]


def samples(device: torch.device | str = "cpu") -> dict[str, list[Args]]:
    """`op_samples` of every op, by name."""
    return {op: op_samples(op, device) for op in sorted(BUILDERS)}
