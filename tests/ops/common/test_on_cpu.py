"""Forms of ops for CPUs against the references that they replace there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.cpu.attention import sparse_mla_decode as form
from dsv4_compile.ops.common.define import EAGER, OPS, REFERENCES
from dsv4_compile.testing import assert_bitwise, assert_close, random_cache
from dsv4_compile.testing.compare import TOLERANCES
from dsv4_compile.testing.samples import op_samples

FORMS = sorted(op for op in OPS if EAGER[op] is not REFERENCES[op])
SUMS = ("moe_experts", "mx_experts", "mhc_", "grouped_linear")
"""Ops, in addition to attention, that order their sums differently."""


def both(op: str, args: Any) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of results and arguments after a run of the form and of the reference."""
    runs = []
    for run in (EAGER[op], REFERENCES[op]):
        copies = [value.clone() if isinstance(value, Tensor) else value for value in args]
        results = run(*copies)
        results = () if results is None else results if isinstance(results, tuple) else (results,)
        runs.append([*results, *(value for value in copies if isinstance(value, Tensor))])
    return list(zip(*runs, strict=True))


def assert_attention(pairs: list[tuple[Tensor, Tensor]]) -> None:
    (out, want), (lse, want_lse), *rest = pairs
    assert_close(out, want, TOLERANCES["attention_bfloat16" if out.dtype is torch.bfloat16 else "attention_float32"])
    assert_close(lse, want_lse, TOLERANCES["lse"])
    for got, expected in rest:
        assert_bitwise(got, expected)


@pytest.mark.parametrize("op", FORMS)
def test_a_form_computes_what_its_reference_does(op: str) -> None:
    for args in op_samples(op):
        pairs = both(op, args)
        if op in ("sparse_mla_decode", "sparse_mla_decode_latent", "sparse_mla_decode_ragged"):
            assert_attention(pairs)
            continue
        for got, want in pairs:
            if got.dtype.is_floating_point and (op.startswith(SUMS) or "sparse_mla" in op):
                torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-3, equal_nan=True)
            else:
                assert_bitwise(got, want)


def prompt(tokens: int = 70, heads: int = 3, dim: int = 32) -> list[Any]:
    """Return arguments of a prompt of one request: windows that overlap, and some entries, a slot listed twice."""
    first, second = (random_cache("plain", 3, 64, live=190, head_dim=dim, dtype=torch.float32) for _ in range(2))
    window = torch.arange(tokens)[:, None] - torch.arange(20).flip(0)
    window = torch.where(window >= 0, first.slots[window.clamp_min(0)], -1).int()
    entries = second.slots[torch.randint(12, (tokens, 9))].int()
    entries[:, 1] = entries[:, 0]
    lens = torch.arange(tokens, dtype=torch.int32) % 11
    call = torch.randn(tokens, heads, dim), first.cache, window, torch.full_like(lens, 20), 64, "plain", 0.2
    return [*call, torch.randn(heads), second.cache, entries, lens, 64]


def test_tokens_of_a_prompt_share_keys_and_get_what_each_would_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "_attend_gathered", lambda *args: pytest.fail("no keys were shared"))
    assert_attention(both("sparse_mla_decode", prompt()))


def test_a_key_that_is_not_finite_reaches_only_who_attends_it() -> None:
    args = prompt()
    args[8][:, :] = torch.nan
    args[10][5:] = 0
    args[10][:5] = 1
    pairs = both("sparse_mla_decode", args)
    assert pairs[0][0][:5].isnan().all() and not pairs[0][0][5:].isnan().any()
    assert_attention(pairs)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_tokens_of_a_prompt_select_entries_of_shared_keys(tokens: int, heads: int) -> None:
    """Requests of one token and of several; K below and above the number of entries; a block that does not exist."""
    cache = torch.randn(8, 4, 16).mul(4).round()
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    q, weights = torch.randn(tokens, heads, 16).mul(4).round(), torch.randn(tokens, heads).mul(4).round()
    lens = torch.arange(tokens, dtype=torch.int32) % 17
    for owner in (torch.arange(tokens) % 2, torch.arange(tokens) // 20, torch.full((tokens,), 1)):
        for topk in (3, 20):
            for block in (table[1, 1].item(), -1):
                rows = table.clone()
                rows[1, 1] = block
                call = q, torch.empty(tokens, heads, 0), weights, cache, rows, owner.int() % 2, lens, 4, "plain", topk
                for got, want in both("indexer_logits_topk", call):
                    assert_bitwise(got, want)


@pytest.mark.parametrize("ratio", [4, 128])
def test_entries_of_many_groups_are_the_references_bytes(ratio: int) -> None:
    width, tokens, block = (64 if ratio == 4 else 32), 600, 4 if ratio == 4 else 8
    state = torch.randn(tokens // block + 1, block, width)
    table = torch.randperm(tokens // block + 1).int()[None]
    positions = torch.arange(tokens)
    slots = table[0].long().repeat_interleave(block) * block + torch.arange(block).repeat(tokens // block + 1)
    state_slots = torch.where(torch.rand(tokens) < 0.9, slots[:tokens], -1)
    entries = torch.where((positions + 1) % ratio == 0, positions // ratio, -1)
    angles = torch.rand(tokens, 4)
    rope = torch.cat((angles.cos(), angles.sin()), dim=1)
    owner = torch.zeros(tokens, dtype=torch.int32)
    call = state, state_slots, table, owner, positions, entries, torch.randn(16), rope, torch.zeros(40, 4, 16)
    for got, want in both("compress_norm_rope_insert", (*call, 1e-6, ratio, block, 4, "plain")):
        assert_bitwise(got, want)
