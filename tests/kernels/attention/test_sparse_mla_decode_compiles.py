"""The decode kernels compiled ahead of time, and the calls that each sm_90 kernel supports."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_compile import layout
from dsv4_compile._compat import triton_release
from dsv4_compile.kernels.attention import sparse_mla_decode_sm90 as many
from dsv4_compile.kernels.attention import sparse_mla_decode_sm90_few_heads as few_heads
from dsv4_compile.kernels.attention import sparse_mla_decode_sm90_few_tokens as few_tokens
from dsv4_compile.kernels.attention import sparse_mla_decode_triton
from dsv4_compile.kernels.attention.common import NOT_FUSED, DecodeCall, FusedParts, PagedKeys
from dsv4_compile.ops.common.invariance import STEP, TOKENS
from dsv4_compile.testing import strided
from tests.kernels.gpus import GPUS, shared_out
from tests.kernels.handed_over import handed_over
from tests.support.fake_triton import instructions
from tests.tools.compiled_facts import compiled_for

SM90 = GPUS["sm_90"][0]


def fused_parts(kind: str, heads: int) -> FusedParts:
    """Return no fused parts, prologue and epilogue, or both with quantisation."""
    if kind == "plain":
        return NOT_FUSED
    parts = FusedParts(torch.zeros(2, dtype=torch.int64), torch.zeros(64, layout.ROPE_DIM), 1e-6, inverse_rope=True)
    return parts if kind == "fused" else parts._replace(n_groups=2, heads_per_group=heads // 2, packed_scales=True)


def make_call(
    heads: int = 64,
    kind: str = "plain",
    fmt: str = "fp8_ds_mla",
    dtype: torch.dtype = torch.bfloat16,
    sink: bool = False,
    tokens: int = 2,
) -> DecodeCall:
    """Return a call of 128 + 512 columns of slots."""
    lens = torch.zeros(tokens, dtype=torch.int32)

    def paged(pages: int, block: int, width: int) -> PagedKeys:
        cache = layout.allocate_cache(fmt, pages, block, dtype=dtype)
        return PagedKeys(cache, torch.zeros(tokens, width, dtype=torch.int32), lens, block)

    q, logits = torch.zeros(tokens, heads, 512, dtype=dtype), torch.zeros(heads) if sink else None
    caches = paged(3, 64, 128), paged(9, 2, 512)
    return DecodeCall(q, *caches, fmt, 0.1, logits, fused=fused_parts(kind, heads))


def size_of(compiled: Any) -> int:
    """Return the number of instructions of a compiled kernel."""
    return len(instructions(compiled))


CALLS: dict[str, tuple[int, str, torch.dtype, str, int]] = {
    "8 heads": (8, "fp8_ds_mla", torch.bfloat16, "plain", 2),
    "64 heads quantised": (64, "fp8_ds_mla", torch.bfloat16, "quantised", 1),
    "float32 fused": (64, "plain", torch.float32, "fused", 2),
}


@pytest.mark.parametrize(
    ("target", "name"), [(target, name) for target, names in shared_out([*CALLS]).items() for name in names]
)
def test_it_compiles_ahead_of_time_within_shared_memory(target: str, name: str) -> None:
    gpu, kibibytes = GPUS[target]
    heads, fmt, dtype, kind, splits = CALLS[name]
    with compiled_for(target) as compiled:
        sparse_mla_decode_triton.launch(make_call(heads, kind, fmt, dtype, sink=True), gpu, splits)
    names = ["sparse_mla_decode_kernel", "combine_splits_kernel"]
    assert [kernel.metadata.name for kernel in compiled] == names[:splits]
    assert all(kernel.metadata.shared <= kibibytes * 1024 and kernel.assembled for kernel in compiled)


@pytest.mark.parametrize(
    ("heads", "splits", "sink", "kind"),
    [(64, 1, False, "plain"), (128, 1, True, "fused"), (100, 4, True, "quantised")],
)
def test_the_kernel_for_many_tokens_compiles_with_its_registers_and_asynchronous_gemms(
    heads: int, splits: int, sink: bool, kind: str
) -> None:
    call = make_call(heads, kind, sink=sink)
    assert many.why_unsupported(call) == ""
    with compiled_for("sm_90") as compiled:
        many.launch(call, SM90, splits)
    kernel = compiled[0]
    assert kernel.metadata.shared <= GPUS["sm_90"][1] * 1024 and kernel.assembled
    assert kernel.asm["ptx"].count("setmaxnreg") >= 4
    # Scores twice, before the loop and in it; a norm's squares by blocks of columns, in a separate loop.
    assert kernel.asm["ptx"].count("m64n64k16") == 2 * 512 // 16 + (4 if call.fused.q_norm_eps else 0)


@pytest.mark.parametrize(("kernel", "heads", "tokens"), [(few_tokens, 64, 1), (few_heads, 32, 40), (many, 64, 200)])
def test_rows_of_bfloat16_are_copied_sixteen_bytes_at_a_time(kernel: Any, heads: int, tokens: int) -> None:
    call = make_call(heads, "fused", "plain", tokens=tokens)
    assert kernel.why_unsupported(call) == ""
    with compiled_for("sm_90") as compiled:
        kernel.launch(call, SM90, 1)
    ptx = compiled[0].asm["ptx"]
    assert ptx.count("cp.async.cg.shared.global") == ptx.count("0x10, ") >= 8
    assert compiled[0].metadata.shared <= GPUS["sm_90"][1] * 1024 and compiled[0].assembled


@pytest.mark.parametrize(("rope", "heads"), [(96, 64), (200, 64), (32, 32), (200, 8)])
def test_any_even_number_of_columns_up_to_half_of_a_row_is_rotated(rope: int, heads: int) -> None:
    kernel: Any = few_heads if heads <= few_heads.MAX_HEADS else many
    call = make_call(heads, "fused")
    call = call._replace(fused=call.fused._replace(cos_sin_cache=torch.zeros(64, rope)))
    assert kernel.why_unsupported(call) == ""
    with compiled_for("sm_90") as compiled:
        kernel.launch(call, SM90, 1)
    assert compiled[0].assembled


@pytest.mark.parametrize("invariant", [False, True])
def test_partial_results_are_stored_and_combined_sixteen_bytes_at_a_time(invariant: bool) -> None:
    with compiled_for("sm_90") as compiled:
        many.launch(make_call()._replace(batch_invariant=invariant), SM90, 4)
    partial, combined = (kernel.asm["ptx"] for kernel in compiled)
    assert combined.count("ld.global.v4.b32") == 4
    assert compiled[1].metadata.num_warps == (4 if invariant else 2)
    # Both halves of the dims, in a loop over 16 heads at a time.
    assert invariant or partial.count("st.global.v4.b32") == 8


@pytest.mark.parametrize(
    ("heads", "splits", "sink", "kind"),
    [(8, 1, False, "plain"), (16, 4, True, "fused"), (24, 1, True, "quantised"), (32, 1, True, "quantised")],
)
def test_the_kernel_for_few_heads_has_no_repeated_code_and_spills_nothing(
    heads: int, splits: int, sink: bool, kind: str
) -> None:
    call = make_call(heads, kind, sink=sink)
    assert few_heads.why_unsupported(call) == ""
    with compiled_for("sm_90") as compiled:
        few_heads.launch(call, SM90, splits)
    kernel = compiled[0]
    ptx, block_h = kernel.asm["ptx"], few_heads.choose_tiling(heads).block_h
    assert kernel.metadata.shared <= GPUS["sm_90"][1] * 1024 and kernel.assembled
    assert ptx.count("setmaxnreg") >= 4
    assert kernel.metadata.launch_pdl and ptx.count("griddepcontrol.wait") == 1
    # Rows of the GEMMs are keys: as many columns as heads, rounded up. Both have 512 dims, scores and outputs.
    assert ptx.count(f"m64n{block_h}k16") == 512 // 16 + 512 // 64 * (few_heads.KEYS // 16)
    # Of each key, a thread of eight warps dequantises four words of codes in each of seven tiles.
    assert ptx.count("0x9180") == 4 * layout.FP8_DS_MLA_TILES
    used = kernel.resources()
    # Triton 3.9 spills in the quantisation of 32 heads.
    assert used["STACK"] <= (80 if triton_release() >= (3, 9) and kind == "quantised" else 0) and used["LOCAL"] == 0


@pytest.mark.parametrize(
    ("tiling", "heads", "splits", "kind"),
    [
        (few_tokens.NARROW, 100, 3, "fused"),
        (few_tokens.ONE_BLOCK[0], 64, 1, "quantised"),
        (few_tokens.ONE_BLOCK[1], 64, 2, "plain"),
    ],
)
def test_the_kernel_for_few_tokens_is_small_and_waits_for_the_previous_kernel(
    tiling: few_tokens.Tiling, heads: int, splits: int, kind: str
) -> None:
    call = make_call(heads, kind)
    with compiled_for("sm_90") as compiled:
        few_tokens.launch(call, SM90, splits, tiling=tiling)
    kernel = compiled[0]
    assert kernel.metadata.launch_pdl and kernel.asm["ptx"].count("griddepcontrol.wait") == 1
    assert kernel.metadata.shared <= GPUS["sm_90"][1] * 1024 and kernel.resources()["STACK"] == 0
    with compiled_for("sm_90") as compiled:
        many.launch(call, SM90, splits)
    assert kernel.ask(size_of) < compiled[0].ask(size_of) * 2 / 3


def test_the_kernel_for_few_tokens_leaves_more_tokens_to_the_others() -> None:
    choose, narrow, one_block = few_tokens.choose_tiling, few_tokens.NARROW, few_tokens.ONE_BLOCK
    calls: dict[tuple[int, int], few_tokens.Tiling | None] = {(16, 64): None, (32, 64): None}
    # Rows in single blocks, as long as every block has an SM.
    calls |= {(3, 64): narrow, (6, 64): one_block[0], (13, 64): one_block[1], (14, 64): None}
    assert {call: choose(*call, 640) for call in calls} == calls
    assert choose(1, 128, 1152) == one_block[0]
    short = {(1, 64): narrow, (2, 64): one_block[0], (32, 64): one_block[0], (64, 64): one_block[1], (65, 64): None}
    assert {call: choose(*call, 256) for call in short} == short
    assert choose(1, 64, 128) == one_block[0]
    assert choose(16, 64, 512) == one_block[1]
    assert choose(8, 128, 1152) is None
    usual = make_call(tokens=64)
    one = usual._replace(q=usual.q[:1])
    assert few_tokens.why_unsupported(usual._replace(q=usual.q[:8])) == ""
    assert "fewer tokens than 64" in few_tokens.why_unsupported(usual)
    assert "33 heads" in few_tokens.why_unsupported(one._replace(q=one.q[:, :32]))
    assert "more tokens" in few_tokens.why_unsupported(one._replace(batch_invariant=TOKENS))


def test_batch_invariant_steps_of_all_sizes_have_one_split_of_keys() -> None:
    usual = make_call(tokens=64)._replace(batch_invariant=STEP)
    assert few_tokens.why_unsupported(usual) == ""
    assert "at most 1152 keys" in few_tokens.why_unsupported(
        usual._replace(window=usual.window._replace(indices=torch.zeros(64, 1153, dtype=torch.int32)))
    )
    tilings = {few_tokens.invariant_tiling(tokens, heads) for tokens in range(1, 769) for heads in (64, 100, 128)}
    assert tilings == {*few_tokens.ONE_BLOCK, few_tokens.MANY_HEADS}
    assert {(tiling.block_n, tiling.warps, tiling.one_block) for tiling in tilings} == {(128, 8, True)}
    for tokens in (1, 12, 64):
        with compiled_for("sm_90") as compiled:
            few_tokens.launch(usual._replace(q=usual.q[:tokens]), SM90)
        # A row of the scores, a key, has the same warp and thread for any number of heads.
        heads = few_tokens.invariant_tiling(tokens, 64).block_h
        assert compiled[0].asm["ttgir"].count(f"warpsPerCTA = [8, 1], instrShape = [16, {heads}, 16]") >= 1
        assert compiled[0].resources()["STACK"] == 0
        assert compiled[0].metadata.shared <= GPUS["sm_90"][1] * 1024
        assert len(compiled) == 2


def test_unsupported_calls_of_the_sm90_kernels_say_why() -> None:
    usual = make_call(sink=True)
    q, window, extra = usual.q, usual.window, usual.extra
    assert many.why_unsupported(usual) == ""
    rows, plain = make_call(fmt="plain").window, {"extra": make_call(fmt="plain").extra, "cache_format": "plain"}
    odd_pages = torch.zeros(9, 2 * 584 + 8, dtype=torch.uint8)
    changes: dict[str, dict[str, Any]] = {
        "33 heads or more": {"q": q[:, :32]},
        "bfloat16 queries": {"q": q.half()},
        "takes fp8_ds_mla": {"cache_format": "fp8"},
        "rows are 512 bfloat16": {"window": rows._replace(cache=rows.cache.half()), **plain},
        "rows of a page are contiguous": {"window": rows._replace(cache=strided(rows.cache)), **plain},
        "power of two": {"window": window._replace(block_size=48)},
        "1176 bytes apart": {"extra": extra._replace(cache=odd_pages[:, :1168])},
        "start at byte 8": {"window": window._replace(cache=window.cache[:, 8:])},
        "start at byte 4": {"extra": extra._replace(cache=handed_over(extra.cache, 4))},
        "extra_indices is contiguous": {"extra": extra._replace(indices=strided(extra.indices))},
        "256 dims are rotated": {"fused": FusedParts(None, torch.zeros(64, 512))},
    }
    for reason, change in changes.items():
        assert reason in many.why_unsupported(usual._replace(**change))
    assert few_heads.why_unsupported(usual._replace(q=q[:, :32])) == ""
    assert "32 heads or fewer" in few_heads.why_unsupported(usual._replace(q=q[:, :33]))


@pytest.mark.parametrize("kernel", [many, sparse_mla_decode_triton])
def test_nothing_is_compiled_again_for_a_piece_of_a_batch(kernel: Any) -> None:
    lens, positions = torch.zeros(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int64)
    call = make_call(kind="fused")
    with compiled_for("sm_90") as compiled:
        for first in (0, 3):
            here = slice(first, first + 2)
            window, extra = (keys._replace(lens=lens[here]) for keys in (call.window, call.extra))
            fused = call.fused._replace(positions=positions[here])
            kernel.launch(call._replace(window=window, extra=extra, fused=fused), SM90, 2)
    assert len(compiled) == 4
    assert [kernel.hash for kernel in compiled[:2]] == [kernel.hash for kernel in compiled[2:]]
