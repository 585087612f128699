"""Report of an official DeepSeek-V4.1 folder for `dsv4 doctor PATH`. Only headers are read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...errors import DSV4Error
from ...hf.loading.checkpoint import Checkpoint
from .cache import V41Caches
from .placement import V41Placement, place, stored_kinds

BATCH, TOKENS = 8, 8192
"""Batch whose caches are counted."""
_GIGA = 10**9


def folder_rows(checkpoint: Checkpoint) -> tuple[list[tuple[str, str, str, str]], list[DSV4Error], int]:
    """Return rows (name, value, level, note) about a folder, its problems, and the number of all of them."""
    try:
        placement = place(checkpoint)
    except DSV4Error as fault:
        return [], [fault], 1
    rows = [_row("model", "DeepSeek-V4.1, text model", "loaded by dsv4_compile.hf.load, or models.v41.load")]
    config = placement.config
    ratios = [config.ratio(layer) for layer in range(config.num_layers)]
    counts = ", ".join(f"{ratios.count(ratio)} {name}" for ratio, name in _KINDS.items() if ratio in ratios)
    experts = f"{config.num_experts} experts, {config.experts_per_token} a token"
    engrams = ", ".join(map(str, config.engram_layers))
    rows.append(_row("layers", f"{config.num_layers} ({counts}); engrams at {engrams}; {experts}"))
    rows += [_row(kind, _gigabytes(size)) for kind, size in stored_kinds(placement.matched).items()]
    if (drafts := placement.drafts) is not None:
        size = _gigabytes(sum(tensor.nbytes for tensor in placement.draft_tensors))
        value = f"{drafts.stages} layers of {drafts.num_experts} experts, {drafts.block} drafts a step; {size}"
        reads = ", ".join(map(str, drafts.taps))
        note = f'read the inputs of layers {reads}; drafts="off" leaves them out, "auto" where they do not fit'
        rows.append(_row("draft layers", value, note))
    rows += _left_out(placement)
    sizes: dict[str, Any] = {"max_batch_size": BATCH, "max_seq_len": TOKENS, "max_step_tokens": 512}
    caches = V41Caches(config, device="meta", drafts=drafts, **sizes).nbytes
    memory = f"{_gigabytes(placement.nbytes)} of weights, {_gigabytes(caches)} of caches for {BATCH} x {TOKENS}"
    note = "tables of the engram included; where the device has no room for them, they go to host memory"
    rows.append(_row("memory", memory, note))
    return rows, list(placement.problems.kept), placement.problems.count


_KINDS = {0: "window only", 2: "of ratio 2", 1: "of ratio 1"}


def _left_out(placement: V41Placement) -> Iterable[tuple[str, str, str, str]]:
    if placement.vision:
        size = _gigabytes(sum(stored.nbytes for stored in placement.vision))
        yield _row("vision tower", f"{size} in {len(placement.vision)} tensors", "not built: not loaded")


def _row(name: str, value: str, note: str = "", level: str = "ok") -> tuple[str, str, str, str]:
    return name, value, level, note


def _gigabytes(size: int) -> str:
    return f"{size / _GIGA:.2f} GB"
