"""Tests of modules and numbers that a user changed: a converted model computes as transformers does, or says no."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from dsv4_compile import DSV4Error, hf
from dsv4_compile.hf.tiny import tiny_config, tiny_model
from tests.hf.small import close, eager_logits

theirs: Any = modeling_deepseek_v4
TYPES: Any = tiny_config().layer_types
Change = Callable[[Any], Any]
BOTH = pytest.mark.parametrize("attention_only", [False, True], ids=["whole", "attention"])


@pytest.fixture(scope="module")
def original() -> Any:
    """Layers: SWA by hash, CSA and HCA."""
    return tiny_model(num_hidden_layers=3, layer_types=TYPES[:3])


def converted(model: Any, attention_only: bool) -> Any:
    return hf.convert(model, max_batch_size=2, max_seq_len=256, attention_only=attention_only)


def put(path: str, name: str, value: Any) -> Change:
    """Return what sets an attribute of the module at `path` of a decoder stack; a class is called for the value."""

    def change(m: Any) -> None:
        module, new = m.get_submodule(path), value() if isinstance(value, type) else value
        if name in module._modules and not isinstance(new, nn.Module):
            delattr(module, name)
        setattr(module, name, new)

    change.name = name  # type: ignore[attr-defined]
    return change


def subclass(path: str) -> Change:
    """Return what gives the module at `path` a forward that returns half of it."""

    def change(m: Any) -> None:
        module = m.get_submodule(path)

        class Halved(type(module)):  # type: ignore[misc]
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                result = super().forward(*args, **kwargs)
                return (result[0] * 0.5, *result[1:]) if isinstance(result, tuple) else result * 0.5

        module.__class__ = Halved

    return change


def scaled(path: str, name: str) -> Change:
    return lambda m: setattr(m.get_submodule(path), name, getattr(m.get_submodule(path), name) * 0.5)


def double(module: Any, args: Any, out: Any) -> Any:
    return out * 2


def own_gate(m: Any) -> None:
    experts = m.layers[1].mlp.experts
    experts._apply_gate = lambda gate_up: gate_up.chunk(2, dim=-1)[1]


def with_bias(path: str) -> Change:
    def change(m: Any) -> None:
        linear = m.get_submodule(path)
        linear.bias = nn.Parameter(torch.ones(linear.weight.shape[0]))

    return change


def tied(one: str, other: str) -> Change:
    return lambda m: setattr(m.get_submodule(one), "weight", m.get_submodule(other).weight)


ATTENTION: dict[str, Change] = {
    "heads": put("layers.0.self_attn", "num_heads", 2),
    "a tensor as softmax scale": put("layers.0.self_attn", "scaling", torch.ones(1, 1)),
    "softmax scale": put("layers.0.self_attn", "scaling", 1.0),
    "eps of q": put("layers.2.self_attn.q_a_norm", "variance_epsilon", 0.5),
    "eps of a head": put("layers.2.self_attn.q_b_norm", "eps", 0.5),
    "eps of pooled entries": put("layers.2.self_attn.compressor.kv_norm", "variance_epsilon", 0.5),
    "eps of keys": put("layers.1.self_attn.compressor.indexer.kv_norm", "variance_epsilon", 0.5),
    "compress rate": put("layers.2.self_attn.compressor", "compress_rate", 64),
    "RoPE of another kind": put("layers.1.self_attn", "rope_layer_type", "main"),
    "RoPE of a compressor of another kind": put("layers.1.self_attn.compressor", "rope_layer_type", "main"),
    "top-k of the indexer": put("layers.1.self_attn.compressor.indexer", "index_topk", 2),
    "scale of index scores": put("layers.1.self_attn.compressor.indexer.scorer", "softmax_scale", -1.0),
    "scale of index weights": put("layers.1.self_attn.compressor.indexer.scorer", "weights_scaling", -1.0),
    "output groups": put("layers.0.self_attn.o_a_proj", "n_groups", 4),
    "attention scaling": put("rotary_emb", "main_attention_scaling", 2.0),
    "attention scaling of a compressor": put(
        "layers.2.self_attn.compressor.rotary_emb", "compress_attention_scaling", 2.0
    ),
    "frequencies": scaled("rotary_emb", "main_inv_freq"),
    "frequencies of the indexer": scaled("layers.1.self_attn.compressor.indexer.rotary_emb", "compress_inv_freq"),
    "a norm's class": subclass("layers.0.self_attn.kv_norm"),
    "a norm of torch": put("layers.0.self_attn", "kv_norm", nn.RMSNorm(64)),
    "no norm": put("layers.0.self_attn", "q_b_norm", nn.Identity),
    "a linear's class": subclass("layers.0.self_attn.q_a_proj"),
    "a compressor's class": subclass("layers.2.self_attn.compressor"),
    "a rotary embedding's class": subclass("rotary_emb"),
    "no compressor": put("layers.1.self_attn", "compressor", None),
    "a compressor of a window layer": lambda m: setattr(
        m.layers[0].self_attn, "compressor", copy.deepcopy(m.layers[2].self_attn.compressor)
    ),
    "a scorer": put("layers.1.self_attn.compressor.indexer", "scorer", nn.Identity),
    "a bias": with_bias("layers.0.self_attn.q_a_proj"),
    "a bias of the indexer": with_bias("layers.1.self_attn.compressor.indexer.scorer.weights_proj"),
    "a hook of the rotary embedding": lambda m: m.rotary_emb.register_forward_hook(lambda *args: None),
    "tied weights": tied("layers.1.self_attn.compressor.kv_proj", "layers.1.self_attn.compressor.gate_proj"),
    "weights tied to another layer's": tied("layers.1.self_attn.q_a_proj", "layers.0.self_attn.q_a_proj"),
    "window": lambda m: setattr(m.config, "sliding_window", 16),
    "attention scaling of compressed entries": put("rotary_emb", "compress_attention_scaling", 2.0),
    "a missing module": lambda m: delattr(m.layers[0].self_attn, "kv_norm"),
}
"""Changes of modules and numbers that attention's ops replace."""
AROUND: dict[str, Change] = {
    "score function": put("layers.1.mlp.gate", "score_fn", nn.Sigmoid()),
    "score function by hash": put("layers.0.mlp.gate", "score_fn", torch.sigmoid),
    "a hook of the score function": lambda m: m.layers[1].mlp.gate.score_fn.register_forward_hook(double),
    "activation": put("layers.1.mlp.experts", "act_fn", nn.GELU()),
    "an activation that is SiLU of one": put("layers.1.mlp.experts", "act_fn", lambda x: x * 0.7310585786),
    "activation of the shared expert": put("layers.1.mlp.shared_experts", "act_fn", torch.tanh),
    "a hook of an activation": lambda m: m.layers[1].mlp.experts.act_fn.register_forward_hook(double),
    "a limit": put("layers.1.mlp.shared_experts", "limit", 0.1),
    "a gate of experts": own_gate,
    "a router's class": subclass("layers.1.mlp.gate"),
    "experts' class": subclass("layers.1.mlp.experts"),
    "a mixture's class": subclass("layers.1.mlp"),
    "another module in place of experts": put(
        "layers.1", "mlp", type("Zero", (nn.Module,), {"forward": lambda self, x, **_: x * 0})
    ),
    "a hyper-connection's class": subclass("layers.1.ffn_hc"),
    "the head's class": subclass("hc_head"),
    "the last norm's class": subclass("norm"),
    "eps of the norm of a hyper-connection": put("layers.1.attn_hc.input_norm", "eps", 0.5),
    "eps of the norm of another": put("layers.1.ffn_hc.input_norm", "eps", 0.5),
    "eps of the norm after attention": put("layers.1.post_attention_layernorm", "variance_epsilon", 0.5),
    "eps of the head's norm": put("hc_head.input_norm", "eps", 0.5),
    "eps of the last norm": put("norm", "variance_epsilon", 0.5),
    "a bias of the shared expert": with_bias("layers.1.mlp.shared_experts.down_proj"),
    "tied weights of the shared expert": tied(
        "layers.1.mlp.shared_experts.up_proj", "layers.1.mlp.shared_experts.gate_proj"
    ),
    "a norm's class around": subclass("layers.0.input_layernorm"),
}
"""Changes of modules and numbers that the ops around attention replace."""
USED: dict[str, Change] = {
    "experts of a token": put("layers.1.mlp.gate", "top_k", 1),
    "experts of a token by hash, which its table decides": put("layers.0.mlp.gate", "top_k", 1),
    "scale of experts": put("layers.1.mlp.gate", "routed_scaling_factor", 0.3),
    "eps of a hyper-connection": put("layers.1.attn_hc", "hc_eps", 0.1),
    "iterations": put("layers.1.ffn_hc", "hc_sinkhorn_iters", 1),
    "eps of the head": put("hc_head", "eps", 0.1),
    "a mixture of two layers": lambda m: setattr(m.layers[2], "mlp", m.layers[1].mlp),
    "a norm of two places": lambda m: setattr(m.layers[2], "input_layernorm", m.layers[2].post_attention_layernorm),
    "a hyper-connection of two places": lambda m: setattr(m.layers[2], "ffn_hc", m.layers[2].attn_hc),
    "a hook of the experts' module": lambda m: m.layers[1].mlp.register_forward_hook(double),
}
"""Changes that take effect."""


