"""Report of a checkpoint folder for `dsv4 doctor PATH`: what it holds, what is wrong, and which GPUs hold it.

Only headers are read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from ...cache import CacheFormat, PagedCaches
from ...checkpoints.header import Stored
from ...config import CSA, HCA, SWA, DeepseekV4Config
from ...errors import DSV4Error
from ...models.v41 import config as v41
from ...models.v41.report import folder_rows
from ...parallel.split import split_of
from ..model.draft_settings import MOST_MTP, MTP
from .checkpoint import Checkpoint, read_checkpoint
from .draft_placement import cache_bytes, describe_drafts, place_drafts
from .placement import Placement, place

KINDS: dict[str, str] = {
    "experts": r"\.ffn\.experts\.",
    "shared experts": r"\.ffn\.shared_experts\.",
    "routers": r"\.ffn\.gate\.",
    "indexers": r"\.attn\.indexer\.",
    "compressors": r"\.attn\.compressor\.",
    "attention": r"\.attn\.",
    "hyper-connections": r"hc_",
    "embedding, head": r"embed\.|head\.",
    "norms": r"norm\.",
}
"""Kinds of weights by a pattern of their official names; the first that matches counts."""
GPUS = {"RTX PRO 6000": 95, "H100": 79, "H200": 139, "B200": 178, "MI300X": 191}
"""Memory of GPUs in GiB, as their drivers report it."""
COUNTS = (1, 2, 4, 8)
"""Numbers of GPUs that divide the heads and output groups of DeepSeek-V4."""
FILLED = 0.9
"""Part of a GPU's memory that weights and caches may take, which leaves a tenth for activations and graphs."""
BATCH, TOKENS = 8, 8192
"""Batch whose caches are counted."""
MOST_PROBLEMS = 20
_GIGA = 10**9


class Row(NamedTuple):
    """One line of the report, with the fields of `doctor.Check`."""

    name: str
    value: str
    level: str = "ok"
    note: str = ""


def rows(path: str | Path) -> list[Row]:
    """Examine the folder at `path` without loading it, and return the report, problems last."""
    try:
        checkpoint = read_checkpoint(path)
    except DSV4Error as fault:
        report = [] if fault.code == "E209" else [Row("folder", str(path))]
        return [*report, _problem(fault)]
    report = [_folder(checkpoint)]
    problems, count = list(checkpoint.problems.kept), checkpoint.problems.count
    try:
        if checkpoint.config.get("model_type") == v41.MODEL_TYPE:
            described, faults, number = folder_rows(checkpoint)
            return _ended(report + [Row(*row) for row in described], problems + faults, count + number)
        placement = place(checkpoint)
        problems += placement.problems.kept
        count += placement.problems.count
        report += [*_model(checkpoint), *_kinds(checkpoint)]
        drafts = place_drafts(checkpoint, placement)
        if drafts is not None:
            problems += drafts.problems.kept
            count += drafts.problems.count
            report.append(_drafts(checkpoint, drafts))
        report += _memory(checkpoint, placement, drafts)
    except DSV4Error as fault:
        problems.insert(0, fault)
        count += 1
    return _ended(report, problems, count)


def _ended(report: list[Row], problems: list[DSV4Error], count: int) -> list[Row]:
    """Return the report with its first problems, and the number of the others."""
    shown = [_problem(fault) for fault in problems[:MOST_PROBLEMS]]
    left = count - len(shown)
    return report + shown + ([Row("more", f"{left} problems like these", "fix")] if left else [])


def _problem(fault: DSV4Error) -> Row:
    return Row(fault.code, fault.got, "fix", "; ".join(filter(None, (fault.why, fault.fix))))


def _folder(checkpoint: Checkpoint) -> Row:
    size = _gigabytes([*checkpoint.tensors.values(), *checkpoint.drafts.values()])
    files = f"{len(checkpoint.files)} file{'s' * (len(checkpoint.files) > 1)}"
    return Row("folder", f"{checkpoint.folder}, {files}, {size}")


def _gigabytes(tensors: Iterable[Stored]) -> str:
    return f"{sum(stored.nbytes for stored in tensors) / _GIGA:.2f} GB"


