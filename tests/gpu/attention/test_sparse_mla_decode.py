"""The decode kernels on a GPU against the reference on the same GPU: real sizes, hostile rows, graphs, all splits."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl

from dsv4_compile import layout
from dsv4_compile.bench import sparse_mla_decode as scenario
from dsv4_compile.kernels.attention import split_combine
from dsv4_compile.kernels.attention.common import operand_dtype
from dsv4_compile.kernels.host.gpu import gpu_of
from dsv4_compile.kernels.host.pdl import pdl_option, supports_pdl
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.reference.common import kv_format
from dsv4_compile.testing import assert_bitwise
from tests.gpu.attention.sparse_mla import (
    BF16,
    CUDA,
    EPS,
    FEW_KEYS,
    FOR_MANY,
    IS_HOPPER,
    KERNELS,
    NORMED_LSE,
    assert_same,
    by_many,
    by_triton,
    garbage,
    heads_of,
    kernels_for,
    on_gpu,
    reference,
    rope,
)
from tests.ops.attention.sparse_mla_calls import normed_by_a_factor
from tests.ops.attention.test_sparse_mla_decode import sample

__all__ = ["garbage"]  # a fixture for every test


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("tokens", "heads"), [(1, 64), (2, 128), (8, 64), (33, 64), (33, 128), (131, 64), (257, 128), (512, 64)]
)
def test_full_rows_of_real_models(kernel: str, tokens: int, heads: int) -> None:
    args = (*scenario.arguments(tokens, heads_of(kernel, heads), CUDA, tokens), None)
    assert_same(KERNELS[kernel](args), reference(args))


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("heads", [1, 8, 17, 32, 33, 100])
def test_any_number_of_heads(tokens: int, heads: int) -> None:
    args = (*scenario.arguments(tokens, heads, CUDA, heads), None)
    want = reference(args)
    for kernel in kernels_for(heads):
        assert_same(kernel(args), want)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("splits", [1, 2, 3, 10, 20, 72])
@pytest.mark.parametrize("heads", [64, 128])
def test_hostile_rows_and_poisoned_pages_however_they_are_split(kernel: str, splits: int, heads: int) -> None:
    args = on_gpu(sample(40, heads_of(kernel, heads), window=130, extra=517, fmt="fp8_ds_mla", **BF16))
    assert_same(KERNELS[kernel](args, splits), reference(args), FEW_KEYS)


@pytest.mark.parametrize("number", range(3 if IS_HOPPER else 0))
@pytest.mark.parametrize("splits", [3, 12])
def test_hostile_rows_with_every_tiling_for_few_tokens(number: int, splits: int) -> None:
    from dsv4_compile.kernels.attention import sparse_mla_decode_sm90_few_tokens as few_tokens

    args = on_gpu(sample(9, 70, window=130, extra=517, fmt="fp8_ds_mla", **BF16))
    options = {**rope(9), "q_norm_eps": EPS, "inverse_rope": True}
    tiling = (few_tokens.NARROW, *few_tokens.ONE_BLOCK)[number]
    with mock.patch.object(few_tokens, "choose_tiling", lambda *_: tiling):
        got = KERNELS["few_tokens"](args, splits, **options)
    assert_same(got, reference(args, **options), FEW_KEYS, NORMED_LSE, turned=layout.ROPE_DIM)


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_without_keys_whatever_the_queries_hold(kernel: str) -> None:
    args = list(on_gpu(sample(6, heads_of(kernel, 64), window=70, extra=70, fmt="fp8_ds_mla", **BF16)))
    args[0][:4] = torch.nan
    args[2][:2], args[9][:2] = -1, 2**31 - 1
    args[3][:2], args[10][:2] = 70, 70
    args[3][2:4], args[10][2:4] = 0, -7
    for splits in (1, 3):
        out, lse = KERNELS[kernel](tuple(args), splits)
        assert (out[:4] == 0).all() and (lse[:4] == torch.inf).all()
        assert_same((out[4:], lse[4:]), tuple(x[4:] for x in reference(tuple(args))), FEW_KEYS)


@pytest.mark.parametrize("kernel", KERNELS)
def test_values_of_a_split_that_are_not_finite_leave_the_rest_of_its_row(kernel: str) -> None:
    args = [*on_gpu(sample(2, heads_of(kernel, 64), window=30, extra=70, fmt="fp8_ds_mla", **BF16))]
    args[3], args[10] = torch.tensor([30, 0], device=CUDA), torch.tensor([0, 32], device=CUDA)  # a split each
    rows = args[1][:, : 64 * layout.FP8_DS_MLA.data].unflatten(1, (64, -1))[..., layout.NOPE_DIM :]
    values = rows.contiguous().view(torch.bfloat16)
    values[:, ::2, 3], values[..., 7], values[..., 11] = torch.inf, 3e38, -3e38
    rows.copy_(values.view(torch.uint8))
    # The infinite keys have no weight, and make NaN of their dim alone; sums of the large ones overflow.
    args[0].zero_()[..., layout.NOPE_DIM + 3] = -1
    want, got = KERNELS[kernel](tuple(args), 1), KERNELS[kernel](tuple(args), 2)
    assert want[0].isnan().any() and want[0].isinf().any() and want[0].isfinite().any()
    assert_same(got, want, FEW_KEYS)


@pytest.mark.parametrize("fmt", ["plain", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads", [8, 64])
def test_row_caches_of_every_dtype(fmt: str, dtype: torch.dtype, heads: int) -> None:
    args = on_gpu(sample(17, heads, window=130, extra=70, fmt=fmt, dim=512, dtype=dtype))
    exact = operand_dtype(args[0], args[1], fmt) is torch.float32 and dtype is torch.float32
    for splits in (1, 3):
        assert_same(by_triton(args, splits), reference(args), "attention_float32" if exact else FEW_KEYS)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("splits", [1, 3, 10, 40])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("heads", [64, 128])
def test_hostile_rows_of_bfloat16(kernel: str, splits: int, fused: bool, heads: int) -> None:
    args = on_gpu(sample(40, heads_of(kernel, heads), window=130, extra=517, fmt="plain", **BF16))
    options: dict[str, Any] = {**rope(40), "q_norm_eps": EPS, "inverse_rope": True} if fused else {}
    got, lse = KERNELS[kernel](args, splits, **options), NORMED_LSE if fused else "lse"
    assert_same(got, reference(args, **options), FEW_KEYS, lse, turned=layout.ROPE_DIM if fused else 0)
    for _ in range(20):
        for again, first in zip(KERNELS[kernel](args, splits, **options), got, strict=True):
            assert torch.equal(again.nan_to_num(7), first.nan_to_num(7))


@pytest.mark.parametrize("dim", [4, 48, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_dims(dim: int, dtype: torch.dtype) -> None:
    args = on_gpu(sample(9, 4, window=40, extra=30, dim=dim, dtype=dtype))
    tolerance = "attention_float32" if dtype is torch.float32 else FEW_KEYS
    assert_same(by_triton(args, 2), reference(args), tolerance)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_code_with_every_scale_is_dequantised_exactly(kernel: str) -> None:
    """A token that attends one key returns it. Larger scales overflow bfloat16, and q times infinity is NaN."""
    scales, block = torch.arange(247, device=CUDA), 256
    codes = torch.arange(256, device=CUDA)
    codes = codes[(codes & 0x7F) != 0x7F].to(torch.uint8)
    cache = layout.allocate_cache("fp8_ds_mla", 1, block, device=CUDA)
    data, scale = cache[0, : 576 * block].view(block, 576), cache[0, 576 * block :].view(block, 8)
    data[:, :448] = codes.repeat(2)[:448]
    data[:, 448:] = torch.randn(block, 64, device=CUDA).bfloat16().view(torch.uint8)
    scale[:247, :7] = scales[:, None].to(torch.uint8)
    lens = torch.ones(247, dtype=torch.int32, device=CUDA)
    q = torch.zeros(247, heads_of(kernel, 64), 512, device=CUDA).bfloat16()
    slots = scales[:, None].int()
    args = q, cache, slots, lens, block, "fp8_ds_mla", 1.0, None, cache, slots[:, :0], lens, block, None
    want = kv_format.load_kv(cache, "fp8_ds_mla", block, scales) + 0.0
    for head in KERNELS[kernel](args)[0].unbind(1):
        assert_bitwise(head, want)


@pytest.mark.parametrize("registers", [144, 136] if IS_HOPPER else [])
def test_registers_of_the_producer_of_many_tokens(registers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.experimental import gluon

    from dsv4_compile.kernels.attention import sparse_mla_decode_sm90 as many

    # Jitted again: a compiled kernel must not see other globals than those that it was compiled with.
    kernel = gluon.jit(**many.CHANGING)(many.sparse_mla_decode_sm90_kernel.fn)
    monkeypatch.setattr(many, "sparse_mla_decode_sm90_kernel", kernel)
    monkeypatch.setattr(many, "PRODUCER_REGISTERS", gluon.language.constexpr(registers))
    for tokens in (3, 200):
        args = (*scenario.arguments(tokens, 64, CUDA, 1), None)
        assert_same(by_many(args), reference(args))


def test_the_op_takes_the_best_kernel_and_its_arguments_in_any_form() -> None:
    args = [*scenario.arguments(9, 64, CUDA, 1), None]
    want = reference(tuple(args))
    assert_same(launcher("sparse_mla_decode")(*args), want)
    assert_same(torch.ops.dsv4.sparse_mla_decode(*args), want)
    wide = [x.long() if i in (2, 3, 9, 10) else x for i, x in enumerate(args)]
    assert_same(launcher("sparse_mla_decode")(*wide), want)
    fused = torch.randn(9, 65 * 512, device=CUDA).bfloat16()
    fused[:, : 64 * 512] = args[0].flatten(1)
    args[0] = fused[:, : 64 * 512].unflatten(1, (64, 512))
    args[1] = args[1].unflatten(1, (scenario.BLOCK, 584))
    assert_same(launcher("sparse_mla_decode")(*args), want)
    no_sink = [*args[:7], None, *args[8:]]
    assert_same(launcher("sparse_mla_decode")(*no_sink), reference(tuple(no_sink)))
    one = args[:7]
    assert_same(launcher("sparse_mla_decode")(*one), reference(tuple(one)))


@pytest.mark.parametrize("kernel", FOR_MANY)
def test_seventy_thousand_tokens(kernel: str) -> None:
    q, cache, slots, lens, *rest = scenario.arguments(64, heads_of(kernel, 64), CUDA, 3)
    tokens = 70_000
    row = torch.arange(tokens, device=CUDA) % 64
    short = slots[row, :20].contiguous()
    args = q[row], cache, short, lens[row].clamp(max=20), *rest[:4], cache, short[:, :0], lens[row], rest[0], None
    out, lse = KERNELS[kernel](args)
    small = tuple(x[:64] if i in (0, 2, 3, 9, 10) else x for i, x in enumerate(args))
    want = reference(small)
    assert_same((out[:64], lse[:64]), want, FEW_KEYS)
    assert torch.equal(out, out[:64][row]) and torch.equal(lse, lse[:64][row])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("fmt", ["fp8_ds_mla", "plain"])
def test_caches_beyond_two_gibibytes(kernel: str, fmt: str) -> None:
    page = layout.FP8_DS_MLA.page_stride(64) if fmt == "fp8_ds_mla" else 64 * 512 * 2
    pages = 2**31 // page + 300
    small = scenario.random_cache(64 * 200, torch.Generator(CUDA).manual_seed(0))
    if fmt == "plain":
        small = torch.randn(200, 64, 512, device=CUDA).bfloat16()
    cache = layout.allocate_cache(fmt, pages, 64, device=CUDA)
    cache[-200:] = small
    slots = torch.randint(0, 64 * 200, (5, 300), device=CUDA, dtype=torch.int32)
    far = slots + 64 * (pages - 200)
    lens = torch.full((5,), 300, device=CUDA)
    q = torch.randn(5, heads_of(kernel, 64), 512, device=CUDA).bfloat16()
    rest = lens, 64, fmt, 512**-0.5, None
    want = reference((q, small, slots, *rest))
    assert_same(KERNELS[kernel]((q, cache, far, *rest, cache, far[:, :0], lens, 64, None)), want)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tokens", [1, 40, 300])
@pytest.mark.parametrize("fused", [False, True])
def test_repeats_are_equal_bit_by_bit(kernel: str, tokens: int, fused: bool) -> None:
    args = (*scenario.arguments(tokens, heads_of(kernel, 64), CUDA, 5), None)
    options: dict[str, Any] = {**rope(tokens), "q_norm_eps": EPS, "inverse_rope": True} if fused else {}
    first = KERNELS[kernel](args, **options)
    for _ in range(100):
        for got, want in zip(KERNELS[kernel](args, **options), first, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tokens", [2, 150])
def test_a_captured_graph_follows_its_buffers_and_never_waits(kernel: str, tokens: int) -> None:
    args = (*scenario.arguments(tokens, heads_of(kernel, 64), CUDA, 6), None)
    options: dict[str, Any] = {**rope(tokens), "q_norm_eps": EPS, "inverse_rope": True}
    KERNELS[kernel](args, **options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            captured = KERNELS[kernel](args, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for step in range(4):
        args[0].normal_()
        args[2].copy_(torch.randint(-1, 1024, args[2].shape, device=CUDA))
        args[3].fill_((128, 0, 65, 1)[step])
        args[10].fill_((512, 0, 1, 257)[step])
        options["positions"].add_(17)
        graph.replay()
        for got, want in zip(captured, KERNELS[kernel](args, **options), strict=True):
            assert torch.equal(got, want)
        assert_same(captured, reference(args, **options), FEW_KEYS, NORMED_LSE, turned=layout.ROPE_DIM)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("splits", [1, 2, 10])
@pytest.mark.parametrize("heads", [64, 128])
def test_queries_are_normed_and_rotated_inside(kernel: str, splits: int, heads: int) -> None:
    args = (*scenario.arguments(33, heads_of(kernel, heads), CUDA, 8), None)
    args[0].mul_(torch.logspace(-3, 3, 33, device=CUDA)[:, None, None])
    options = {**rope(33), "q_norm_eps": EPS}
    assert_same(KERNELS[kernel](args, splits, **options), reference(args, **options), lse=NORMED_LSE)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("splits", [1, 3])
def test_the_score_of_a_unit_key_is_the_rotated_query(kernel: str, splits: int) -> None:
    """Token t attends the unit vector of rotated dim t alone, so that its lse is that dim of its queries."""
    cache, row = layout.allocate_cache("fp8_ds_mla", 1, 64, device=CUDA), layout.FP8_DS_MLA.data
    cache[0, 64 * row :] = layout.UE8M0_BIAS
    units = torch.eye(64, device=CUDA).bfloat16().view(torch.uint8)
    cache[0, : 64 * row].view(64, row)[:, layout.NOPE_DIM :] = units
    q = torch.randn(64, heads_of(kernel, 64), 512, device=CUDA).bfloat16()
    lens = torch.ones(64, device=CUDA, dtype=torch.int32)
    slots, options = torch.arange(64, device=CUDA, dtype=torch.int32)[:, None], {**rope(64), "q_norm_eps": EPS}
    args = q, cache, slots, lens, 64, "fp8_ds_mla", 1.0, None, cache, slots[:, :0], lens, 64, None
    _, lse = KERNELS[kernel](args, splits, **options)
    angles = options["positions"], options["cos_sin_cache"]
    want = normed_by_a_factor(q, *angles) if kernel == "many" else REFERENCES["q_norm_rope"](q, *angles, EPS)
    want = torch.stack([want[t, :, layout.NOPE_DIM + t] for t in range(64)]).float()
    error = (lse - want).abs()
    # The sum of squares has a different order, which moves a few values to the neighbouring bfloat16.
    assert (error <= want.abs() / 127 + 1e-6).all()
    assert (error <= want.abs() * 1e-5 + 1e-6).float().mean() > 0.98


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("heads", [64, 128])
def test_outputs_are_rotated_back_as_by_inv_rope(kernel: str, splits: int, heads: int) -> None:
    args = on_gpu(sample(37, heads_of(kernel, heads), window=130, extra=517, fmt="fp8_ds_mla", **BF16))
    angles = rope(37)
    out, lse = KERNELS[kernel](args, splits)
    got = KERNELS[kernel](args, splits, **angles, inverse_rope=True)
    assert_bitwise(got[0], REFERENCES["inv_rope"](out, *angles.values()))
    assert_bitwise(got[1], lse)


@pytest.mark.parametrize("heads", [1, 8, 17, 32, 33, 100])
def test_prologue_and_epilogue_are_fused_for_any_number_of_heads(heads: int) -> None:
    args = (*scenario.arguments(21, heads, CUDA, heads), None)
    options = {**rope(21), "q_norm_eps": EPS, "inverse_rope": True}
    want = reference(args, **options)
    for splits in (1, 4):
        for kernel in kernels_for(heads):
            assert_same(kernel(args, splits, **options), want, lse=NORMED_LSE, turned=layout.ROPE_DIM)


@pytest.mark.parametrize("kernel", FOR_MANY)
def test_a_row_does_not_depend_on_its_batch(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = [*on_gpu(sample(300, heads_of(kernel, 64), window=128, extra=512, fmt="fp8_ds_mla", **BF16))]
    turn = rope(300)
    options: dict[str, Any] = {"q_norm_eps": EPS, "inverse_rope": True, "batch_invariant": True}
    want = KERNELS[kernel](tuple(args), **turn, **options)
    rows = (0, 2, 3, 9, 10)
    for some in (slice(7, 8), slice(100, 133), slice(0, 299)):
        rows_only = tuple(x[some] if i in rows else x for i, x in enumerate(args))
        one = {"positions": turn["positions"][some], "cos_sin_cache": turn["cos_sin_cache"]}
        for got, expected in zip(KERNELS[kernel](rows_only, **one, **options), want, strict=True):
            assert_bitwise(got, expected[some])
    monkeypatch.setattr(split_combine, "MAX_PARTIAL_BYTES", 2**24)
    for got, expected in zip(KERNELS[kernel](tuple(args), **turn, **options), want, strict=True):
        assert_bitwise(got, expected)
    assert_same(want, reference(tuple(args), **turn, **options), FEW_KEYS, NORMED_LSE, turned=layout.ROPE_DIM)


def rows_of_bfloat16(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a call with the same slots of other caches, of bfloat16 rows."""
    window, extra = (torch.randn(len(args[i]), args[j], 512, device=CUDA).bfloat16() for i, j in ((1, 4), (8, 11)))
    return (args[0], window, *args[2:5], "plain", *args[6:8], extra, *args[9:])


