"""Tests of `experts_implementation="dsv4"`: models of transformers, not converted, against their own experts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)
from transformers.activations import ACT2FN
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import use_experts_implementation
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from dsv4_compile._compat import TorchDispatchMode
from dsv4_compile.errors import InputError
from dsv4_compile.hf.model.experts_interface import Gate, experts_forward, gate_of
from dsv4_compile.hf.tiny import tiny_config, tiny_model
from tests.hf.small import LAYERS, close, quantise_at_random, random_ids

ONE_LAYER = LAYERS | {"num_hidden_layers": 1, "layer_types": LAYERS["layer_types"][:1], "moe_intermediate_size": 128}
THEIRS = ("eager", "batched_mm", "grouped_mm")
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts_per_tok": 2,
}
SILU = type(ACT2FN["silu"])


def small(config: PretrainedConfig) -> Any:
    """Return a random model with experts that weigh enough to be seen in its logits."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.7 if ".experts." in name else 0.2)
    return model


def layer(experts: type[nn.Module], **config: Any) -> Any:
    """Return a random module of experts, which runs transformers' own implementation."""
    own = {"num_local_experts": 4, "intermediate_size": 48, "hidden_size": 64, "hidden_act": "silu"} | config
    module: Any = experts(SimpleNamespace(**own | {"_experts_implementation": "eager"}))
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.requires_grad_(False)


