"""Calls of flash_mla and flashinfer: arguments and results."""

from __future__ import annotations

import random
import sys

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.testing import assert_bitwise, assert_close
from tests.attention_backends.fakes import FlashInfer, FlashMLA
from tests.attention_backends.systems import PHASES, Layer, Setup, case_of

PARTS = {"decode": 1, "prefill": 1, "mixed": 2}
"""Calls of a layer in each phase."""


@pytest.mark.parametrize("ratio", [1, 4, 128])
@pytest.mark.parametrize("phase", PHASES)
def test_flash_mla_gets_padded_heads_and_padded_index_rows(
    ratio: int, phase: str, flash_mla: FlashMLA, seed: int
) -> None:
    setup = Setup("FLASHMLA_SPARSE_DSV4", "fp8_ds_mla", ratio, phase, "library")
    case = case_of(random.Random(seed), setup)
    layer = Layer(setup, case)
    with torch.inference_mode():
        out = layer.module(*layer.arguments(case))
    assert_close(out, case.expected())
    assert flash_mla.calls == {"mixed": ["decode", "prefill"]}.get(phase, [phase])
    assert flash_mla.heads == [4] * PARTS[phase]


def test_flash_mla_gets_128_heads_for_65(flash_mla: FlashMLA, seed: int) -> None:
    setup = Setup("FLASHMLA_SPARSE_DSV4", "fp8_ds_mla", 128, "decode", "library")
    case = case_of(random.Random(seed), setup, heads=65)
    layer = Layer(setup, case)
    with torch.inference_mode():
        assert_close(layer.module(*layer.arguments(case)), case.expected())
    assert flash_mla.heads == [65]


@pytest.mark.parametrize("ratio", [1, 4, 128])
@pytest.mark.parametrize("phase", PHASES)
def test_flashinfer_gets_two_calls_with_offsets_from_zero(
    ratio: int, phase: str, flashinfer: FlashInfer, seed: int
) -> None:
    setup = Setup("FLASHINFER_MLA_SPARSE_DSV4", "bfloat16", ratio, phase, "library")
    case = case_of(random.Random(seed), setup)
    layer = Layer(setup, case)
    with torch.inference_mode():
        out = layer.module(*layer.arguments(case))
    assert_close(out, case.expected())
    assert sum(tokens for tokens, _ in flashinfer.calls) == case.batch.num_tokens
    assert len(flashinfer.calls) == PARTS[phase]
    assert flashinfer.heads == [4] * PARTS[phase]


@pytest.mark.parametrize("engine", ["dsv4", "library"])
def test_scales_of_e4m3_queries_and_caches_are_passed_as_floats(engine: str, flashinfer: FlashInfer, seed: int) -> None:
    setup = Setup("FLASHINFER_MLA_SPARSE_DSV4", "fp8", 4, "mixed", engine)
    case = case_of(random.Random(seed), setup)
    layer = Layer(setup, case)
    q_scale, kv_scale = 0.0078125, float(case.window_cache.kv_scale)
    layer.module.set_scales(q_scale, kv_scale)
    q, *others = layer.arguments(case)
    quantised = (q * layer.module.q_scale_inv).to(torch.float8_e4m3fn)
    case.q.copy_(quantised.float() * q_scale)
    with torch.inference_mode():
        out = layer.module(quantised, *others)
    assert out.dtype is torch.bfloat16
    assert_close(out, case.expected())
    assert layer.module.bmm1_scale == case.scale * q_scale * kv_scale
    assert layer.module.bmm2_scale == kv_scale
    assert len(flashinfer.calls) == (2 if engine == "library" else 0)


@pytest.mark.usefixtures("sizes_by_themselves", "flash_mla", "flashinfer")
@pytest.mark.parametrize(
    ("name", "kv_cache_dtype"), [("FLASHMLA_SPARSE_DSV4", "fp8_ds_mla"), ("FLASHINFER_MLA_SPARSE_DSV4", "bfloat16")]
)
def test_library_calls_are_nodes_of_one_graph(name: str, kv_cache_dtype: str, seed: int) -> None:
    rng, setup = random.Random(seed), Setup(name, kv_cache_dtype, engine="library")
    cases = [case_of(rng, setup) for _ in range(3)]
    layer = Layer(setup, cases[0])
    compiled = torch.compile(layer.module, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for number, case in enumerate(cases):
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                out = compiled(*layer.arguments(case))
            assert_bitwise(out, layer.module(*layer.arguments(case)))


@pytest.mark.usefixtures("flashinfer")
def test_flashinfer_raises_if_queries_and_caches_differ_in_dtype(seed: int) -> None:
    setup = Setup("FLASHINFER_MLA_SPARSE_DSV4", "fp8", 4, "decode", "library")
    case = case_of(random.Random(seed), setup)
    layer = Layer(setup, case)
    scale = layer.module.query_scale()
    assert scale is layer.module.q_scale
    with pytest.raises(InputError, match="bfloat16 queries with fp8 caches"):
        layer.module(*layer.arguments(case))
    *arguments, _ = layer.arguments(case)
    with pytest.raises(InputError, match="set_scales"):
        layer.module(*arguments, scale)


def test_old_flashinfer_raises_for_gaps_between_pages(
    flashinfer: FlashInfer, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    new = flashinfer.trtllm_batch_decode_sparse_mla_dsv4

    def old(
        *, query: Tensor, sinks: Tensor, cum_seq_lens_q: Tensor, max_q_len: int, out: Tensor, **rest: Tensor
    ) -> Tensor:
        return new(query=query, sinks=sinks, cum_seq_lens_q=cum_seq_lens_q, max_q_len=max_q_len, out=out, **rest)

    setup = Setup("FLASHINFER_MLA_SPARSE_DSV4", "bfloat16", 4, "mixed", "library")
    case = case_of(random.Random(seed), setup)
    layer = Layer(setup, case)
    q, window, extra, *others = layer.arguments(case)
    monkeypatch.setattr(sys.modules["flashinfer.mla"], new.__name__, old)
    with torch.inference_mode():
        with pytest.raises(InputError, match="sparse_indices_are_storage_offsets"):
            layer.module(q, window, extra, *others)
        assert_close(layer.module(q, window.contiguous(), extra.contiguous(), *others), case.expected())


def test_scales_are_for_fp8_caches_only(seed: int) -> None:
    setup = Setup("FLASHINFER_MLA_SPARSE_DSV4", "bfloat16", 1, "decode")
    layer = Layer(setup, case_of(random.Random(seed), setup))
    assert layer.module.query_scale() is None
    with pytest.raises(InputError, match="E201"):
        layer.module.set_scales(0.5, 1.0)