@triton.jit
def _late_copy_kernel(p_to, p_from, size, PDL: tl.constexpr, BLOCK: tl.constexpr):
    """Copy bytes, 30 us after the next kernel may have started."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    begin = tl.extra.cuda.globaltimer()
    now = begin
    while now - begin < 30_000:
        now = tl.extra.cuda.globaltimer()
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_to + o, tl.load(p_from + o, mask=o < size), mask=o < size)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("fmt", ["fp8_ds_mla", "plain"])
def test_late_results_of_the_previous_kernel_are_attended(kernel: str, fmt: str) -> None:
    args = (*scenario.arguments(3, heads_of(kernel, 64), CUDA, 4), None)
    if fmt == "plain":
        args = rows_of_bfloat16(args)
    options: dict[str, Any] = {**rope(3), "q_norm_eps": EPS, "inverse_rope": True}
    want, early = KERNELS[kernel](args, **options), supports_pdl(gpu_of(CUDA))
    for late in (args[0], args[2], args[3], args[9], args[10], args[1], options["positions"]):
        held = torch.empty(0, dtype=torch.uint8, device=CUDA).set_(late.untyped_storage())[: 1 << 20]
        fresh = held.clone()
        held.zero_()
        torch.cuda.synchronize()
        grid = (-(-len(held) // 4096),)
        _late_copy_kernel[grid](held, fresh, len(held), PDL=early, BLOCK=4096, **pdl_option(early))
        for got, expected in zip(KERNELS[kernel](args, **options), want, strict=True):
            assert_bitwise(got, expected)


def test_results_go_into_given_buffers() -> None:
    args = (*scenario.arguments(9, 64, CUDA, 1), None)
    options = {**rope(9), "q_norm_eps": EPS, "inverse_rope": True}
    want = torch.ops.dsv4.sparse_mla_decode(*args, **options)
    room = torch.zeros(9, 80, 512, device=CUDA).bfloat16(), torch.zeros(9, 80, device=CUDA)
    out, lse = room[0][:, 8:72], room[1][:, 8:72]
    torch.ops.dsv4.sparse_mla_decode_out(out, lse, *args, **options)
    assert_bitwise(out, want[0])
    assert_bitwise(lse, want[1])
    assert (room[0][:, :8] == 0).all() and (room[0][:, 72:] == 0).all()


def test_empty_batches() -> None:
    args = scenario.arguments(2, 64, CUDA, 0)
    out, lse = launcher("sparse_mla_decode")(args[0][:0], *args[1:])
    assert out.shape == (0, 64, 512) and lse.shape == (0, 64)
