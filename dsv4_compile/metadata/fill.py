"""Arguments of `batch_metadata` for groups of caches, from persistent buffers by their declared names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..sources import Group


def arguments_of(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor | None,
    tables: Mapping[Group, Tensor],
    ratios: Sequence[int],
    tensors: Mapping[str, Tensor],
    rows: int | None = None,
) -> tuple[Any, ...]:
    """Return the arguments of `torch.ops.dsv4.batch_metadata` that fill the buffers of some groups.

    Args:
        query_start_loc, seq_lens, slot_mapping: see the op.
        tables: block table of each group.
        ratios: compress ratios whose visible entries are counted.
        tensors: every buffer by its declared name.
        rows: rows of each buffer to fill; None for all.
    """
    groups = [*tables]
    buffers = {name: tensors[name][:rows] for name in names_of(groups, ratios)}
    listed = [place for place, group in enumerate(groups) if group.listed]
    return (
        query_start_loc,
        seq_lens,
        slot_mapping,
        [*tables.values()],
        [group.row_tokens for group in groups],
        [group.page_rows for group in groups],
        buffers["positions"],
        buffers["token_to_req"],
        buffers["is_valid_token"],
        [buffers[f"{group.name}_slots"] for group in groups],
        listed,
        [buffers[f"{groups[place].name}_indices"] for place in listed],
        [buffers[f"{groups[place].name}_lens"] for place in listed],
        [*ratios],
        [buffers[f"entries_{ratio}_context_lens"] for ratio in ratios],
    )


def names_of(groups: Sequence[Group], ratios: Sequence[int]) -> list[str]:
    """Return the names of the buffers that these arguments fill."""
    names = ["positions", "token_to_req", "is_valid_token", *(f"{group.name}_slots" for group in groups)]
    names += [f"{group.name}_{suffix}" for group in groups if group.listed for suffix in ("indices", "lens")]
    return names + [f"entries_{ratio}_context_lens" for ratio in ratios]
