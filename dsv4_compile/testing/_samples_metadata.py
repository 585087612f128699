"""Samples of the ops that fill and move the metadata of a step. See samples.py."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import layout
from ..ops.metadata.batch_metadata import ARGUMENTS, CONTEXT_LENS, GROUPS, TOKENS
from ._samples_step import TOKENS as NUM_TOKENS
from ._samples_step import Args, Step, sample

BUFFER_ROWS = NUM_TOKENS + 3
WIDTHS = {"window_indices": 12, "c128_indices": layout.c128a_width(300)}
PAGES = {
    "window": (layout.WINDOW_BLOCK, 1),
    "c4": (layout.storage_block_size(layout.CSA_RATIO), layout.CSA_RATIO),
    "c4_state": (layout.state_block_size(layout.CSA_RATIO), 1),
    "indexer": (layout.storage_block_size(layout.CSA_RATIO), layout.CSA_RATIO),
    "indexer_state": (layout.state_block_size(layout.CSA_RATIO), 1),
    "c128": (layout.storage_block_size(layout.HCA_RATIO), layout.HCA_RATIO),
    "c128_state": (layout.state_block_size(layout.HCA_RATIO), 1),
}


@sample
def batch_metadata(s: Step) -> list[Args]:
    slots = torch.where(s.is_valid, 7, layout.PAD_SLOT)
    slots[4] = layout.PAD_SLOT  # a token that the engine does not cache
    samples: list[Args] = []
    for groups, slot_mapping in ((tuple(GROUPS), None), (("window", "c128"), slots), (("c4", "c4_state"), slots[:6])):
        values: dict[str, object] = dict.fromkeys(ARGUMENTS)
        values |= {"query_start_loc": s.query_start_loc, "seq_lens": s.seq_lens, "slot_mapping": slot_mapping}
        values |= {"window_block_size": layout.WINDOW_BLOCK}
        values |= {f"{group}_block_table": s.table(*PAGES[group]) for group in groups}
        dtypes = TOKENS | {name: dtype for group in groups for name, dtype in GROUPS[group].items()}
        dtypes |= {} if len(groups) == 2 else dict.fromkeys(CONTEXT_LENS, torch.int32)
        values |= {name: _stale(name, dtype) for name, dtype in dtypes.items()}
        samples.append(tuple(values.values()))
    return samples


def _stale(name: str, dtype: torch.dtype) -> Tensor:
    shape = (BUFFER_ROWS, WIDTHS[name]) if name in WIDTHS else (BUFFER_ROWS,)
    return torch.full(shape, 1 if dtype is torch.bool else 12345, dtype=dtype)


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
    return [(lists, ends, _stale("flat", torch.int32).repeat(reps), torch.full((8,), 9).int()) for reps in (5, 1)]