CHANGES = ATTENTION | AROUND | USED
IDS = torch.randint(0, 512, (1, 140), generator=torch.Generator().manual_seed(0))


def changed(model: Any, change: Change) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        change(model.model)
    return model


@pytest.mark.parametrize(
    "what, attention_only",
    [*((what, False) for what in CHANGES), *((what, True) for what in AROUND | USED), ("frequencies", True)],
)
def test_a_change_before_convert_is_used_or_refused(original: Any, what: str, attention_only: bool) -> None:
    model = changed(copy.deepcopy(original), CHANGES[what])
    if what in ATTENTION or (what in AROUND and not attention_only):
        with pytest.raises(ValueError, match=r"E20[578]") as refused:
            converted(model, attention_only)
        assert what not in AROUND or not hasattr(CHANGES[what], "name") or "attention_only=True" in str(refused.value)
        assert type(model.model) is theirs.DeepseekV4Model and not hasattr(model.model, "dsv4_cache")
    else:
        want = eager_logits(model, IDS)
        close(converted(model, attention_only)(IDS).logits, want)


@pytest.mark.parametrize(
    "what, attention_only",
    [*((what, False) for what in CHANGES), *((what, True) for what in [*ATTENTION, *AROUND, *USED][::6])],
)
def test_a_change_after_convert_is_used_or_refused(original: Any, what: str, attention_only: bool) -> None:
    model = converted(copy.deepcopy(original), attention_only)
    model.model.adopt()
    changed(model, CHANGES[what])
    try:
        with torch.no_grad():
            got = model(IDS).logits
    except DSV4Error as refused:
        assert what in ATTENTION or what in AROUND or "two" in what
        assert getattr(CHANGES[what], "name", "") in str(refused)
    else:
        assert what not in ATTENTION
        close(got, eager_logits(changed(copy.deepcopy(original), CHANGES[what]), IDS))


