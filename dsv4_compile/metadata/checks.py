"""Argument checks before a persistent buffer is written: batches, lengths and tables that do not fit.

Values are checked for host tensors only. For device tensors only shapes are: reading values would synchronise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import check, error, fail
from ..sizes import check_size, shown


def on_host(values: Tensor) -> bool:
    """Return whether a tensor can be read without synchronisation."""
    return values.device.type == "cpu"


def check_capacity(what: str, got: int, capacity: int, name: str) -> None:
    """Raise E401 unless 0 <= `got` <= `capacity`; `name` is the argument that sets the capacity."""
    if type(got) is not int and not isinstance(got, torch.SymInt):
        got = check_size(what, got, 0)
    check(got >= 0, "E401", got=f"{got} {what}", fix=f"pass 0 to {capacity}")
    if got > capacity:
        fail("E401", got=f"{got} {what}, {name}={capacity}", fix=f"allocate for {got} {what}, or send fewer")


def int_tensor(name: str, values: Any) -> Tensor:
    """Return a tensor as it is, and other integers as one. Raises E201 unless `values` is a vector of integers."""
    if isinstance(values, Tensor):
        return values
    try:
        # No dtype: an integer dtype would silently truncate floats, which `check_ints` finds.
        return torch.tensor(values, dtype=None if len(values) else torch.int64, device="cpu")
    except Exception as fault:
        rule = f"{name} is int32 or int64, of one dim"
        raise error("E201", got=f"{name}={shown(values)}", rule=rule, fix="pass a list of integers") from fault


def check_ints(name: str, values: Tensor) -> None:
    """Raise E201 unless `values` is an int32 or int64 vector."""
    fine = values.dim() == 1 and values.dtype in (torch.int32, torch.int64)
    got = f"{name} {values.dtype} {list(values.shape)}"
    check(fine, "E201", got=got, rule=f"{name} is int32 or int64, of one dim", fix="pass integers, or a tensor of them")


def check_batch(starts: Tensor, lens: Tensor, max_tokens: int, max_seqs: int, max_len: int) -> int:
    """Raise for a batch that does not fit; return the longest sequence, 0 for lengths on a device."""
    requests = lens.shape[0]
    check(
        starts.shape[0] == requests + 1,
        "E201",
        got=f"{starts.shape[0]} query_start_loc, {requests} seq_lens",
        rule="query_start_loc has one element more than seq_lens",
        fix="pass the first token of each request and the end of the last",
    )
    check_capacity("requests", requests, max_seqs, "max_num_seqs")
    if requests == 0 or not (on_host(starts) and on_host(lens)):
        return 0
    fine = bool((starts.diff() >= 0).all()) and int(lens.min()) >= 0
    check(fine, "E201", got="a negative length", rule="query_start_loc does not decrease, lengths are not negative")
    check_capacity("tokens", int(starts[-1]), max_tokens, "max_num_batched_tokens")
    over = (starts.diff() > lens) & (lens > 0)
    if over.any():
        request = int(over.int().argmax())
        query, length = int(starts.diff()[request]), int(lens[request])
        fail(
            "E201",
            got=f"request {request} has a query of {query} tokens in a sequence of {length}",
            rule="seq_lens includes this step's query; it is 0 for padding",
            fix="pass seq_lens as they are after the step",
        )
    return check_lengths("has", lens, max_len)


def check_lengths(what: str, lens: Tensor, max_len: int) -> int:
    """Raise E402 for a length above `max_len`; return the longest, 0 for lengths on a device."""
    if lens.numel() == 0 or not on_host(lens):
        return 0
    longest = int(lens.max())
    if longest > max_len:
        fail("E402", got=f"request {int(lens.argmax())} {what} {longest} tokens, max_model_len={max_len}")
    return longest


def check_table(group: str, table: Tensor, rows: int, columns: int, max_columns: int | None = None) -> Tensor:
    """Return the block table of a group. E403 unless it has at least `[rows, columns]` and fits."""
    fine = table.dim() == 2 and table.dtype is torch.int32
    check(fine, "E201", got=f"{group}: {table.dtype} {list(table.shape)}", rule="block tables are int32 [R, B]")
    got = f"a {group} block table {list(table.shape)}"
    if table.shape[0] < rows or table.shape[1] < columns:
        fail("E403", got=f"{got}; the batch reads [{rows}, {columns}]")
    if max_columns is not None and table.shape[1] > max_columns:
        fail(
            "E403", got=f"{got}, at most {max_columns} columns", fix="pass the columns up to max_model_len, or raise it"
        )
    return table
