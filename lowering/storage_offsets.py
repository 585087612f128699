"""Where views of an input begin that is a view itself, as the caches of engines are: what torch gets wrong about it.

An op that writes such a view would write other rows. Both are set right for the whole process, once lowerings are
loaded.
"""

from __future__ import annotations

from typing import Any

import torch

from .._compat import V, auto_functionalize, lowerings, register_lowering


def keep_storage_offsets() -> None:
    """Give aten.sym_storage_offset the lowering it lacks (pytorch#198068).

    Without it an op that mutates a view of a graph input with dynamic shapes writes at offset 0 of that input.
    """
    op = torch.ops.aten.sym_storage_offset.default
    if op in lowerings:
        return

    def sym_storage_offset(view: Any) -> Any:
        offset = V.graph.current_node.meta["val"]
        return offset.node.expr if isinstance(offset, torch.SymInt) else offset

    register_lowering(op, type_promotion_kind=None)(sym_storage_offset)


def count_slices_from_their_base() -> None:
    """Let an op that writes `x[2:]` of an input x write from the third row of x on.

    torch (2.11 to 2.15) counts rows from the first element of the storage, but slices x.
    """
    original = auto_functionalize.try_use_slice
    rows = torch.empty(3, device="cpu")[1:]
    if original(rows, rows[1:]) == (0, 1, 2):
        return

    def try_use_slice(base: Any, tensor: Any) -> Any:
        located = original(base, tensor)
        # The base itself is (0, 0, size). What is not at the first element of its storage is not counted as row 0.
        if located is None or (isinstance(located[1], int) and located[1] == 0):
            return located
        dim, start, end = located
        before = base.storage_offset() // base.stride()[dim]
        return dim, start - before, end - before

    auto_functionalize.try_use_slice = try_use_slice
