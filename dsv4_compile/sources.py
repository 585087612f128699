"""Sources of attention layers, and the groups of caches that share a block table.

A layer reads a window of the last tokens and any number of compressed sources. A source is a cache of entries, which
one layer writes, its owner, and which any layer may read. Tensors belong to an owner; block tables, slots and lengths
to a ratio, so that layers of one ratio share them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from .errors import check
from .layout import CSA_RATIO, HCA_RATIO, WINDOW_BLOCK, state_block_size, storage_block_size

TOPK, ALL = "topk", "all"
SELECTIONS: Mapping[int, str] = {CSA_RATIO: TOPK, HCA_RATIO: ALL}
"""How layers select entries of each ratio: those that an indexer scores highest, or every entry."""
RATIOS = tuple(SELECTIONS)
WINDOW_ONLY = frozenset({0, 1})
"""Compress ratios of layers without a source."""


class Source(NamedTuple):
    """A compressed source of a layer.

    Attributes:
        ratio: tokens that an entry stands for.
        owner: index of the layer that writes the entries.
        selection: `topk` or `all`.
    """

    ratio: int
    owner: int
    selection: str


class Group(NamedTuple):
    """Caches of a model with one block table.

    Attributes:
        name: `window`, or role and ratio: `entries_4`.
        role: `window`; `entries` or `states` of compressors; `keys` or `key_states` of indexers.
        ratio: that of the sources, 1 for the window.
        row_tokens: tokens that a row stands for; the last of them has its slot.
        page_rows: rows of a page.
        listed: whether each token has a list of the rows that it attends: its window, or every entry.
    """

    name: str
    role: str
    ratio: int
    row_tokens: int
    page_rows: int
    listed: bool = False

    @property
    def page_tokens(self) -> int:
        """Tokens that a column of the block table covers."""
        return self.row_tokens * self.page_rows


def source_groups(ratio: int) -> tuple[Group, ...]:
    """Return the groups of sources of one compress ratio."""
    rows, states, selection = storage_block_size(ratio), state_block_size(ratio), SELECTIONS[ratio]
    groups = [
        Group(f"entries_{ratio}", "entries", ratio, ratio, rows, selection == ALL),
        Group(f"states_{ratio}", "states", ratio, 1, states),
    ]
    if selection == TOPK:
        groups.append(Group(f"keys_{ratio}", "keys", ratio, ratio, rows))
        groups.append(Group(f"key_states_{ratio}", "key_states", ratio, 1, states))
    return tuple(groups)


def window_group(block_size: int = WINDOW_BLOCK) -> Group:
    """Return the group of the window, with pages of `block_size` tokens."""
    return Group("window", "window", 1, 1, block_size, True)


def source_ratios(ratios: Collection[int]) -> list[int]:
    """Return the ratios of sources among those of layers, ascending. E205 for unknown ones."""
    chosen = sorted(set(ratios) - WINDOW_ONLY)
    unknown = [ratio for ratio in chosen if ratio not in SELECTIONS]
    fix = f"pass the compress ratios of the layers: {', '.join(map(str, sorted({*WINDOW_ONLY, *RATIOS})))}"
    check(not unknown, "E205", got=f"ratios {unknown}", fix=fix)
    return chosen


def groups_of(ratios: Collection[int] = RATIOS, window_block_size: int = WINDOW_BLOCK) -> tuple[Group, ...]:
    """Return the groups of layers with these compress ratios, the window first. E205 for unknown ratios."""
    sources = [group for ratio in source_ratios(ratios) for group in source_groups(ratio)]
    return (window_group(window_block_size), *sources)
