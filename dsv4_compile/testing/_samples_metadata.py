"""Samples of the ops that fill and move the metadata of a step. See samples.py."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import layout
from ..metadata.fill import arguments_of, names_of
from ..sources import RATIOS, groups_of
from ._samples_step import TOKENS as NUM_TOKENS
from ._samples_step import Args, Step, sample

BUFFER_ROWS, WINDOW, MAX_LEN = NUM_TOKENS + 3, 12, 300
GROUPS = {group.name: group for group in groups_of()}


@sample
def batch_metadata(s: Step) -> list[Args]:
    slots = torch.where(s.is_valid, 7, layout.PAD_SLOT)
    slots[4] = layout.PAD_SLOT  # a token that the engine does not cache
    samples: list[Args] = []
    for names, ratios, slot_mapping in (
        (tuple(GROUPS), RATIOS, None),
        (("window", "entries_128"), (), slots),
        (("entries_4", "states_4"), (), slots[:6]),
    ):
        groups = [GROUPS[name] for name in names]
        tables = {group: s.table(group.page_rows, group.row_tokens) for group in groups}
        buffers = {name: _stale(name) for name in names_of(groups, ratios)}
        samples.append(arguments_of(s.query_start_loc, s.seq_lens, slot_mapping, tables, ratios, buffers))
    return samples


def _stale(name: str) -> Tensor:
    """Return a buffer by its declared name, full of old values."""
    width = WINDOW if name == "window_indices" else layout.c128a_width(MAX_LEN)
    shape = (BUFFER_ROWS, width) if name.endswith("_indices") else (BUFFER_ROWS,)
    if name == "is_valid_token":
        return torch.ones(shape, dtype=torch.bool)
    return torch.full(shape, 12345, dtype=torch.int64 if name.endswith("slots") or name == "positions" else torch.int32)


@sample
def advance(s: Step) -> list[Args]:
    queries, lens = torch.tensor([1, 3, 3, 0, 2, 3]), torch.tensor([128, 40, 3, 0, 1, 99], dtype=torch.int32)
    accepted = torch.tensor([0, 2, 9, 1, 1, 3], dtype=torch.int32)
    reserved = torch.tensor([900, 900, 900, 900, 900, 101], dtype=torch.int32)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), queries.cumsum(0))).int()
    samples: list[Args] = []
    for query_len in (3, 1):
        drafts = s.randint(1, 99, 6, query_len - 1, dtype=torch.int64) if query_len > 1 else None
        chosen = s.randint(1, 99, 6, query_len, dtype=torch.int64)
        ids, overflow = torch.full((20,), 12345), torch.tensor([5, 0, 0, 7, 0, 0], dtype=torch.int32)
        samples.append((accepted, chosen, drafts, reserved, query_len, starts.clone(), lens.clone(), ids, overflow))
    return samples


@sample
def copy_ragged_to_graph_buffers(s: Step) -> list[Args]:
    lists, ends = s.randint(0, 900, 40), torch.tensor([0, 7, 7, 20, 31], dtype=torch.int32)
    return [(lists, ends, _stale("flat").repeat(reps), torch.full((8,), 9).int()) for reps in (5, 1)]
