"""Make uninitialised memory visible: NaN in floats, the largest value in integers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Fill all that `torch.empty` and its relatives allocate, inside library code too; restore all settings after.

    Recycled memory often still holds the right answer and hides an output that was never written. Uses torch's own
    switch, which is part of deterministic mode; operations without a deterministic implementation only warn.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    switch: Any = torch.utils.deterministic
    fill = switch.fill_uninitialized_memory
    switch.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        switch.fill_uninitialized_memory = fill
