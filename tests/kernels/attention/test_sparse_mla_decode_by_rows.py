"""Attention of many tokens over dequantised rows, interpreted: the op that reads pages, but for the order of sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.attention import sparse_mla_decode as launcher
from dsv4_compile.kernels.attention import sparse_mla_decode as quant_launcher
from dsv4_compile.kernels.attention import sparse_mla_decode_by_rows as by_rows
from dsv4_compile.kernels.attention.sparse_mla_decode_plan import Fusion, Source
from dsv4_compile.kernels.attention.sparse_mla_prefill import Rows
from dsv4_compile.kernels.host.gpu import Gpu
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.testing import assert_bitwise, assert_close, fake_triton, poisoned_empty
from dsv4_compile.testing.bounds import checked
from dsv4_compile.testing.fake_triton import TARGETS
from tests.ops.attention.sparse_mla_calls import EPS, call, positional

interpreted = pytest.mark.interpreted
BF16: dict[str, Any] = {"fmt": "fp8_ds_mla", "dim": 512, "rope_dim": 64, "dtype": torch.bfloat16}
OUTPUTS = ("p_rows", "p_counts", "p_out", "p_max", "p_lse", "p_values", "p_scale")
FEW_KEYS = "attention_few_keys"
HOPPER = Gpu("cuda", 90, 132)


def sources(arguments: dict[str, Any]) -> tuple[Source, Source]:
    names = ("k_cache", "indices", "lens", "block_size")
    window = Source(*(arguments[name] for name in names))
    return window, Source(*(arguments[f"extra_{name}"] for name in names))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of any size are attended by rows; the kernel behind is the portable one."""
    monkeypatch.setattr(launcher, "by_rows_refuses", lambda *args: "")


def run(arguments: dict[str, Any], quant: bool = False) -> tuple[Tensor, Tensor]:
    module, name = (quant_launcher, "sparse_mla_decode_quant") if quant else (launcher, "sparse_mla_decode")
    with checked(OUTPUTS), poisoned_empty():
        return getattr(module, name)(*positional(arguments, quant=quant))


@interpreted
@pytest.mark.parametrize(
    ("extra", "options"),
    [
        (0, {}),
        (21, {"q_norm_eps": EPS}),
        (21, {"inverse_rope": True}),
        (0, {"q_norm_eps": EPS, "inverse_rope": True}),
    ],
)
def test_it_gives_what_the_op_gives(always: None, extra: int, options: dict[str, Any]) -> None:
    arguments = call(3, 5, window=37, extra=extra, **BF16) | options
    out, lse = run(arguments)
    want, want_lse = REFERENCES["sparse_mla_decode"](*positional(arguments))
    assert_close(out, want, FEW_KEYS, turned=64 if "inverse_rope" in options else 0)
    assert_close(lse, want_lse, "lse")


@interpreted
def test_quantised_it_is_what_quantises_behind_it(always: None) -> None:
    arguments = call(3, 4, window=37, extra=21, **BF16) | {"q_norm_eps": EPS}
    groups = {"n_groups": 2, "heads_per_group": 2}
    values, scale = run(arguments | groups | {"inverse_rope": True}, quant=True)
    out, _ = run(arguments)
    where = out, arguments["positions"], arguments["cos_sin_cache"]
    want = REFERENCES["inv_rope_fp8_quant"](*where, 2, 2)
    for got, right in zip((values, scale), want, strict=True):
        assert_bitwise(got, right, strides=True)


@interpreted
def test_rows_are_those_of_the_slots() -> None:
    window, extra = sources(call(3, 2, window=37, extra=21, **BF16))
    with checked(OUTPUTS), poisoned_empty():
        rows = by_rows.dequantised_pages(window, extra)
        indices, counts = by_rows.join_slots(3, window, extra)
    first = window.cache.shape[0] * window.block_size
    slots = torch.arange(first), torch.arange(rows.shape[0] - first)
    parts = []
    for source, every in zip((window, extra), slots, strict=True):
        whole = torch.empty(1, len(every), layout.HEAD_DIM, dtype=torch.bfloat16)
        table = torch.arange(source.cache.shape[0], dtype=torch.int32)[None]
        lens = torch.tensor([len(every)], dtype=torch.int32)
        gather = REFERENCES["dequantize_and_gather_k_cache"]
        gather(whole, source.cache, lens, None, table, source.block_size, 0, "fp8_ds_mla", None)
        parts.append(whole[0])
    assert_bitwise(rows, torch.cat(parts))
    for token in range(3):
        want = []
        for source, bound, offset in ((window, first, 0), (extra, rows.shape[0] - first, first)):
            length = min(max(int(source.lens[token]), 0), source.indices.shape[1])
            listed = source.indices[token, :length].tolist()
            want += [slot + offset if 0 <= slot < bound else layout.PAD_INDEX for slot in listed]
        assert int(counts[token]) == len(want)
        assert indices[token, : len(want)].tolist() == want
        assert set(indices[token, len(want) :].tolist()) <= {layout.PAD_INDEX}


