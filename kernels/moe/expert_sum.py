"""Weighted sums of experts' results over each token's places, always in the same order."""

from __future__ import annotations

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


@triton.jit
def add_up(p_out, p_results, p_ids, o_t, o_c, tokens, places, first_expert, HIDDEN: tl.constexpr, TOP_K: tl.constexpr,
            EXPERTS: tl.constexpr, SHARED: tl.constexpr):  # fmt: skip
    """Add the results of tokens `o_t` up in the order of their places, the shared expert's last."""
    live = o_t < tokens
    total = tl.zeros((o_t.shape[0], o_c.shape[0]), tl.float32)
    for k in tl.static_range(TOP_K):
        place = o_t.to(tl.int64) * TOP_K + k
        valid = local_expert(p_ids, place, live, first_expert, EXPERTS) >= 0
        p_row = p_results + place[:, None] * HIDDEN + o_c[None, :]
        # What belongs to no expert was never written.
        total += tl.load(p_row, valid[:, None], 0.0, cache_modifier=".cg").to(tl.float32)
    if SHARED:
        p_row = p_results + (places + o_t.to(tl.int64))[:, None] * HIDDEN + o_c[None, :]
        total += tl.load(p_row, live[:, None], 0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(p_out + o_t.to(tl.int64)[:, None] * HIDDEN + o_c[None, :], total.to(p_out.dtype.element_ty), live[:, None])


@triton.jit
def add_up_last(p_arrived, block, blocks, p_out, p_results, p_ids, o_row, tokens, places, first_expert,
                HIDDEN: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, SHARED: tl.constexpr,
                SUM_TOKENS: tl.constexpr):  # fmt: skip
    """Add all tokens' results in columns `o_row` up, in the last CTA of a block of columns, one of `blocks`."""
    if arrive(p_arrived + block) == tl.num_programs(0) // blocks - 1:
        for token in range(0, tokens, SUM_TOKENS):
            o_t = token + tl.arange(0, SUM_TOKENS)
            add_up(p_out, p_results, p_ids, o_t, o_row, tokens, places, first_expert, HIDDEN, TOP_K, EXPERTS, SHARED)
        tl.store(p_arrived + block, 0)


@triton.jit(do_not_specialize=["tokens", "places", "first_expert"])
def sum_kernel(
    p_out,
    p_results,
    p_ids,
    tokens,
    places,
    first_expert,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    SHARED: tl.constexpr,
    SUM_TOKENS: tl.constexpr,
    SUM_COLUMNS: tl.constexpr,
):
    """Add the results of SUM_TOKENS tokens up, SUM_COLUMNS columns of them."""
    BLOCKS: tl.constexpr = HIDDEN // SUM_COLUMNS
    o_t = tl.program_id(0) // BLOCKS * SUM_TOKENS + tl.arange(0, SUM_TOKENS)
    o_c = tl.program_id(0) % BLOCKS * SUM_COLUMNS + tl.arange(0, SUM_COLUMNS)
    add_up(p_out, p_results, p_ids, o_t, o_c, tokens, places, first_expert, HIDDEN, TOP_K, EXPERTS, SHARED)


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
        HIDDEN=hidden,
        TOP_K=top_k,
        EXPERTS=experts,
        SHARED=shared,
        SUM_TOKENS=SUM_TOKENS,
        SUM_COLUMNS=columns,
        num_warps=4,
    )
