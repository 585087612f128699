"""Arguments for every op of this package, with equal values on every device.

All describe one small step: a decode at a group boundary of both ratios, a decode of two tokens, a chunk of a prefill
that passes one, a graph-padded request and a padding token. Caches are full and their page padding is NaN; index rows
hold values that are no index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _samples_attention as _samples_attention  # registers its samples
from . import _samples_backends as _samples_backends
from . import _samples_drafts as _samples_drafts
from . import _samples_hyper_connections as _samples_hyper_connections
from . import _samples_indices as _samples_indices
from . import _samples_linear as _samples_linear
from . import _samples_metadata as _samples_metadata
from . import _samples_moe as _samples_moe
from . import _samples_preprocess as _samples_preprocess
from ._samples_step import BUILDERS, Args, Step
from .generate import to_device

__all__ = ["BUILDERS", "op_samples", "samples"]


def op_samples(op: str, device: torch.device | str = "cpu") -> list[Args]:
    """Return positional arguments for one op, fresh at each call and independent of other ops."""

    def move(args: Args) -> Args:
        return tuple(to_device(a, device) if isinstance(a, Tensor) else a for a in args)

    return [move(args) for args in BUILDERS[op](Step(op))]


def samples(device: torch.device | str = "cpu") -> dict[str, list[Args]]:
    """`op_samples` of every op, by name."""
    return {op: op_samples(op, device) for op in sorted(BUILDERS)}
