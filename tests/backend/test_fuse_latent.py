"""Fusion of preprocessing with the quantization of its latents; results equal those of the unfused graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.passes import fusion
from dsv4_compile.selection import proven
from dsv4_compile.testing import assert_bitwise
from tests.backend.functional import Fused, fused
from tests.ops.preprocess.preprocess_layer import CACHES, Layer, with_copied_caches
from tests.ops.preprocess.test_preprocess_insert import STEP

FIRST, SECOND, INTO, GEMM = "preprocess_insert", "fp8_linear", "preprocess_insert_quant", "fp8_grouped_einsum"
UNFUSED, FUSED = {FIRST: 1, SECOND: 1}, {INTO: 1, GEMM: 1}
LATENT = 256
ops: Any = torch.ops.dsv4
Body = Callable[[dict[str, Any]], Tensor]


class Latents:
    """A layer's preprocessing, and the integer weights that read its latents."""

    def __init__(self, ratio: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        self.layer = Layer(ratio, requests=3, dtype=dtype, latent=LATENT)
        self.weight, self.other = (torch.randint(-1, 2, (rows, LATENT)).to(torch.float8_e4m3fn) for rows in (130, 96))
        self.scale = torch.full((2, 2), 127, dtype=torch.uint8)

    def given(self, tokens: list[tuple[int, int]] | None = None) -> dict[str, Any]:
        tokens = STEP if tokens is None else tokens
        return self.layer.arguments(tokens, self.layer.projection(len(tokens)))

    def wq_b(self, latents: Tensor, *options: Any) -> Tensor:
        out: Tensor = ops.fp8_linear(latents, self.weight, self.scale, *options)
        return out

    def indexer(self, latents: Tensor) -> Tensor:
        out: Tensor = ops.fp8_linear(latents, self.other, self.scale[:1].float().exp2() * 2.0**-127)
        return out

    def whole(self, given: dict[str, Any]) -> Tensor:
        return self.wq_b(ops.preprocess_insert(**given)) * 2


def compare(latents: Latents, body: Body, options: dict[str, Any] | None = None) -> Fused:
    """Compare results and caches with those of the unfused graph."""
    with torch.no_grad():
        arguments = latents.given()
        ours, theirs = with_copied_caches(arguments), with_copied_caches(arguments)
        result = fused(body, options)
        # A GEMM with a batch of one may sum in a different order, and the normalized values are not integers.
        torch.testing.assert_close(result.call(ours), body(theirs), rtol=2.0**-7, atol=2.0**-6)
        for name in CACHES:
            if name in ours:
                assert_bitwise(ours[name], theirs[name], label=name)
    return result


@pytest.mark.parametrize("ratio", [0, 128, 4])
def test_preprocessing_quantizes_for_the_gemm_after_it(ratio: int) -> None:
    latents = Latents(ratio)
    result = compare(latents, latents.whole)
    assert result.ops == FUSED
    (fusion,) = result.fusions
    assert (fusion.by, fusion.ops, fusion.into, fusion.fused) == ("fuse_latent", (FIRST, SECOND), INTO, True)


def test_two_gemms_read_the_same_quantized_latents() -> None:
    latents = Latents()

    def body(given: dict[str, Any]) -> Tensor:
        qr = ops.preprocess_insert(**given)
        return torch.cat((latents.wq_b(qr), latents.indexer(qr)), 1)

    assert compare(latents, body).ops == {INTO: 1, GEMM: 2}


def test_reads_of_the_caches_after_the_fused_op_see_its_writes() -> None:
    latents = Latents(4)

    def body(given: dict[str, Any]) -> Tensor:
        return latents.whole(given) + given["window_cache"].nansum() + given["indexer_cache"].nansum()

    assert compare(latents, body).ops == FUSED


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (
            lambda latents, qr: latents.wq_b(qr) + qr.sum(1)[:, None],
            "the result of preprocess_insert is also used by aten.sum.dim_IntList",
        ),
        (lambda latents, qr: latents.wq_b(qr) + latents.wq_b(qr, False), "one fp8_linear does not quantize its input"),
        (
            lambda latents, qr: latents.wq_b(qr, True, torch.ones(8, LATENT).bfloat16()),
            "fp8_linear has a second layer (beside=), whose input is not quantized",
        ),
    ],
)
def test_latents_with_users_that_do_not_quantize_are_not_fused(
    second: Callable[[Latents, Tensor], Tensor], reason: str
) -> None:
    latents = Latents()
    result = compare(latents, lambda given: second(latents, ops.preprocess_insert(**given)))
    assert INTO not in result.ops and result.reasons == [reason]


