"""Places of the engram's tables: the device, or host memory that it reads."""

from __future__ import annotations

import logging
import re

import torch
from torch import Tensor, nn

from ...errors import check
from ...runtime import host_memory
from ...sizes import check_memory, free_memory, shown
from .model import V41Model

PLACES = ("auto", "device", "host")
TABLE = re.compile(r"layers\.\d+\.engram\.embed(_scale)?")
"""Names of the parameters that are tables."""
_MOST = 0.9
"""Share of a device's free memory that weights may take with their tables there: caches need the rest."""
_log = logging.getLogger("dsv4_compile.models")


def on_host(model: V41Model, place: str, device: torch.device, caches: int = 0) -> bool:
    """Return whether the tables of a model, possibly on the meta device, go to host memory when it goes to `device`.

    Raises E201 for an unknown place, and E210 if the weights and so many bytes of caches do not fit there.
    """
    check(place in PLACES, "E201", got=f"engram={shown(place)}", rule=f"engram is one of {', '.join(PLACES)}")
    tables, others = _bytes(model)
    host = tables > 0 and place == "host" and device.type == "cuda"
    if place == "auto" and device.type == "cuda" and tables:
        free = free_memory(device)
        host = free is not None and (tables + others > _MOST * free or tables + others + caches > free)
    what = f" and {caches / 1e9:.2f} GB of caches" if caches else ""
    if not host:
        check_memory(f"weights, tables of the engram included,{what}".rstrip(","), tables + others + caches, device)
        return False
    check_memory(f"weights without tables of the engram{what}", others + caches, device)
    check_memory("tables of the engram", tables, torch.device("cpu"))
    _log.warning("tables of the engram in host memory: %.2f GB", tables / 1e9)
    return True


def device_bytes(model: V41Model, place: str, device: torch.device) -> int:
    """Return the bytes of weights that `device` needs memory for, without tables that may go to host memory."""
    tables, others = _bytes(model)
    return others if place != "device" and device.type == "cuda" else tables + others


def _bytes(model: V41Model) -> tuple[int, int]:
    """Return the bytes of tables and of other weights."""
    sizes = {True: 0, False: 0}
    for name, weight in model.named_parameters():
        sizes[TABLE.fullmatch(name) is not None] += weight.nbytes
    return sizes[True], sizes[False]


def empty_like(name: str, parameter: Tensor, device: torch.device, host: bool) -> Tensor:
    """Return memory for a parameter, of the CPU for a table that goes to host memory."""
    if host and TABLE.fullmatch(name):
        return host_memory.empty(tuple(parameter.shape), parameter.dtype)
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=device)


def lock_tables(model: V41Model, device: torch.device) -> None:
    """Make filled tables in host memory tensors of `device`, and let steps fetch their rows ahead. E210 as `on_gpu`."""
    for layer in model._stack():
        if not layer.has_engram:
            continue
        engram = layer.engram
        for name in ("embed", "embed_scale"):
            if (table := getattr(engram, name)) is not None:
                locked = host_memory.on_gpu(table.detach(), device)
                setattr(engram, name, nn.Parameter(locked, requires_grad=False))
        # A prompt ends at the last source: later layers would not take what is fetched.
        engram.ahead = layer.layer <= model.config.last_source