def routed(tokens: int, experts: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return states, ids and weights of two experts a token."""
    torch.manual_seed(1)
    ids = torch.rand(tokens, experts).argsort(1)[:, :2]
    return torch.randn(tokens, 64).to(dtype), ids, torch.rand(tokens, 2).to(dtype)


@pytest.fixture(scope="module")
def deepseek() -> Any:
    return tiny_model(**LAYERS)


@pytest.fixture(scope="module")
def qwen() -> Any:
    return small(Qwen3MoeConfig(**SIZES, num_experts=8))


@torch.no_grad()
def logits(model: Any, ids: Tensor, implementation: str) -> Tensor:
    model.set_experts_implementation(implementation)
    found: Tensor = model(ids, use_cache=False).logits
    return found


def tokens_of(model: Any, ids: Tensor, implementation: str) -> Tensor:
    model.set_experts_implementation(implementation)
    found: Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=0
    )
    return found


@pytest.mark.parametrize("name", ["deepseek", "qwen"])
def test_prefill_and_decode_are_those_of_every_implementation_of_transformers(
    name: str, request: pytest.FixtureRequest
) -> None:
    model, ids = request.getfixturevalue(name), random_ids(2, 20)
    got, tokens = logits(model, ids, "dsv4"), tokens_of(model, ids, "dsv4")
    for theirs in THEIRS:
        close(got, logits(model, ids, theirs))
        assert torch.equal(tokens, tokens_of(model, ids, theirs))


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("limit", [0.5, 50.0])
def test_experts_of_deepseek_clamp_at_their_limit(tokens: int, limit: float) -> None:
    module, call = layer(DeepseekV4Experts, swiglu_limit=limit), routed(tokens)
    torch.testing.assert_close(experts_forward(module, *call), module(*call), atol=1e-4, rtol=1e-5)


def test_experts_of_other_models_are_not_clamped() -> None:
    module, (states, ids, weights) = layer(MixtralExperts), routed(7)
    call = 30 * states, ids, weights
    torch.testing.assert_close(experts_forward(module, *call), module(*call), atol=1e-2, rtol=1e-5)


def test_bfloat16_is_rounded_once_and_its_weights_are_those_of_the_router() -> None:
    module, call = layer(MixtralExperts), routed(7, dtype=torch.bfloat16)
    module.bfloat16()
    got = experts_forward(module, *call)
    wide = copy.deepcopy(module).float()
    want = wide(call[0].float(), call[1], call[2].float())
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got, want.bfloat16(), atol=1e-6, rtol=1.01 / 128)


def test_ids_of_other_ranks_add_nothing() -> None:
    module, (states, ids, weights) = layer(MixtralExperts), routed(7)
    module._is_expert_parallel = True
    away = ids == 2
    call = states, torch.where(away, module.num_experts, ids), torch.where(away, 0, weights)
    got = experts_forward(module, *call)
    for theirs in THEIRS:
        module.config._experts_implementation = theirs
        torch.testing.assert_close(got, module(*call), atol=1e-4, rtol=1e-5)
    # Where a weight is not 0, the expert still is none of this rank's.
    assert torch.equal(experts_forward(module, states, call[1], weights), got)


class Quantized(FP8Experts):
    """Experts of a checkpoint in e4m3 or MXFP4, as `from_pretrained` builds them."""


use_experts_implementation(Quantized, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS)


@pytest.mark.parametrize("kind", ["fp4", "fp8"])
def test_quantised_experts_are_the_dequantised_ones(kind: str) -> None:
    floating, quantized = (tiny_model(**ONE_LAYER) for _ in range(2))
    experts = Quantized(quantized.config, (128, 128), scale_fmt="ue8m0", expert_dtype=kind)
    quantise_at_random(experts, floating.model.layers[0].mlp.experts, kind)
    quantized.model.layers[0].mlp.experts = experts
    ids = random_ids(2, 20)
    close(logits(quantized, ids, "dsv4"), logits(floating, ids, "eager"))


def test_the_op_reads_the_weights_and_nothing_copies_them() -> None:
    module, call, seen = layer(MixtralExperts), routed(7), []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func, args))
            return func(*args, **(kwargs or {}))

    with Seen():
        experts_forward(module, *call)
    ((func, args),) = ((func, args) for func, args in seen if any(each is module.down_proj for each in args))
    assert func is torch.ops.dsv4.moe_experts.default and args[3] is module.gate_up_proj


def test_a_saved_model_is_loaded_with_it_and_generation_keeps_it(
    qwen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qwen.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="dsv4").eval()
    ids = random_ids(1, 9)
    with torch.no_grad():
        close(model(ids, use_cache=False).logits, logits(qwen, ids, "eager"))
    # On a GPU, transformers replaces grouped_mm while it decodes.
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    for given, decoding in (("dsv4", "dsv4"), ("grouped_mm", "batched_mm")):
        model.set_experts_implementation(given)
        with model._optimize_model_for_decode():
            assert model.config._experts_implementation == decoding


def test_a_compiled_model_is_one_graph_and_layers_share_what_is_compiled(qwen: Any) -> None:
    calls: list[int] = []

    def count(graph: Any, inputs: Any) -> Callable[..., Any]:
        calls.append(sum(node.target is torch.ops.dsv4.moe_experts for node in graph.graph.nodes))
        return graph.forward  # type: ignore[no-any-return]

    qwen.set_experts_implementation("dsv4")
    compiled = torch.compile(qwen.forward, backend=count, fullgraph=True)
    for tokens in (12, 1):
        ids = random_ids(2, tokens)
        with torch.no_grad():
            close(compiled(ids, use_cache=False).logits, logits(qwen, ids, "dsv4"))
    assert calls == [2, 2]
    calls.clear()
    want = logits(qwen, ids, "eager")
    for each in qwen.model.layers:
        each.mlp.compile(backend=count, fullgraph=True)
    try:
        close(logits(qwen, ids, "dsv4"), want)
        assert calls == [1]
    finally:
        for each in qwen.model.layers:
            each.mlp._compiled_call_impl = None


def test_the_backend_compiles_experts_of_other_models(qwen: Any) -> None:
    qwen.set_experts_implementation("dsv4")
    block, options = qwen.model.layers[0].mlp, {"dsv4.impl.moe_experts": "eager"}
    compiled = torch.compile(block.forward, backend="dsv4", fullgraph=True, options=options)
    x = torch.randn(2, 6, SIZES["hidden_size"])
    with torch.no_grad():
        close(compiled(x), block(x))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"has_gate": False}, "no gate"),
        ({"has_bias": True}, "biases"),
        ({"has_post_expert_norm": True}, "a norm of their results"),
        ({"is_transposed": True}, "transposed weights"),
        ({"is_concatenated": False}, "rows of gate and up in turn"),
        ({"activation_scheme": "static"}, "static input scales"),
        ({"block_size": (64, 128)}, "scales of blocks of 64 x 128"),
        ({"act_fn": ACT2FN["gelu"]}, "other than SwiGLU"),
    ],
)
def test_other_experts_are_refused_before_anything_runs(changes: dict[str, Any], what: str) -> None:
    module = layer(MixtralExperts)
    for name, value in changes.items():
        setattr(module, name, value)
    with pytest.raises(InputError, match=what) as caught:
        experts_forward(module, *routed(3))
    assert caught.value.code == "E208" and "set_experts_implementation" in str(caught.value)


def test_gates_of_transformers_are_told_apart() -> None:
    assert gate_of(MixtralExperts, SILU) == Gate()
    assert gate_of(DeepseekV4Experts, SILU) == Gate("limit")
    assert gate_of(FP8Experts, SILU) == Gate("limit", ("gate_softcap", "swiglu_alpha"))
    assert "SwiGLU" in gate_of(GptOssExperts, SILU).unsupported

    class Late(nn.Module):
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, -1)
            return self.act_fn(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)

    class Otherwise(nn.Module):
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, -1)
            if self.limit is None:
                return gate.relu() * up
            return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)

    class Two(nn.Module):
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, -1)
            return self.act_fn(gate.clamp(max=self.gate_limit)) * up.clamp(-self.up_limit, self.up_limit)

    for experts, why in ((Late, "SwiGLU"), (Otherwise, "where limit is None"), (Two, "gate_limit, up_limit")):
        assert why in gate_of(experts, SILU).unsupported


def test_a_quantised_gate_of_another_model_is_refused() -> None:
    config = copy.copy(tiny_config(**ONE_LAYER))
    config.swiglu_alpha = 1.7
    with pytest.raises(InputError, match="a gate with swiglu_alpha"):
        experts_forward(Quantized(config, (128, 128)), *routed(3))


def test_gpt_oss_is_refused_eager_and_compiled() -> None:
    model = small(GptOssConfig(**SIZES, num_local_experts=4, layer_types=["full_attention"] * 2))
    model.set_experts_implementation("dsv4")
    module, call = model.model.layers[0].mlp.experts, routed(3)
    for run in (module, torch.compile(module, backend="eager", fullgraph=True)):
        with torch.no_grad(), pytest.raises(Exception, match=r"E208(.|\n)*GptOssExperts with biases"):
            run(*call)


def test_gradients_are_refused(qwen: Any) -> None:
    qwen.set_experts_implementation("dsv4")
    with pytest.raises(InputError, match="E206"):
        qwen(random_ids(1, 5), labels=random_ids(1, 5))
