"""The fused preprocessing that quantises its latents, in the checking interpreter; compiled for every GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher, refusal
from dsv4_compile.reference.common.block_scale import quantize_rows
from dsv4_compile.testing import assert_bitwise, padded, poisoned_empty, strided
from tests.kernels.gpus import begins_early, sees, shared_out
from tests.kernels.preprocess.test_preprocess_insert import MUTATED, history
from tests.kernels.preprocess.test_preprocess_insert_compiles import model_arguments
from tests.ops.preprocess.preprocess_layer import CACHES, PADDING, Layer, storage, with_copied_caches
from tests.ops.preprocess.test_preprocess_insert import STEP
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
RATIOS = {"swa": 0, "hca": 128, "csa": 4}
KIND = pytest.mark.parametrize("kind", RATIOS)
WRITTEN = (*MUTATED, "latents.p_scale")


def step(kind: str, tokens: list[tuple[int, int]] | None = None, **options: Any) -> dict[str, Any]:
    model = Layer(RATIOS[kind], **{"requests": 3, "dtype": torch.bfloat16, "latent": 300, **options})
    history(model)
    tokens = STEP if tokens is None else tokens
    return model.arguments(tokens, model.projection(len(tokens)))


def check(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Bit for bit the quantisation of the latents that the kernel gives otherwise, and the same caches."""
    ours, theirs = with_copied_caches(given), with_copied_caches(given)
    with poisoned_empty(), checked(mutated=WRITTEN) as launched:
        got = launcher("preprocess_insert_quant")(**ours)
    assert launched == ["preprocess_insert_kernel"] * bool(len(ours["positions"]))
    with poisoned_empty():
        want = quantize_rows(launcher("preprocess_insert")(**theirs))
    expected = REFERENCES["preprocess_insert_quant"](**with_copied_caches(given))
    for a, b, c in zip(got, want, expected, strict=True):
        assert_bitwise(a, b)
        assert (a.shape, a.stride(), a.dtype) == (c.shape, c.stride(), c.dtype)
    for name in CACHES:
        if name in ours:
            assert_bitwise(storage(ours[name]), storage(theirs[name]), label=name)
    return got


@interpreted
@KIND
@pytest.mark.parametrize(
    "options", [{}, {"dtype": torch.float32, "rounded": torch.bfloat16}, {"latent": 24}, {"latent": 256}], ids=str
)
def test_latents_are_quantised_where_they_are_normed(kind: str, options: dict[str, Any]) -> None:
    check(step(kind, **options))


@interpreted
@KIND
@pytest.mark.parametrize("tokens", [[], [(0, 127)], [PADDING]])
def test_no_token_and_one(kind: str, tokens: list[tuple[int, int]]) -> None:
    check(step(kind, tokens))


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
def test_any_strides(spread: Any) -> None:
    arguments = step("swa")
    check({n: spread(x) if isinstance(x, Tensor) and n not in CACHES else x for n, x in arguments.items()})


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_latents_of_16_bits_are_rounded_to_them_first(dtype: torch.dtype) -> None:
    arguments = step("swa", dtype=torch.float32)
    check(arguments | {"qr": arguments["qr"].to(dtype), "kv": arguments["kv"].to(dtype)})


@interpreted
def test_a_row_of_zeros_or_nan_keeps_to_itself() -> None:
    arguments = step("swa")
    arguments["qr"] = arguments["qr"].clone()
    arguments["qr"][1], arguments["qr"][2, 7] = 0, torch.nan
    values, scale = check(arguments)
    assert not values[1].float().any()
    assert values[2].float().isnan().all() and (scale[2] == 2.0**127).all()
    assert values[3:].float().isfinite().all()


def test_what_is_unsupported_without_quantisation_is_unsupported_with_it() -> None:
    arguments = step("swa")
    why_unsupported = refusal("preprocess_insert_quant")
    assert why_unsupported is not None and why_unsupported(**arguments) == ""
    assert "latents have 5000" in why_unsupported(**arguments | {"qr": torch.empty(1, 5000)})


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    early = sees(monkeypatch, target)
    with compiled_for(target) as compiled:
        for ratio in shared_out((0, 128))[target]:
            launcher("preprocess_insert_quant")(**model_arguments(ratio=ratio, tokens=3))
    assert len(compiled) == len(shared_out((0, 128))[target])
    assert all(binary.assembled and begins_early(binary) == early for binary in compiled)
