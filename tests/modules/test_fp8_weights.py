"""Tests of layers with e4m3 weights against floating layers with the same weights dequantised."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from dsv4_compile.loading import load_attention
from dsv4_compile.modules import DeepseekV4Attention
from dsv4_compile.modules.linear import Fp8Linear
from tests.modules.engine import KINDS, Engine, our_layer
from tests.support import hf_layer

# q_lora_rank and hidden_size end in partial blocks. Every compressed entry is selected, because a rounded score that
# selects a different entry gives a correct result far away from the floating one.
DIMS = {**hf_layer.SMALL, "hidden_size": 200, "q_lora_rank": 160, "index_topk": 64}
STEPS = [150, 1, 3, 46]
ROUNDING = 6e-4
"""Mean square relative error of rounding to e4m3: neighbours are 2^-3 apart at the bottom of a binade, so it is
(2^-3)^2 / 12 over the mean square mantissa, 2.16 if mantissas are log-uniform. Power-of-two scales add nothing."""


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise to e4m3 with an e8m0 scale for each 128x128 block, the least power of two that keeps it in range."""
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    for i in range(0, weight.shape[0], 128):
        for j in range(0, weight.shape[1], 128):
            block = (slice(i, i + 128), slice(j, j + 128))
            scale = torch.exp2(torch.log2(weight[block].abs().max() / 448).ceil())
            values[block] = (weight[block] / scale).to(torch.float8_e4m3fn)
            scales[i // 128, j // 128] = scale
    return values, scales.to(torch.float8_e8m0fnu)


def twins(kind: str) -> tuple[DeepseekV4Attention, DeepseekV4Attention]:
    """Make an fp8 layer, and a float32 layer with exactly its weights."""
    source = our_layer(hf_layer.hf_attention(hf_layer.hf_config(kind, DIMS)), "float32", 256)
    tensors = dict(source.state_dict())
    fp8 = DeepseekV4Attention(
        source.config, 0, kv_cache_dtype="float32", fp8=True, dtype=torch.float32, max_seq_len=256
    )
    for name in [name for name, p in fp8.named_parameters() if p.dtype is torch.float8_e4m3fn]:
        # Rows of different magnitude, so that a scale applied to the wrong block shows.
        tensors[name] = tensors[name] * torch.exp2(torch.arange(len(tensors[name])) // 128 % 3 - 1.0)[:, None]
        tensors[name], tensors[name.replace("weight", "scale")] = quantized(tensors[name])
    load_attention(fp8, tensors)
    load_attention(source, tensors)
    return fp8, source


def run(layer: DeepseekV4Attention, hidden: Tensor) -> Tensor:
    """Run one sequence: a prefill past the first compressed HCA entry, then decodes and a chunk."""
    engine = Engine(layer, 1, 256)
    return torch.cat([engine.step([chunk])[0] for chunk in hidden.split(STEPS)])


@pytest.mark.parametrize("kind", KINDS)
def test_unquantised_inputs_give_the_floating_layer(kind: str) -> None:
    """Only wo_a is floating here, because its input is always quantised."""
    fp8, floating = twins(kind)
    fp8.wo_a = floating.wo_a
    linears = [module for module in fp8.modules() if isinstance(module, Fp8Linear)]
    assert len(linears) == (5 if kind == "csa" else 4)
    for module in linears:
        module.quantize_input = False
    hidden = torch.randn(sum(STEPS), DIMS["hidden_size"])
    torch.testing.assert_close(run(fp8, hidden), run(floating, hidden), atol=1e-5, rtol=1e-5)


def assert_roundings(actual: Tensor, expected: Tensor, count: int) -> None:
    """Assert the mean cosine of `count` roundings: independent relative errors of mean square e^2 give 1 - e^2 / 2.

    The factor of 1.5 in both directions covers mantissas that are not log-uniform.
    """
    lost = 1 - cosine_similarity(actual, expected, dim=-1).mean()
    assert count * ROUNDING / 2 / 1.5 < lost < count * ROUNDING / 2 * 1.5


@pytest.mark.parametrize("kind", KINDS)
def test_wo_a_costs_one_rounding(kind: str) -> None:
    fp8, floating = twins(kind)
    mixed = copy.deepcopy(floating)
    mixed.wo_a = fp8.wo_a
    hidden = torch.randn(sum(STEPS), DIMS["hidden_size"])
    assert_roundings(run(mixed, hidden), run(floating, hidden), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_layer_costs_six_roundings(kind: str) -> None:
    """Roundings at wo_b, at wo_a, in the values, and three in scores of unit variance: keys, wq_a and wq_b.

    An error in a score is a relative error of its softmax weight.
    """
    fp8, floating = twins(kind)
    hidden = torch.randn(sum(STEPS), DIMS["hidden_size"])
    assert_roundings(run(fp8, hidden), run(floating, hidden), 6)
