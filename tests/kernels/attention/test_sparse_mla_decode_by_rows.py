"""Attention of many tokens over dequantised rows, interpreted: the op that reads pages, except the order of sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.attention import sparse_mla_decode as kernels
from dsv4_compile.kernels.attention import sparse_mla_prefill
from dsv4_compile.kernels.attention.common import DecodeCall, FusedParts, PagedKeys, decode_call
from dsv4_compile.kernels.attention.sparse_mla_prefill import PrefillCall
from dsv4_compile.kernels.host.gpu import Gpu
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.reference.attention.sparse_mla_decode import DecodeArguments
from dsv4_compile.testing import assert_bitwise, assert_close, poisoned_empty
from tests.kernels.handed_over import handed_over
from tests.ops.attention.sparse_mla_calls import EPS, call, positional
from tests.support.bounds import checked
from tests.support.fake_triton import TARGETS
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
BF16: dict[str, Any] = {"fmt": "fp8_ds_mla", "dim": 512, "rope_dim": 64, "dtype": torch.bfloat16}
OUTPUTS = ("p_rows", "outputs[0]", "outputs[1]", "p_out", "p_max", "p_lse", "tensors.p_values", "tensors.p_scale")
FEW_KEYS = "attention_few_keys"
HOPPER = Gpu("cuda", 90, 132)


def caches(arguments: dict[str, Any]) -> tuple[PagedKeys, PagedKeys]:
    decode = decode_call(DecodeArguments(*positional(arguments)))
    return decode.window, decode.extra


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attend calls of any size by rows; the prefill kernel is the one for any GPU."""
    monkeypatch.setattr(kernels, "why_unsupported_by_rows", lambda *args: "")


def run(arguments: dict[str, Any], quant: bool = False) -> tuple[Tensor, Tensor]:
    with checked(OUTPUTS), poisoned_empty():
        run = launcher("sparse_mla_decode_quant" if quant else "sparse_mla_decode")
        return run(*positional(arguments, quant=quant))


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
@pytest.mark.parametrize("extra", [0, 21])
def test_rows_of_bfloat16_are_copied(always: None, extra: int) -> None:
    arguments = call(3, 5, window=37, extra=extra, **BF16 | {"fmt": "plain"})
    apart = torch.full((len(arguments["k_cache"]), *arguments["k_cache"].shape[1:]), float("nan"), dtype=torch.bfloat16)
    arguments["k_cache"] = torch.stack([arguments["k_cache"], apart], 1)[:, 0]  # pages of an engine's larger blocks
    out, lse = run(arguments)
    want, want_lse = REFERENCES["sparse_mla_decode"](*positional(arguments))
    assert_close(out, want, FEW_KEYS)
    assert_close(lse, want_lse, "lse")


@interpreted
def test_quantised_outputs_are_those_of_the_op_that_quantises_them(always: None) -> None:
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
    window, extra = caches(call(3, 2, window=37, extra=21, **BF16))
    with checked(OUTPUTS), poisoned_empty():
        rows = kernels.bfloat16_rows(window, extra, "fp8_ds_mla")
        indices, counts = kernels.concatenate_slots(3, window, extra)
    first = window.cache.shape[0] * window.block_size
    slots = torch.arange(first), torch.arange(rows.shape[0] - first)
    parts = []
    for keys, every in zip((window, extra), slots, strict=True):
        gathered = torch.empty(1, len(every), layout.HEAD_DIM, dtype=torch.bfloat16)
        table = torch.arange(keys.cache.shape[0], dtype=torch.int32)[None]
        lens = torch.tensor([len(every)], dtype=torch.int32)
        gather = REFERENCES["dequantize_and_gather_k_cache"]
        gather(gathered, keys.cache, lens, None, table, keys.block_size, 0, "fp8_ds_mla", None)
        parts.append(gathered[0])
    assert_bitwise(rows, torch.cat(parts))
    for token in range(3):
        want = []
        for keys, bound, offset in ((window, first, 0), (extra, rows.shape[0] - first, first)):
            length = min(max(int(keys.lens[token]), 0), keys.indices.shape[1])
            listed = keys.indices[token, :length].tolist()
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


def test_large_caches_of_bfloat16_are_attended_where_they_are_on_sm90(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kernels, sparse_mla_prefill):
        monkeypatch.setattr(module, "gpu_of", lambda device: HOPPER)
    monkeypatch.delattr(kernels, "bfloat16_rows")  # nothing is copied
    arguments = call(3, 64, window=37, extra=21, **BF16 | {"fmt": "plain"}) | {"attn_sink": None, "scale": 0.04}
    arguments |= {name: arguments[name].contiguous() for name in ("k_cache", "extra_k_cache")}
    decode = decode_call(DecodeArguments(*positional(arguments)))
    q = torch.empty(kernels.MIN_TOKENS_BY_ROWS, *decode.q.shape[1:], dtype=torch.bfloat16, device="meta")
    pages = 1 + kernels.MAX_ROWS // decode.window.block_size
    large = decode.window.cache.new_empty((pages, *decode.window.cache.shape[1:]))
    usual = decode._replace(q=q, window=decode.window._replace(cache=large))
    assert kernels.why_unsupported_by_rows(usual, HOPPER) == ""
    apart = torch.stack([large[:, :1], large[:, :1]], 1)[:, 0].expand_as(large)
    for change in ({"window": decode.window._replace(cache=apart)}, {"q": q.new_empty(len(q), 64, 513)[..., 1:]}):
        assert "rows pay" in kernels.why_unsupported_by_rows(usual._replace(**change), HOPPER)
    with compiled_for("sm_90") as compiled:
        kernels.decode_by_rows(decode)
    names = ["concatenate_slots_kernel", "sparse_mla_prefill_sm90_kernel"]
    assert [kernel.metadata.name for kernel in compiled] == names
    wide = FusedParts(arguments["positions"], torch.zeros(8, 2 * layout.ROPE_DIM), None, True)
    with compiled_for("sm_90") as compiled:  # a table that the kernel does not fuse has a separate launch
        kernels.decode_by_rows(decode._replace(fused=wide))
    assert [kernel.metadata.name for kernel in compiled] == [*names, "inv_rope_kernel"]


