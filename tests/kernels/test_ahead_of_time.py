"""Launchers compile for a GPU that is not there, and leave no trace of it."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from dsv4_compile.kernels.host.gpu import sm90_module
from dsv4_compile.kernels.host.launch import launch_kernel
from tests.kernels.gpus import GPUS, shared_out
from tests.support.fake_triton import TARGETS, compiled_for, machine_code


@triton.jit
def double_kernel(out, x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


def launch(x: torch.Tensor, warps: int) -> None:
    double_kernel[(1,)](torch.empty_like(x), x, x.numel(), BLOCK=256, num_warps=warps)


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_compiled_is_what_would_be_launched(target: str) -> None:
    with compiled_for(TARGETS[target]) as compiled:
        launch(torch.zeros(256), 4)
        launch(torch.zeros(256, dtype=torch.int32), 8)
    assert [kernel.metadata.num_warps for kernel in compiled] == [4, 8]
    assert all(kernel.metadata.target == TARGETS[target] for kernel in compiled)
    assert len({machine_code(kernel) for kernel in compiled}) == 2


def test_nothing_stays_installed() -> None:
    before = triton.runtime.driver._active
    with compiled_for(TARGETS["sm_90"]):
        launch(torch.zeros(16), 1)
    assert triton.runtime.driver._active is before
    assert not double_kernel.device_caches


@pytest.mark.parametrize("count", range(1, 8))
def test_every_variant_is_compiled_for_one_target_and_every_target_compiles_one(count: int) -> None:
    variants = list(range(count))
    shares = shared_out(variants)
    assert shares.keys() == TARGETS.keys() and all(shares.values())
    assert shares["sm_90"] == variants
    assert shares["sm_120"] == variants[1:2] or count == 1


@pytest.mark.parametrize("target", TARGETS)
def test_no_setting_of_tritons_decides_whether_products_and_sums_are_fused(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.knobs.language, "default_fp_fusion", False)
    x = torch.zeros(256)
    with compiled_for(TARGETS[target]) as compiled:
        for options in ({}, {"enable_fp_fusion": False}):
            launch_kernel(double_kernel, (1,), torch.empty_like(x), x, 256, BLOCK=256, num_warps=4, **options)
    assert [kernel.metadata.enable_fp_fusion for kernel in compiled] == [True, False]


@pytest.mark.parametrize(
    ("version", "known"), [("3.5.1", False), ("3.6.0", True), ("3.9.2+git1", True), ("3.10.0", False), ("4.0.0", False)]
)
def test_a_triton_that_was_not_tried_compiles_no_kernel_for_hopper(
    version: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    module = sm90_module.__wrapped__(GPUS["sm_90"][0], "attention.sparse_mla_prefill_sm90")
    assert (module is not None) == known
    assert sm90_module.__wrapped__(GPUS["sm_100"][0], "attention.sparse_mla_prefill_sm90") is None
