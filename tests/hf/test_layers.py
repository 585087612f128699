"""Tests of convert(attention_only=False): experts, routers, hyper-connections and norms as ops."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeepseekV4ForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear

from dsv4_compile import hf
from dsv4_compile.hf.model import expected_modules as expected
from dsv4_compile.hf.model import layers
from dsv4_compile.hf.tiny import tiny_model
from dsv4_compile.reference.moe.expert_weights import dequantize_expert
from tests.hf.small import (
    LAYERS,
    assert_records_what_eager_records,
    close,
    eager_logits,
    logits,
    quantise_at_random,
    random_ids,
)

SIZES: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 256, "attention_only": False}


ONE_LAYER = LAYERS | {"num_hidden_layers": 1, "layer_types": LAYERS["layer_types"][:1], "moe_intermediate_size": 128}


def convert(model: Any, **options: Any) -> Any:
    return hf.convert(model, **SIZES | options)


@pytest.fixture
def converted() -> Any:
    return convert(tiny_model(**LAYERS))


def test_logits_and_tokens_are_those_of_transformers(original: Any, converted: Any) -> None:
    kinds = {type(module) for module in converted.modules()}
    assert kinds >= set(layers.SWAPS.values())
    ids = random_ids(2, 70)
    close(logits(converted, ids), eager_logits(original, ids))
    options = {"do_sample": False, "max_new_tokens": 40, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(converted.generate(ids, **options), original.generate(ids, **options))


def test_what_is_recorded_is_that_of_transformers(original: Any, converted: Any) -> None:
    assert_records_what_eager_records(converted, original)


def test_a_compiled_model_has_a_boundary_between_sub_layers(original: Any, converted: Any) -> None:
    options = {f"dsv4.impl.{op}": "eager" for op in ("mhc_pre", "mhc_post", "mhc_boundary", "mhc_head", "moe_experts")}
    converted.compile(fullgraph=True, backend="dsv4", options=options | {"fallback_by_default": True})
    ids = random_ids(2, 40)
    close(logits(converted, ids), eager_logits(original, ids))


REPLACED = (
    "model.layers.0.mlp.experts.gate_up_proj",
    "model.layers.1.mlp.shared_experts.gate_proj.weight",
    "model.layers.1.mlp.shared_experts.up_proj.weight",
    "model.layers.0.mlp.shared_experts.down_proj.weight",
    "model.layers.1.mlp.gate.weight",
    "model.layers.0.attn_hc.fn",
    "model.layers.1.post_attention_layernorm.weight",
    "model.norm.weight",
    "model.hc_head.hc_base",
)


@pytest.mark.parametrize("name", REPLACED)
def test_a_weight_that_is_replaced_is_used(original: Any, converted: Any, name: str) -> None:
    ids, other = random_ids(1, 12), copy.deepcopy(original)
    logits(converted, ids)
    value = original.get_parameter(name).data + torch.randn(original.get_parameter(name).shape) / 2
    path, _, leaf = name.rpartition(".")
    for model in (converted, other):
        setattr(model.get_submodule(path), leaf, nn.Parameter(value.clone()))
    want = eager_logits(other, ids)
    assert (want - eager_logits(original, ids)).abs().max() > 1e-3
    close(logits(converted, ids), want)
    converted.get_parameter(name).data.mul_(-1)
    other.get_parameter(name).data.mul_(-1)
    close(logits(converted, ids), eager_logits(other, ids))
    copied = copy.deepcopy(converted)
    close(logits(copied, ids), eager_logits(other, ids))


@pytest.mark.parametrize("path", [*(f"model.layers.1.{path}" for path in expected.READ), "model.norm"])
def test_hooks_of_modules_that_are_not_called_are_refused(path: str) -> None:
    model = tiny_model(**LAYERS)
    handle = model.get_submodule(path).register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match="E208"):
        convert(model)
    handle.remove()
    convert(model)
    model.get_submodule(path).register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match="E208"):
        model(random_ids(1, 3))


def test_hooks_of_modules_that_are_called_run(converted: Any) -> None:
    ran: list[str] = []
    for path in ("mlp", "mlp.gate", "self_attn", ""):
        module = converted.get_submodule(f"model.layers.1.{path}".rstrip("."))
        module.register_forward_hook(lambda *args, path=path: ran.append(path))
    converted(random_ids(1, 3))
    assert ran == ["self_attn", "mlp.gate", "mlp", ""]


def test_state_dict_save_and_revert_are_those_of_the_original(original: Any, converted: Any, tmp_path: Path) -> None:
    ids = random_ids(1, 9)
    want = eager_logits(original, ids)
    assert list(converted.state_dict()) == list(original.state_dict())
    converted.save_pretrained(tmp_path)
    close(logits(DeepseekV4ForCausalLM.from_pretrained(tmp_path).eval(), ids, use_cache=False), want)
    converted.load_state_dict(original.state_dict(), assign=True)
    close(logits(converted, ids), want)
    hf.revert(converted)
    assert {type(module) for module in converted.modules()} == {type(module) for module in original.modules()}
    assert torch.equal(eager_logits(converted, ids), want)


def test_bfloat16_is_as_close_to_float32_as_eager_bfloat16() -> None:
    ids = random_ids(2, 60)
    want = eager_logits(tiny_model(**LAYERS), ids)
    eager = (eager_logits(tiny_model(**LAYERS, dtype=torch.bfloat16), ids).float() - want).norm()
    ours = (logits(convert(tiny_model(**LAYERS)).bfloat16(), ids).float() - want).norm()
    assert ours < 1.3 * eager


def _quantized(model: Any, kind: str) -> tuple[Any, Any]:
    """Return `model` with quantised experts, and a floating model with the same weights dequantised."""
    floating = copy.deepcopy(model)
    for layer, other in zip(model.model.layers, floating.model.layers, strict=True):
        experts = FP8Experts(model.config, (128, 128), scale_fmt="ue8m0", expert_dtype=kind)
        quantise_at_random(experts, other.mlp.experts, kind)
        layer.mlp.experts = experts
        if kind == "fp8":
            for name in ("gate_proj", "up_proj", "down_proj"):
                held = getattr(layer.mlp.shared_experts, name)
                linear = FP8Linear(held.in_features, held.out_features, (128, 128), scale_fmt="ue8m0")
                linear.weight.data.view(torch.uint8).random_(0, 120)
                byte = torch.randint(112, 118, linear.weight_scale_inv.shape, dtype=torch.uint8)
                linear.weight_scale_inv.data.view(torch.uint8).copy_(byte)
                getattr(other.mlp.shared_experts, name).weight.data = dequantize_expert(linear.weight.data, byte)
                setattr(layer.mlp.shared_experts, name, linear)
    return model, floating


@pytest.mark.parametrize("kind", ["fp4", "fp8"])
def test_quantised_experts_are_the_dequantised_ones(kind: str) -> None:
    quantized, floating = _quantized(tiny_model(**ONE_LAYER), kind)
    ids = random_ids(2, 30)
    want = eager_logits(floating, ids)
    close(logits(convert(quantized), ids) / want.abs().max(), want / want.abs().max())


def test_a_scale_that_is_replaced_alone_is_used() -> None:
    quantized, _ = _quantized(tiny_model(**ONE_LAYER), "fp8")
    converted, ids = convert(quantized), random_ids(1, 9)
    before = logits(converted, ids)
    up = converted.model.layers[0].mlp.shared_experts.up_proj
    scale = up.weight_scale_inv.data.view(torch.uint8) + 2
    up.weight_scale_inv = nn.Parameter(scale.view(torch.float8_e8m0fnu), requires_grad=False)
    got = logits(converted, ids)
    assert not torch.equal(got, before)
    hf.revert(converted)
    assert torch.equal(logits(convert(converted), ids), got)
