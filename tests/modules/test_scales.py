"""Tests of a layer's per-tensor scales and of the workspace that a dummy run reserves."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from dsv4_compile.attention_backends.workspace import Workspace
from dsv4_compile.errors import InputError
from dsv4_compile.testing import assert_bitwise
from tests.modules.test_attention_backend import CONFIG, REQUESTS, Serving, layer_of, random_counts

E4M3 = 2.0**-4


def rows_of(cache: Tensor, scale: float) -> Tensor:
    return cache.view(torch.float8_e4m3fn).float() * scale if cache.dtype is torch.uint8 else cache.float()


@pytest.mark.parametrize("scale", [0.0625, 3.0])
@pytest.mark.parametrize("kind", ["csa", "hca"])
@pytest.mark.parametrize("name", ["DSV4_PAGED", "FLASHINFER_MLA_SPARSE_DSV4"])
def test_the_cache_scale_applies_to_every_write_and_read(name: str, kind: str, scale: float, seed: int) -> None:
    rng = random.Random(seed)
    plain = Serving(layer_of(kind, attention_backend=name, kv_cache_dtype="bfloat16", indexer_cache_dtype="bfloat16"))
    ours = Serving(layer_of(kind, attention_backend=name, kv_cache_dtype="fp8", indexer_cache_dtype="bfloat16"))
    ours.layer.attention.set_scales(1.0, scale)
    for counts in ([1, 1, 1, 1, 140, 140], random_counts(rng), [1] * REQUESTS):
        hidden = torch.randn(sum(counts), CONFIG.hidden_size).bfloat16()
        out, want = ours.step(counts, hidden), plain.step(counts, hidden)
    assert (out - want).norm() < 0.1 * want.norm()
    for cache in ("window", "entries"):
        got, exact = (serving.paged.layers[0].tensors().get(cache) for serving in (ours, plain))
        if exact is not None:
            assert exact.any()
            error = (rows_of(got, scale) - exact.float()).abs()
            assert (error <= E4M3 * exact.float().abs() + 2.0**-10 * scale).all()


def test_per_tensor_scales_raise_for_caches_with_their_own() -> None:
    ours = layer_of("swa", attention_backend="FLASHMLA_SPARSE_DSV4", kv_cache_dtype="fp8_ds_mla").attention
    ours.set_scales(1.0, 1.0)
    assert ours.cache_scale() is None
    with pytest.raises(InputError, match="its cache formats store their own scales"):
        ours.set_scales(1.0, 2.0)
    with pytest.raises(InputError, match="it does not quantise queries"):
        layer_of("swa", attention_backend="DSV4_PAGED", kv_cache_dtype="fp8").attention.set_scales(2.0, 1.0)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-42, 1e38])
def test_invalid_scales_raise_before_anything_changes(scale: float) -> None:
    ours = layer_of("swa", attention_backend="FLASHINFER_MLA_SPARSE_DSV4", kv_cache_dtype="fp8").attention
    ours.set_scales(1.0, 2.0)
    for name, scales in (("q_scale", (scale, 1.0)), ("kv_scale", (1.0, scale))):
        with pytest.raises(InputError, match=rf"(?s)E201.*positive and finite.*{name}="):
            ours.set_scales(*scales)
    assert ours.kv_scale.item() == ours.bmm2_scale == 2.0


@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
def test_dummy_run_reserves_the_workspace_of_the_largest_prefill(kind: str, seed: int) -> None:
    rng, workspace = random.Random(seed), Workspace()
    options = {"attention_backend": "FLASHMLA_SPARSE_DSV4", "kv_cache_dtype": "fp8_ds_mla"}
    layer, plain = layer_of(kind, workspace=workspace, **options), Serving(layer_of(kind, **options))
    with torch.inference_mode():
        out = layer.dummy_run(torch.randn(7, CONFIG.hidden_size).bfloat16())
    assert (out.shape, out.dtype) == ((7, CONFIG.hidden_size), torch.bfloat16) and not out.any()
    workspace.lock()
    ours, reserved = Serving(layer), workspace.nbytes
    for _ in range(3):
        counts = random_counts(rng)
        hidden = torch.randn(sum(counts), CONFIG.hidden_size).bfloat16()
        assert_bitwise(ours.step(counts, hidden), plain.step(counts, hidden))
    assert workspace.nbytes == reserved > 0


def test_a_locked_workspace_without_a_reservation_raises() -> None:
    workspace = Workspace()
    workspace.lock()
    options = {"attention_backend": "FLASHMLA_SPARSE_DSV4", "kv_cache_dtype": "fp8_ds_mla"}
    serving = Serving(layer_of("swa", workspace=workspace, **options))
    with pytest.raises(InputError, match="E204"):
        serving.step([9] * REQUESTS, torch.randn(9 * REQUESTS, CONFIG.hidden_size).bfloat16())


def test_dummy_run_of_a_paged_layer_needs_no_workspace() -> None:
    with torch.inference_mode():
        assert not layer_of("csa").dummy_run(torch.randn(3, CONFIG.hidden_size).bfloat16()).any()
