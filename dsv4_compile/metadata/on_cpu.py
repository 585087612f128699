"""Metadata of tokens as one op, for graphs on a CPU: what `build` derives, with few calls of torch.

As C++ its index arithmetic is most of the code of a decode step, and most of the time that a graph takes to compile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..cpu.metadata.slots import listed_slots, token_slots
from ..sources import Group

_LIBRARY = torch.library.Library("dsv4_metadata", "DEF")
_LIBRARY.define(
    "build(Tensor positions, Tensor requests, Tensor[] tables, int[] row_tokens, int[] page_rows, int[] listed, "
    "int[] widths, int[] ratios) -> Tensor[]"
)


def build_on_cpu(
    positions: Tensor, requests: Tensor, groups: Sequence[Group], tables: Sequence[Tensor], widths: Mapping[str, int]
) -> dict[str, Tensor]:
    """Return rows of tokens by their names in `buffers.BUFFERS`; requests are rows of the block tables.

    Args:
        tables: block table of each group.
        widths: columns of the list of each group that has one, by its name.
    """
    listed = [place for place, group in enumerate(groups) if group.listed]
    sources = [group for group in groups if group.role == "entries"]
    slots, valid, places, owners, *rest = torch.ops.dsv4_metadata.build(
        positions,
        requests,
        tables,
        [group.row_tokens for group in groups],
        [group.page_rows for group in groups],
        listed,
        [widths[groups[place].name] for place in listed],
        [group.ratio for group in sources],
    )
    rows = {"positions": places, "token_to_req": owners, "is_valid_token": valid}
    rows |= {f"{group.name}_slots": slot for group, slot in zip(groups, slots.unbind(0), strict=True)}
    for number, place in enumerate(listed):
        name = groups[place].name
        rows[f"{name}_indices"], rows[f"{name}_lens"] = rest[2 * number], rest[2 * number + 1]
    visible = rest[2 * len(listed) :]
    return rows | {f"{group.name}_context_lens": lens for group, lens in zip(sources, visible, strict=True)}


def _run(
    positions: Tensor,
    requests: Tensor,
    tables: Sequence[Tensor],
    row_tokens: Sequence[int],
    page_rows: Sequence[int],
    listed: Sequence[int],
    widths: Sequence[int],
    ratios: Sequence[int],
) -> list[Tensor]:
    """Return slots int64 `[G, T]`, valid, positions, requests; indices and lengths of each list; then the visible
    entries of each ratio. See `types` for their contents."""
    reached = (positions + 1).clamp_min_(0)
    outputs = [token_slots(positions, requests, tables, row_tokens, page_rows)]
    outputs += [positions >= 0, positions.clamp_min(0), requests.to(torch.int32)]
    for place, width in zip(listed, widths, strict=True):
        lens = (reached // row_tokens[place]).clamp_max_(width)
        begins = positions - lens + 1 if row_tokens[place] == 1 else torch.zeros_like(lens)
        outputs.append(listed_slots(tables[place], requests, begins, lens, width, page_rows[place]))
        outputs.append(lens.to(torch.int32))
    return outputs + [(reached // ratio).to(torch.int32) for ratio in ratios]


def _fake(
    positions: Tensor,
    requests: Tensor,
    tables: Any,
    row_tokens: Any,
    page_rows: Any,
    listed: Any,
    widths: Sequence[int],
    ratios: Any,
) -> list[Tensor]:
    tokens = positions.shape[0]

    def new(*shape: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return positions.new_empty(shape, dtype=dtype)

    outputs = [new(len(tables), tokens, dtype=torch.int64), new(tokens, dtype=torch.bool)]
    outputs += [new(tokens, dtype=torch.int64), new(tokens)]
    outputs += [new(*shape) for width in widths for shape in ((tokens, width), (tokens,))]
    return outputs + [new(tokens) for _ in ratios]


_LIBRARY.impl("build", _run, "CompositeExplicitAutograd")
torch.library.register_fake("dsv4_metadata::build", _fake, lib=_LIBRARY)
