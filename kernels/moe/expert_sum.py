"""Weighted sums of experts' results over each token's places, always in the same order."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...layout import cdiv
from ...reference.moe.moe_experts import ExpertsArguments
from ..host.launch import launch_kernel
from ..host.semaphores import arrive
from .expert_plan import local_expert

SUM_TOKENS, SUM_COLUMNS = 8, 128
"""Tokens that a CTA adds up at a time, and columns of `sum_kernel`."""


class Sum(NamedTuple):
    """Compile-time sizes of sums, and whether a shared expert has rows after those of the places."""

    hidden: int
    top_k: int
    experts: int
    shared: bool
    tokens: int = SUM_TOKENS
    columns: int = 0


@triton.jit
def add_up(rows, o_t, o_c, tokens, places, first_expert, SUM: tl.constexpr):
    """Add the results of tokens `o_t` up in the order of their places, the shared expert's last.

    `rows` are pointers to out [T, HIDDEN], results [places, or + T, HIDDEN] and ids [places].
    """
    p_out, p_results, p_ids = rows
    live = o_t < tokens
    total = tl.zeros((o_t.shape[0], o_c.shape[0]), tl.float32)
    for k in tl.static_range(SUM.top_k):
        place = o_t.to(tl.int64) * SUM.top_k + k
        valid = local_expert(p_ids, place, live, first_expert, SUM.experts) >= 0
        p_row = p_results + place[:, None] * SUM.hidden + o_c[None, :]
        # What belongs to no expert was never written.
        total += tl.load(p_row, valid[:, None], 0.0, cache_modifier=".cg").to(tl.float32)
    if SUM.shared:
        p_row = p_results + (places + o_t.to(tl.int64))[:, None] * SUM.hidden + o_c[None, :]
        total += tl.load(p_row, live[:, None], 0.0, cache_modifier=".cg").to(tl.float32)
    p_row = p_out + o_t.to(tl.int64)[:, None] * SUM.hidden + o_c[None, :]
    tl.store(p_row, total.to(p_out.dtype.element_ty), live[:, None])


@triton.jit
def add_up_last(p_arrived, block, blocks, rows, o_row, tokens, places, first_expert, SUM: tl.constexpr):
    """Add all tokens' results in columns `o_row` up, in the last CTA of a block of columns, one of `blocks`."""
    if arrive(p_arrived + block) == tl.num_programs(0) // blocks - 1:
        for token in range(0, tokens, SUM.tokens):
            add_up(rows, token + tl.arange(0, SUM.tokens), o_row, tokens, places, first_expert, SUM)
        tl.store(p_arrived + block, 0)


@triton.jit(do_not_specialize=["tokens", "places", "first_expert"])
def sum_kernel(p_out, p_results, p_ids, tokens, places, first_expert, SUM: tl.constexpr):
    """Add the results of some tokens up, and some columns of them."""
    BLOCKS: tl.constexpr = SUM.hidden // SUM.columns
    o_t = tl.program_id(0) // BLOCKS * SUM.tokens + tl.arange(0, SUM.tokens)
    o_c = tl.program_id(0) % BLOCKS * SUM.columns + tl.arange(0, SUM.columns)
    add_up((p_out, p_results, p_ids), o_t, o_c, tokens, places, first_expert, SUM)


def add_up_places(call: ExpertsArguments, results: Tensor, shared: bool, experts: int, out: Tensor) -> None:
    """Fill `out` with the sums of rows `results` `[places, or + T with the shared expert, HIDDEN]`, in a launch."""
    (tokens, hidden), top_k = call.x.shape, call.ids.shape[1]
    columns = SUM_COLUMNS if hidden % SUM_COLUMNS == 0 else 32
    launch_kernel(
        sum_kernel,
        (cdiv(tokens, SUM_TOKENS) * (hidden // columns),),
        out,
        results,
        call.ids,
        tokens,
        tokens * top_k,
        call.first_expert,
        SUM=Sum(hidden, top_k, experts, shared, columns=columns),
        num_warps=4,
    )
