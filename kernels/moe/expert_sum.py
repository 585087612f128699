"""Weighted sums of experts' results over each token's places, always in the same order."""

from __future__ import annotations

from typing import Any, NamedTuple

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


class SumShape(NamedTuple):
    """Compile-time sizes of a sum.

    Attributes:
        hidden: columns of a token. top_k: its places. experts: of this rank. shared: whether it has a shared expert.
        tokens: that a CTA adds up at a time.
    """

    hidden: int
    top_k: int
    experts: int
    shared: bool
    tokens: int


class ExpertIds(NamedTuple):
    """Ids `[places]` of the experts of tokens' places in a kernel, how many there are, and the first of this rank."""

    p_ids: Any
    tokens: Any
    places: Any
    first_expert: Any


@triton.jit
def add_up(p_out, p_results, ids, o_t, o_c, SHAPE: tl.constexpr):
    """Add the results of tokens `o_t` up in the order of their places, the shared expert's last."""
    HIDDEN: tl.constexpr = SHAPE.hidden
    TOP_K: tl.constexpr = SHAPE.top_k
    live = o_t < ids.tokens
    total = tl.zeros((o_t.shape[0], o_c.shape[0]), tl.float32)
    for k in tl.static_range(TOP_K):
        place = o_t.to(tl.int64) * TOP_K + k
        valid = local_expert(ids.p_ids, place, live, ids.first_expert, SHAPE.experts) >= 0
        p_row = p_results + place[:, None] * HIDDEN + o_c[None, :]
        # What belongs to no expert was never written.
        total += tl.load(p_row, valid[:, None], 0.0, cache_modifier=".cg").to(tl.float32)
    if SHAPE.shared:
        p_row = p_results + (ids.places + o_t.to(tl.int64))[:, None] * HIDDEN + o_c[None, :]
        total += tl.load(p_row, live[:, None], 0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(p_out + o_t.to(tl.int64)[:, None] * HIDDEN + o_c[None, :], total.to(p_out.dtype.element_ty), live[:, None])


@triton.jit
def add_up_last(p_arrived, block, blocks, p_out, p_results, ids, o_row, SHAPE: tl.constexpr):
    """Add all tokens' results in columns `o_row` up, in the last CTA of a block of columns, one of `blocks`."""
    SUM_TOKENS: tl.constexpr = SHAPE.tokens
    if arrive(p_arrived + block) == tl.num_programs(0) // blocks - 1:
        for token in range(0, ids.tokens, SUM_TOKENS):
            add_up(p_out, p_results, ids, token + tl.arange(0, SUM_TOKENS), o_row, SHAPE)
        tl.store(p_arrived + block, 0)


@triton.jit(do_not_specialize=["tokens", "places", "first_expert"])
def sum_kernel(
    p_out,  # [T, hidden], contiguous
    p_results,  # [places, or + T with a shared expert, hidden], contiguous
    p_ids,  # [places] int, contiguous
    tokens,
    places,
    first_expert,
    SHAPE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add COLUMNS columns of the results of some tokens up."""
    BLOCKS: tl.constexpr = SHAPE.hidden // COLUMNS
    o_t = tl.program_id(0) // BLOCKS * SHAPE.tokens + tl.arange(0, SHAPE.tokens)
    o_c = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    add_up(p_out, p_results, ExpertIds(p_ids, tokens, places, first_expert), o_t, o_c, SHAPE)


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
        SHAPE=SumShape(hidden, top_k, experts, shared, SUM_TOKENS),
        COLUMNS=columns,
        num_warps=4,
    )
