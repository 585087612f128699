"""`preprocess_insert_quant`: what `preprocess_insert` does, and its latents quantised for the next product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.ops.linear.fp8_grouped_einsum import fp8_grouped_einsum
from dsv4_compile.ops.linear.fp8_linear import fp8_linear
from dsv4_compile.ops.preprocess.preprocess_insert import preprocess_insert, preprocess_insert_quant
from dsv4_compile.testing import assert_bitwise, check_op, refuse_synchronization
from tests.ops.linear.test_fp8_grouped_einsum_quant import scalar_quantised
from tests.ops.preprocess.preprocess_layer import CACHES, PADDING, Layer, storage, with_copied_caches
from tests.ops.preprocess.test_preprocess_insert import STEP, positional

RATIOS = {"swa": 0, "hca": 128, "csa": 4}
KIND = pytest.mark.parametrize("kind", RATIOS)


def arguments(kind: str, tokens: list[tuple[int, int]] | None = None, **options: Any) -> dict[str, Any]:
    """Of a step, in bfloat16 if not told otherwise."""
    model = Layer(RATIOS[kind], **{"requests": 3, "dtype": torch.bfloat16, "latent": 300, **options})
    tokens = STEP if tokens is None else tokens
    return model.arguments(tokens, model.projection(len(tokens)))


def both(given: dict[str, Any]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The op, and the one that does not quantise; their caches are equal."""
    ours, theirs = with_copied_caches(given), with_copied_caches(given)
    got, want = preprocess_insert_quant(**ours), preprocess_insert(**theirs)
    for name in CACHES:
        if name in ours:
            assert_bitwise(storage(ours[name]), storage(theirs[name]), label=name)
    return got, want


@KIND
@pytest.mark.parametrize("options", [{}, {"dtype": torch.float32}, {"latent": 24}, {"latent": 384}], ids=str)
def test_latents_are_quantised_strip_by_strip(kind: str, options: dict[str, Any]) -> None:
    (values, scale), latents = both(arguments(kind, **options))
    codes, scales = scalar_quantised(latents)
    assert_bitwise(values.view(torch.uint8), codes[:, None])
    assert_bitwise(scale, scales[:, None])
    count = scales.shape[1]
    assert values.is_contiguous() and scale.stride() == (1, count * len(STEP), len(STEP))


@KIND
@pytest.mark.parametrize("tokens", [[], [(0, 127)], [PADDING]])
def test_no_token_and_one(kind: str, tokens: list[tuple[int, int]]) -> None:
    (values, scale), latents = both(arguments(kind, tokens))
    assert values.shape == (len(latents), 1, 300) and scale.shape == (len(latents), 1, 3)


def test_the_next_product_takes_it_as_it_is() -> None:
    """An identity multiplies without a sum."""
    call = arguments("swa", latent=256)
    (values, scale), latents = both(call)
    eye, ones = torch.eye(256).to(torch.float8_e4m3fn), torch.ones(2, 2)
    assert_bitwise(fp8_grouped_einsum(values, scale, eye, ones).squeeze(1), fp8_linear(latents, eye, ones))


def test_rows_of_zeros_and_of_nan_keep_to_themselves() -> None:
    call = arguments("swa")
    call["qr"] = call["qr"].clone()
    call["qr"][1], call["qr"][2, 7] = 0, torch.nan
    (values, scale), _ = both(call)
    assert not values[1].float().any() and scale[1].max() < 1e-9
    assert values[2].float().isnan().all() and (scale[2] == 2.0**127).all()
    assert values[3:].float().isfinite().all()


@KIND
def test_it_waits_for_no_device(kind: str) -> None:
    call = with_copied_caches(arguments(kind))
    with refuse_synchronization():
        preprocess_insert_quant(**call)


@KIND
def test_op_keeps_its_promises(kind: str) -> None:
    check_op(preprocess_insert_quant, [positional(arguments(kind))])
    few = [positional(arguments(kind, tokens)) for tokens in ([], [(0, 127)])]
    check_op(preprocess_insert_quant, few, utilities=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_score": None}, "compressor without its kv_score"),
        ({"ratio": 0}, "preprocess_insert_quant: ratio 0"),
        ({"token_to_req": torch.zeros(17)}, "preprocess_insert_quant: token_to_req"),
        ({"qr": torch.zeros(3, 300)}, "qr and kv have the same tokens"),
    ],
)
def test_wrong_arguments_are_refused_in_its_own_name(change: dict[str, Any], message: str) -> None:
    call = arguments("csa")
    before = with_copied_caches(call)
    with pytest.raises(InputError, match=message):
        preprocess_insert_quant(**{**call, **change})
    for name in CACHES:
        assert_bitwise(storage(call[name]), storage(before[name]), label=name)