@interpreted
@pytest.mark.parametrize("lens", [-5, 0, 2**31 - 1])
def test_lengths_may_be_anything(always: None, lens: int) -> None:
    arguments = call(3, 2, window=37, extra=21, **BF16)
    arguments["lens"] = torch.full_like(arguments["lens"], lens)
    arguments["extra_indices"] = torch.full_like(arguments["extra_indices"], 2**31 - 1)
    out, lse = run(arguments)
    want, want_lse = REFERENCES["sparse_mla_decode"](*positional(arguments))
    assert_close(out, want, FEW_KEYS)
    assert_close(lse, want_lse, "lse")


def test_it_takes_many_tokens_of_small_caches_on_hopper() -> None:
    arguments = call(4, 64, window=37, extra=21, **BF16)
    caches = sources(arguments)
    q = torch.empty(by_rows.FEWEST_TOKENS, 64, 512, dtype=torch.bfloat16, device="meta")
    most = 2 * by_rows.ROWS_OF_A_TOKEN * len(q)
    assert most <= by_rows.MOST_ROWS
    usual = [q, *caches, "fp8_ds_mla", 0.04, None, Fusion(), HOPPER]
    assert by_rows.by_rows_refuses(*usual) == ""
    pages = 1 + most // caches[0].block_size
    large = caches[0]._replace(cache=caches[0].cache[:1].expand(pages, *caches[0].cache.shape[1:]))
    for place, other, why in (
        (0, q[:-1], "tokens"),
        (0, q[:, :32], "heads"),
        (0, q.float(), "bfloat16"),
        (0, torch.empty(len(q), 64, 513, dtype=torch.bfloat16, device="meta")[..., 1:], "multiples"),
        (1, large, "rows"),
        (3, "plain", "fp8_ds_mla"),
        (4, -1.0, "positive"),
        (6, Fusion(batch_invariant=True), "depends"),
        (6, Fusion(n_groups=8, heads_per_group=8), "rotates"),
        (7, Gpu("cuda", 100, 148), "Hopper"),
    ):
        assert why in by_rows.by_rows_refuses(*usual[:place], other, *usual[place + 1 :])


@pytest.mark.parametrize("target", TARGETS)
def test_its_kernels_compile(target: str) -> None:
    window, extra = sources(call(3, 2, window=37, extra=21, **BF16))
    with fake_triton.compiled_for(TARGETS[target]) as compiled:
        by_rows.dequantised_pages(window, extra)
        by_rows.join_slots(3, window, extra)
    assert len({kernel.metadata.name for kernel in compiled}) == 2


@pytest.mark.parametrize("groups", [0, 2])
def test_on_hopper_all_that_is_fused_is_one_launch_behind_the_rows(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries that the copy engine cannot read have a launch for each thing, and the first of them is their norm."""
    monkeypatch.setattr(by_rows, "gpu_of", lambda device: HOPPER)
    arguments = call(3, 64, window=37, extra=21, **BF16)
    fusion = Fusion(arguments["positions"], arguments["cos_sin_cache"], EPS, True, False, groups, 64 // max(groups, 1))
    aligned = arguments["q"]
    uneven = torch.zeros(3, 64, 513, dtype=torch.bfloat16)[..., 1:]
    names = []
    for q in (aligned, uneven):
        with fake_triton.compiled_for(TARGETS["sm_90"]) as compiled:
            by_rows.decode_by_rows(q, *sources(arguments), 0.04, None, fusion)
        names.append([kernel.metadata.name for kernel in compiled])
    rows = ["join_slots_kernel", "dequantize_pages_kernel", "dequantize_pages_kernel"]
    assert names[0] == [*rows, "sparse_mla_prefill_hopper_kernel"]
    assert names[1][:4] == [*rows, "q_norm_rope_kv_insert_kernel"] and len(names[1]) == 6


def test_the_rows_are_attended_by_the_kernel_for_a_workspace(always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Rows] = []

    def attend(q: Tensor, kv: Tensor, rows: Rows, scale: float, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        seen.append(rows)
        return q, q[..., 0], q[..., 0]

    monkeypatch.setattr(by_rows, "attend_rows", attend)
    monkeypatch.setattr(by_rows, "launch_kernel", lambda *args, **constants: None)
    arguments = call(3, 2, window=37, extra=21, **BF16)
    launcher.sparse_mla_decode(*positional(arguments))
    assert [rows.width for rows in seen] == [37 + 21]
