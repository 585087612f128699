"""Sizes of batches and caches: their type and range, and whether a device has memory for them."""

from __future__ import annotations

import numbers
import os
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .errors import check, fail

MOST = 2**31 - 256
"""Largest size: lengths and positions are int32, and the last page of 256 tokens is whole."""
_GIGA = 10**9


class _TensorsUnread(TorchFunctionMode):
    """Describes the tensors of a GPU, since printing their elements would wait for it, and invalidate a capture."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("__repr__", "__format__") and args[0].device.type != "cpu":
            tensor = args[0]
            return f"{type(tensor).__name__} {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        return func(*args, **(kwargs or {}))


def shown(value: object) -> str:
    """Return a short text of any value for a message; values are named by type if their `repr` fails.

    A tensor of a GPU, also one in a list, a dict or a dataclass, is described by dtype, shape and device, and not read.
    """
    try:
        with _TensorsUnread():
            text = repr(value)
    except Exception:  # of an integer of too many digits, or of a class from elsewhere
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_size(name: str, value: Any, least: int = 1) -> int:
    """Return a size as an int.

    Args:
        name: what the caller calls it, for the message.
        value: an int, or an integer of a library, as numpy's.
        least: smallest value.

    Raises E204 for other types (bool, float, text, a tensor) and for a value outside `least` to `MOST`.
    """
    if isinstance(value, numbers.Integral) and not isinstance(value, bool) and least <= int(value) <= MOST:
        return int(value)
    fail(
        "E204",
        got=f"{name}={shown(value)}",
        why=f"a size is an integer from {least} to {MOST}, and this is of type {type(value).__name__}",
        fix="pass such an integer",
    )


def check_optional_size(name: str, value: Any, least: int = 1) -> int | None:
    """Return `size`, or None for None."""
    return None if value is None else check_size(name, value, least)


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that can be allocated on `device`, or None if its kind does not say."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type != "cpu":
        return None
    if not Path("/proc/meminfo").is_file():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = (line.split() for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    return next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")


def check_memory(what: str, nbytes: int, device: torch.device | str | None) -> None:
    """Raise E210 unless `nbytes` fit into the memory of `device` (None = the default device)."""
    target = torch.get_default_device() if device is None else torch.device(device)
    free = free_memory(target)
    check(
        free is None or nbytes <= free,
        "E210",
        got=f"{nbytes / _GIGA:.2f} GB of {what} for {(free or 0) / _GIGA:.2f} GB free on {target}",
        fix="pass smaller sizes",
    )
