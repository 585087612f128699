"""Tests of convert() on models with transformers' FP8 modules as attention linears."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import FP8GroupedLinear, FP8Linear

from dsv4_compile import hf
from dsv4_compile.hf.tiny import tiny_model
from dsv4_compile.modules.linear import Fp8Linear
from tests.support import hf_layer

LINEARS = ("q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj", "compressor.indexer.q_b_proj")
"""Weights that published checkpoints store in e4m3. The compressors and the indexer's weights_proj are floating."""
# hidden_size and q_lora_rank end in partial blocks of 128.
DIMS = {"hidden_size": 160, "q_lora_rank": 144}


def quantize(linear: Any, scale_format: str) -> tuple[FP8Linear, Tensor]:
    """Return transformers' fp8 module for a linear, and its weight dequantised."""
    rows, columns = linear.weight.shape
    settings: dict[str, Any] = {"block_size": (128, 128), "scale_fmt": scale_format}
    if hasattr(linear, "n_groups"):
        module = FP8GroupedLinear(columns, rows, linear.n_groups, **settings)
    else:
        module = FP8Linear(columns, rows, **settings)
    dequantized = torch.empty(rows, columns)
    with torch.no_grad():
        for i in range(-(-rows // 128)):
            for j in range(-(-columns // 128)):
                block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
                scale = 2.0 ** -(5 + (i + 2 * j) % 3)
                module.weight[block] = (linear.weight[block] / scale).to(torch.float8_e4m3fn)
                module.weight_scale_inv[i, j] = scale
                dequantized[block] = module.weight[block].float() * scale
    return module, dequantized


def twins(linears: tuple[str, ...] = LINEARS, scale_format: str = "ue8m0", **overrides: Any) -> tuple[Any, Any]:
    """Make a model with the given attention linears in fp8, and a floating model with the same weights dequantised."""
    fp8 = tiny_model(**DIMS, **overrides)
    floating = copy.deepcopy(fp8)
    for layer, other in zip(fp8.model.layers, floating.model.layers, strict=True):
        for path in linears:
            if path in dict(layer.self_attn.named_modules()):
                module, weight = quantize(layer.self_attn.get_submodule(path), scale_format)
                layer.self_attn.set_submodule(path, module)
                other.self_attn.get_submodule(path).weight.data = weight
    return fp8, floating


def convert(model: Any) -> Any:
    return hf.convert(model, max_batch_size=2, max_seq_len=256)


def fp8_linears(model: Any) -> list[Fp8Linear]:
    attentions = [layer.self_attn.dsv4 for layer in model.model.layers]
    return [m for attention in attentions for m in attention.modules() if isinstance(m, Fp8Linear)]


@pytest.mark.parametrize("scale_format", ["ue8m0", "float"])
def test_fp8_weights_equal_the_dequantised_model(scale_format: str) -> None:
    """Inputs are not quantised here. The grouped projection is floating, because its input always is."""
    fp8, floating = twins(tuple(name for name in LINEARS if name != "o_a_proj"), scale_format)
    ids = torch.randint(0, 512, (2, 140))
    expected = convert(floating)(ids).logits
    linears = fp8_linears(convert(fp8))
    assert len(linears) == 4 * 4 + 2
    for module in linears:
        module.quantize_input = False
    torch.testing.assert_close(fp8(ids).logits, expected, atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("kind", hf_layer.LAYER_TYPES.values())
def test_quantised_inputs_cost_six_roundings(kind: str) -> None:
    """The cosine loses half of 6 x 6e-4, within a factor of 1.5; see tests/modules/test_fp8_weights.py.

    The indexer selects all entries, so that rounding changes no selection.
    """
    outputs, hidden = [], torch.randn(1, 140, DIMS["hidden_size"])
    for model in twins(num_hidden_layers=1, layer_types=[kind], index_topk=64):
        attention = convert(model).model.layers[0].self_attn
        assert all(module.quantize_input for module in fp8_linears(model))
        cache = hf.new_cache(model)
        outputs.append(attention(hidden, metadata=cache.begin_step(1, 140, None), caches=cache.paged.layers)[0])
    lost = 1 - torch.nn.functional.cosine_similarity(*outputs, dim=-1).mean()
    assert 6 * 6e-4 / 2 / 1.5 < lost < 6 * 6e-4 / 2 * 1.5


def test_float32_and_e8m0_scales_give_equal_results() -> None:
    ids = torch.randint(0, 512, (1, 40))
    logits = [convert(twins(scale_format=name)[0])(ids).logits for name in ("ue8m0", "float")]
    assert torch.equal(*logits)


def test_weights_and_scales_are_shared_and_reverted() -> None:
    model, _ = twins()
    before = {name: id(p) for name, p in model.named_parameters()}
    convert(model)
    for layer in model.model.layers:
        ours = {id(p) for p in layer.self_attn.dsv4.parameters()}
        assert ours == {id(p) for p in layer.self_attn.parameters()}
    hf.revert(model)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert type(model.model.layers[0].self_attn.q_a_proj) is FP8Linear


def test_generation_compiles_into_one_graph() -> None:
    model = convert(twins(num_hidden_layers=1, layer_types=["compressed_sparse_attention"])[0])
    ids = torch.randint(0, 512, (2, 9))
    expected = model.generate(ids, max_new_tokens=3, do_sample=False)
    model.compile(fullgraph=True, backend="aot_eager")
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), expected)


def set_parameter(path: str, value: Callable[[Any], Tensor]) -> Callable[[Any], None]:
    def change(attention: Any) -> None:
        owner, _, leaf = path.rpartition(".")
        module = attention.get_submodule(owner)
        setattr(module, leaf, nn.Parameter(value(module), requires_grad=False))

    return change


UNSUPPORTED: dict[str, tuple[Callable[[Any], None], str]] = {
    "per-tensor": (set_parameter("kv_proj.weight_scale_inv", lambda _: torch.tensor(1.0)), "kv_proj.weight_scale_inv"),
    "blocks-of-32": (set_parameter("kv_proj.weight_scale_inv", lambda _: torch.ones(2, 5)), "kv_proj.weight_scale_inv"),
    "static-inputs": (set_parameter("o_b_proj.activation_scale", lambda _: torch.tensor(1.0)), "activation_scale"),
    "bias": (set_parameter("q_b_proj.bias", lambda m: torch.zeros(len(m.weight))), "q_b_proj.bias"),
    "no-scale": (lambda a: a.q_a_proj.register_parameter("weight_scale_inv", None), "q_a_proj.weight_scale_inv"),
    "compressor": (
        set_parameter("compressor.kv_proj.weight", lambda m: m.weight.to(torch.float8_e4m3fn)),
        "compressor.kv_proj.weight",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_fp8_layers_raise_and_leave_the_model_unchanged(case: str) -> None:
    change, name = UNSUPPORTED[case]
    model, _ = twins()
    change(model.model.layers[1].self_attn)
    types = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=rf"E207(.|\n)*{re.escape(name)}"):
        convert(model)
    assert [type(module) for module in model.modules()] == types