def _model(checkpoint: Checkpoint) -> list[Row]:
    config, raw = DeepseekV4Config.from_hf(checkpoint.config), checkpoint.config
    counts = Counter(config.kind(i) for i in range(config.num_layers))
    kinds = ", ".join(f"{counts[kind]} {kind.upper()}" for kind in (SWA, CSA, HCA) if counts[kind])
    hashed = sum(name.endswith("tid2eid") for name in checkpoint.tensors)
    experts = f"{raw.get('n_routed_experts')} experts, {raw.get('num_experts_per_tok')} a token"
    official = any(".attn." in stored.name for stored in checkpoint.tensors.values())
    return [
        Row("layers", f"{config.num_layers} ({kinds}), {hashed} routed by hash; {experts}"),
        Row("tensors", f"{len(checkpoint.tensors)} with {'DeepSeek' if official else 'transformers'}'s names"),
    ]


def _drafts(checkpoint: Checkpoint, drafts: Placement) -> Row:
    """Return kind, names and bytes of the draft layers, and what they take in memory."""
    settings, size = drafts.model.settings, drafts.nbytes() / _GIGA
    number = f"1 to {MOST_MTP}" if settings.kind == MTP else f"{settings.num_drafts}"
    kind = f"{settings.kind}, {number} drafts a step"
    reads = ", ".join(map(str, settings.taps.layers))
    note = f'read layer {reads}; {size:.2f} GB of the memory below; drafts="off" leaves them out'
    return Row("draft layers", f"{describe_drafts(checkpoint)}; {kind}", note=note)


def _kinds(checkpoint: Checkpoint) -> list[Row]:
    """Return bytes and dtypes of the weights of each kind."""
    groups: dict[str, list[Stored]] = {kind: [] for kind in KINDS}
    patterns = [(kind, re.compile(pattern).search) for kind, pattern in KINDS.items()]
    for name, stored in checkpoint.tensors.items():
        kind = next((kind for kind, search in patterns if search(name)), None)
        groups.setdefault(kind or "others", []).append(stored)
    report = []
    for kind, tensors in groups.items():
        sizes: Counter[str] = Counter()
        for stored in tensors:
            sizes[stored.dtype] += stored.nbytes
        dtypes = ", ".join(f"{dtype} {size / _GIGA:.2f}" for dtype, size in sizes.most_common())
        if tensors:
            report.append(Row(kind, f"{_gigabytes(tensors)} in {len(tensors)} tensors ({dtypes})"))
    return report


def _memory(checkpoint: Checkpoint, placement: Placement, drafts: Placement | None) -> list[Row]:
    """Return what weights and caches take, and how many GPUs of each sort hold them."""
    placements = [placement] if drafts is None else [placement, drafts]
    weights, config = sum(each.nbytes() for each in placements), DeepseekV4Config.from_hf(checkpoint.config)
    formats = CacheFormat.resolve(model_dtype=placement.model.config.dtype)
    caches = PagedCaches(config, max_batch_size=BATCH, max_seq_len=TOKENS, cache_format=formats, device="meta").nbytes
    if drafts is not None:
        caches += BATCH * cache_bytes(drafts, formats)
    split = sum(each.nbytes(lambda name: split_of(name) is not None) for each in placements)
    report = [
        Row("memory", f"{weights / _GIGA:.2f} GB of weights, {caches / _GIGA:.2f} GB of caches for {BATCH} x {TOKENS}")
    ]
    gpus = {name: size * 2**30 for name, size in GPUS.items()}
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(torch.cuda.current_device())
        gpus = {f"{facts.name}, here": facts.total_memory} | gpus
    for name, size in gpus.items():
        per_gpu = {count: weights - split + split / count for count in COUNTS}
        enough = next((count for count in COUNTS if per_gpu[count] + caches <= FILLED * size), None)
        if enough is None:
            report.append(Row(name, f"more than {COUNTS[-1]} of {size / _GIGA:.0f} GB"))
        else:
            report.append(
                Row(name, f"{enough} of {size / _GIGA:.0f} GB, {per_gpu[enough] / _GIGA:.2f} GB of weights each")
            )
    return report