def test_gemms_that_return_another_dtype_are_not_fused() -> None:
    latents = Latents(dtype=torch.float32)
    result = compare(latents, latents.whole)
    assert result.ops == UNFUSED
    assert result.reasons == ["fp8_grouped_einsum returns bfloat16, fp8_linear torch.float32"]


@pytest.mark.parametrize(
    "second",
    [
        lambda latents, qr: latents.wq_b(qr, False),
        lambda latents, qr: latents.wq_b(qr * 2),
        lambda latents, qr: qr @ latents.weight.bfloat16().t(),
    ],
)
def test_latents_that_are_not_quantized_are_no_candidate(second: Callable[[Latents, Tensor], Tensor]) -> None:
    latents = Latents()
    result = compare(latents, lambda given: second(latents, ops.preprocess_insert(**given)))
    assert INTO not in result.ops and not result.fusions


@pytest.fixture
def kernels() -> Iterator[None]:
    """Register the references of the ops as CPU kernels, proven on every GPU."""
    library = torch.library.Library("dsv4", "IMPL")
    for name in (FIRST, SECOND, INTO, GEMM):
        library.impl(name, REFERENCES[name], "CPU")
    with proven.trust():
        yield
    library._destroy()


@pytest.mark.parametrize(
    ("options", "fuses"),
    [
        ({}, True),
        ({"dsv4.fuse.fuse_latent": "off"}, False),
        ({"dsv4.fuse": "off"}, False),
        ({"dsv4.impl.fp8_linear": "triton"}, False),
        ({"dsv4.impl.fp8_grouped_einsum": "eager"}, False),
        ({"dsv4.impl.preprocess_insert_quant": "eager"}, False),
    ],
)
@pytest.mark.parametrize("architecture", ["cuda sm_90", "cuda sm_100", "cuda gfx942"])
def test_auto_fuses_if_the_kernels_would_run_and_no_op_is_demanded(
    kernels: None, monkeypatch: pytest.MonkeyPatch, architecture: str, options: dict[str, str], fuses: bool
) -> None:
    gpu = {"device": torch.device("cuda"), "codegen": "triton", "architecture": architecture}
    describe = fusion.describe
    monkeypatch.setattr(fusion, "describe", lambda *args: dataclasses.replace(describe(*args), **gpu))
    latents = Latents()
    assert compare(latents, latents.whole, options).ops == (FUSED if fuses else UNFUSED)


def test_auto_does_not_fuse_into_an_op_that_would_run_its_reference() -> None:
    latents = Latents()
    result = compare(latents, latents.whole, {})
    assert result.ops == UNFUSED
    assert [reason.partition(": ")[0] for reason in result.reasons] == [f"{INTO} would run its reference"]


def test_one_graph_serves_every_token_count() -> None:
    latents = Latents()
    result = fused(latents.whole)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (5, 3, 40):
            arguments = latents.given([(0, p) for p in range(tokens)])
            ours, theirs = with_copied_caches(arguments), with_copied_caches(arguments)
            for call in (ours, theirs):
                for name in ("qr", "kv", "positions", "token_to_req", "window_slot_mapping"):
                    torch._dynamo.mark_dynamic(call[name], 0)
            torch.testing.assert_close(result.call(ours), latents.whole(theirs), rtol=2.0**-7, atol=2.0**-6)
            assert result.ops == FUSED