def test_a_class_that_was_patched_is_refused(original: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs.DeepseekV4UnweightedRMSNorm, "forward", lambda self, x: x)
    with pytest.raises(
        ValueError, match=r"E208[\s\S]*q_b_norm of layer 0 with a forward from tests.hf.test_expected_modules"
    ):
        converted(copy.deepcopy(original), True)


@pytest.mark.parametrize("kind", ["attention", "experts"])
def test_a_function_of_the_caller_in_place_of_attention_or_experts(original: Any, kind: str) -> None:
    model = copy.deepcopy(original)
    setattr(model.config, f"_{kind[:4].replace('expe', 'experts').replace('atte', 'attn')}_implementation", "mine")
    with pytest.raises(ValueError, match=r"E208[\s\S]*_implementation='mine'"):
        converted(model, False)


@BOTH
def test_generate_may_switch_between_implementations_of_experts(original: Any, attention_only: bool) -> None:
    model, ids = converted(copy.deepcopy(original), attention_only), torch.arange(1, 9)[None]
    model.set_experts_implementation("grouped_mm")
    want = eager_logits(original, ids)
    for name in ("batched_mm", "eager", "grouped_mm"):  # as `generate` does around decoding on a GPU
        model.set_experts_implementation(name)
        close(eager_logits(model, ids), want)
    if not attention_only:
        model.config._experts_implementation = "mine"
        with pytest.raises(
            DSV4Error, match="_experts_implementation=mine of the model's config, converted with eager or"
        ):
            eager_logits(model, ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_frequencies_that_a_change_of_dtype_rounded_are_read(original: Any, dtype: torch.dtype) -> None:
    model = converted(copy.deepcopy(original).to(dtype).float(), False)
    assert model(IDS).logits.isfinite().all()


class Skip(nn.Module):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return hidden_states


class Wrapped(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return self.layer(hidden_states, **kwargs) * 0.5


def first_layers(m: Any) -> None:
    m.layers = m.layers[:2]


def renumbered(m: Any, i: int, number: Any) -> None:
    m.layers[i].self_attn.layer_idx = m.layers[i].layer_idx = number


def a_layer_of_another_model(m: Any) -> None:
    m.layers[1] = tiny_model(1, num_hidden_layers=3, layer_types=TYPES[:3]).model.layers[1]


KEPT: dict[str, Change] = {
    "the first two layers": first_layers,
    "without the first layer": lambda m: m.layers.__delitem__(0),
    "in another order": lambda m: m.layers.insert(0, m.layers.pop(2)),
}
"""Layers that are right before and after `convert`."""
LAYERS: dict[str, Change] = {
    "a layer that does nothing": lambda m: m.layers.__setitem__(1, Skip()),
    "a first layer that does nothing": lambda m: m.layers.__setitem__(0, Skip()),
    "a layer inside another module": lambda m: m.layers.__setitem__(1, Wrapped(m.layers[1])),
    "an identity": lambda m: m.layers.__setitem__(2, nn.Identity()),
    "a layer twice": lambda m: m.layers.append(m.layers[1]),
    "a layer in place of another one": lambda m: m.layers.__setitem__(2, m.layers[1]),
    "a copy of a layer": lambda m: m.layers.append(copy.deepcopy(m.layers[1])),
    "a copy in place of a layer": lambda m: m.layers.__setitem__(1, copy.deepcopy(m.layers[1])),
    "the attention of another layer": lambda m: setattr(m.layers[2], "self_attn", m.layers[1].self_attn),
    "no attention": lambda m: delattr(m.layers[1], "self_attn"),
    "another module as attention": lambda m: setattr(m.layers[1], "self_attn", nn.Identity()),
    "one number of two layers": lambda m: renumbered(m, 2, 1),
    "a number above": lambda m: renumbered(m, 2, 3),
    "a number below": lambda m: renumbered(m, 2, -1),
    "no number": lambda m: renumbered(m, 2, None),
    "no layers": lambda m: setattr(m, "layers", nn.ModuleList()),
    "a layer of another model": a_layer_of_another_model,
}


@BOTH
@pytest.mark.parametrize("what", [*KEPT, *LAYERS])
def test_layers_before_convert(original: Any, what: str, attention_only: bool) -> None:
    model = changed(copy.deepcopy(original), (KEPT | LAYERS)[what])
    if what in LAYERS and "place of a layer" not in what and what != "a layer of another model":
        with pytest.raises(ValueError, match="E208"):
            converted(model, attention_only)
    else:
        want = eager_logits(model, IDS)
        close(converted(model, attention_only)(IDS).logits, want)


@BOTH
@pytest.mark.parametrize("what", [*KEPT, *LAYERS])
def test_layers_after_convert(original: Any, what: str, attention_only: bool) -> None:
    model = converted(copy.deepcopy(original), attention_only)
    model.model.adopt()
    changed(model, (KEPT | LAYERS)[what])
    if what in KEPT:
        close(model(IDS).logits, eager_logits(changed(copy.deepcopy(original), KEPT[what]), IDS))
    else:
        with pytest.raises(ValueError, match="E208"):
            model(IDS)
        with pytest.raises(ValueError, match="E208"):
            model.generate(IDS, max_new_tokens=1)
    hf.revert(model)
    assert not [m for m in model.modules() if "dsv4" in f"{type(m).__module__} {list(vars(m))}"]


def test_a_change_of_one_layer_is_named(original: Any) -> None:
    model = changed(copy.deepcopy(original), AROUND["score function"])
    want = r"E208[\s\S]*got   score_fn=Sigmoid of mlp.gate of layer 1\n.*why   ops compute the activation sqrtsoftplus"
    with pytest.raises(ValueError, match=want):
        converted(model, False)