def test_it_takes_many_tokens_of_small_caches_on_sm90() -> None:
    window, extra = caches(call(4, 64, window=37, extra=21, **BF16))
    q = torch.empty(kernels.MIN_TOKENS_BY_ROWS, 64, 512, dtype=torch.bfloat16, device="meta")
    most = 2 * kernels.ROWS_PER_TOKEN * len(q)
    assert most <= kernels.MAX_ROWS
    usual = DecodeCall(q, window, extra, "fp8_ds_mla", 0.04)
    assert kernels.why_unsupported_by_rows(usual, HOPPER) == ""
    pages = 1 + most // window.block_size
    large = window._replace(cache=window.cache[:1].expand(pages, *window.cache.shape[1:]))
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"q": q[:-1]}, "512 tokens"),
        ({"q": q[:, :32]}, "64 heads"),
        ({"q": q.float()}, "bfloat16"),
        ({"q": torch.empty(len(q), 64, 513, dtype=torch.bfloat16, device="meta")[..., 1:]}, "multiples"),
        ({"window": large}, "rows"),
        ({"extra": extra._replace(cache=handed_over(extra.cache, 1))}, "multiples of 2 bytes"),
        ({"cache_format": "plain"}, "plain keys in torch.uint8"),
        ({"cache_format": "fp8"}, "fp8_ds_mla"),
        ({"scale": -1.0}, "positive"),
        ({"batch_invariant": True}, "depends"),
        ({"fused": FusedParts(n_groups=8, heads_per_group=8)}, "rotated heads only"),
    )
    rows, entries = caches(call(4, 64, window=37, extra=21, **BF16 | {"fmt": "plain"}))
    plain = usual._replace(window=rows, extra=entries, cache_format="plain")
    assert kernels.why_unsupported_by_rows(plain, HOPPER) == ""
    for change, why in changes:
        assert why in kernels.why_unsupported_by_rows(usual._replace(**change), HOPPER)
    assert "sm_90" in kernels.why_unsupported_by_rows(usual, Gpu("cuda", 100, 148))


@pytest.mark.parametrize("target", TARGETS)
def test_its_kernels_compile(target: str) -> None:
    window, extra = caches(call(3, 2, window=37, extra=21, **BF16))
    with compiled_for(target) as compiled:
        kernels.bfloat16_rows(window, extra, "fp8_ds_mla")
        kernels.concatenate_slots(3, window, extra)
    assert len({kernel.metadata.name for kernel in compiled}) == 2


@pytest.mark.parametrize("groups", [0, 2])
def test_on_sm90_all_fused_steps_are_one_launch_after_the_rows(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries that TMA cannot read have a launch for each step, first their norm."""
    monkeypatch.setattr(kernels, "gpu_of", lambda device: HOPPER)
    arguments = call(3, 64, window=37, extra=21, **BF16) | {"attn_sink": None, "scale": 0.04}
    decode = decode_call(DecodeArguments(*positional(arguments)))
    rope = arguments["positions"], arguments["cos_sin_cache"]
    decode = decode._replace(fused=FusedParts(*rope, EPS, True, groups, 64 // max(groups, 1)))
    uneven = torch.zeros(3, 64, 513, dtype=torch.bfloat16)[..., 1:]
    names = []
    for q in (decode.q, uneven):
        with compiled_for("sm_90") as compiled:
            kernels.decode_by_rows(decode._replace(q=q))
        names.append([kernel.metadata.name for kernel in compiled])
    rows = ["concatenate_slots_kernel", "dequantize_pages_kernel", "dequantize_pages_kernel"]
    assert names[0] == [*rows, "sparse_mla_prefill_sm90_kernel"]
    assert names[1][:4] == [*rows, "q_norm_rope_kv_insert_kernel"] and len(names[1]) == 6


def test_the_rows_are_attended_by_the_kernel_for_a_workspace(always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[PrefillCall] = []

    def attend(prefill: PrefillCall) -> tuple[Tensor, Tensor, Tensor]:
        seen.append(prefill)
        return prefill.q, prefill.q[..., 0], prefill.q[..., 0]

    monkeypatch.setattr(kernels, "attend_rows", attend)
    monkeypatch.setattr(kernels, "launch_kernel", lambda *args, **constants: None)
    arguments = call(3, 2, window=37, extra=21, **BF16)
    launcher("sparse_mla_decode")(*positional(arguments))
    assert [prefill.rows.width for prefill in seen] == [37 + 21]
