"""Tests of adapters: a converted model computes what PEFT computes, or convert names the module and changes nothing."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from dsv4_compile import DSV4Error, hf
from dsv4_compile.hf.tiny import tiny_model
from tests.hf import official
from tests.hf.small import LAYERS, close, eager_logits, random_ids

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 128}
LINEARS = ["q_b_proj", "kv_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ALL: dict[str, Any] = {"target_modules": [*LINEARS, "up_proj"], "target_parameters": EXPERTS}


def lora(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, init_lora_weights=False, **{"target_modules": LINEARS} | options)


@torch.no_grad()
def adapted(original: Any, *configs: Any) -> Any:
    """Return a PEFT model with an adapter for each of `configs`, all weights of adapters random."""
    torch.manual_seed(0)
    model = peft.get_peft_model(copy.deepcopy(original), configs[0])
    for i, config in enumerate(configs[1:], 1):
        model.add_adapter(f"adapter_{i}", config)
    for name, parameter in model.named_parameters():
        if any(
            each in name for each in ("lora_", "modules_to_save", "trainable_tokens", *model.base_model.prefix.split())
        ):
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model.eval()


@torch.no_grad()
def check_computes_what_peft_computes(model: Any, **options: Any) -> Any:
    ids = random_ids(2, 24)
    want = eager_logits(model, ids)
    converted = hf.convert(model.base_model.model, **SIZES, **options)
    close(converted(ids).logits, want)
    return converted


KINDS: dict[str, Callable[[], Any]] = {
    "LoRA": lora,
    "rsLoRA": lambda: lora(use_rslora=True),
    "DoRA": lambda: lora(use_dora=True),
    "PiSSA": lambda: peft.LoraConfig(r=4, init_lora_weights="pissa", target_modules=LINEARS),
    "patterns": lambda: lora(alpha_pattern={"q_b_proj": 3}, rank_pattern={"kv_proj": 2}),
    "shared expert": lambda: lora(target_modules=["gate_proj", "up_proj", "down_proj"]),
    "both matrices of experts": lambda: lora(target_modules=[], target_parameters=EXPERTS),
    "router": lambda: lora(target_modules=[], target_parameters=["mlp.gate.weight"]),
    "hyper-connections": lambda: lora(target_modules=[], target_parameters=["attn_hc.fn", "hc_head.hc_fn"]),
    "saved head of the streams": lambda: lora(modules_to_save=["hc_head"]),
    "saved norms": lambda: lora(modules_to_save=["norm", "input_layernorm"]),
    "saved router": lambda: lora(modules_to_save=["mlp.gate"]),
    "saved attention": lambda: lora(target_modules=["up_proj"], modules_to_save=["self_attn"]),
    "saved embeddings": lambda: lora(modules_to_save=["embed_tokens", "lm_head"]),
    "embeddings": lambda: lora(target_modules=["embed_tokens", "lm_head"]),
    "tokens": lambda: lora(trainable_token_indices=[1, 5, 7]),
    "IA3": lambda: peft.IA3Config(target_modules=LINEARS, feedforward_modules=[], init_ia3_weights=False),
    "LoHa": lambda: peft.LoHaConfig(target_modules=LINEARS, init_weights=False),
    "OFT": lambda: peft.OFTConfig(target_modules=LINEARS, init_weights=False, oft_block_size=8, r=0),
    "VeRA": lambda: peft.VeraConfig(target_modules=["q_b_proj"], init_weights=False),
    "LN tuning": lambda: peft.LNTuningConfig(target_modules=["kv_norm", "input_layernorm", "norm"]),
    "RoAd": lambda: peft.RoadConfig(target_modules=LINEARS, init_weights=False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_merged_adapters_compute_what_peft_computes(original: Any, kind: str) -> None:
    model = adapted(original, KINDS[kind]())
    ids = random_ids(2, 24)
    assert (eager_logits(model, ids) - eager_logits(original, ids)).abs().max() > 0.01
    converted = check_computes_what_peft_computes(model, merge_adapters=True)
    assert set(converted.state_dict()) == set(original.state_dict())


@pytest.mark.parametrize("kind", ["LoRA", "both matrices of experts", "saved head of the streams", "embeddings"])
def test_attention_alone_with_merged_adapters_computes_what_peft_computes(original: Any, kind: str) -> None:
    check_computes_what_peft_computes(adapted(original, KINDS[kind]()), merge_adapters=True, attention_only=True)


def _set(*names: str) -> Callable[[Any], Any]:
    return lambda model: model.base_model.set_adapter(list(names))


def _merged_before_another(model: Any) -> None:
    model.merge_adapter(["default"])
    for module in model.modules():
        if hasattr(module, "_active_adapter"):
            module._active_adapter = ["adapter_1"]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "one of two": lambda model: model.set_adapter("adapter_1"),
    "two": _set("default", "adapter_1"),
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "merged": lambda model: model.merge_adapter(),
    "merged, then disabled": lambda model: (model.merge_adapter(), model.base_model.disable_adapter_layers()),
    "one merged, another active": _merged_before_another,
    "merged, then both active": lambda model: (model.merge_adapter(["default"]), _set("default", "adapter_1")(model)),
    "merged and unmerged": lambda model: (model.merge_adapter(), model.unmerge_adapter()),
    "deleted": lambda model: model.delete_adapter("default"),
    "weighted": lambda model: (
        model.add_weighted_adapter(["default", "adapter_1"], [0.3, 0.7], "both", combination_type="cat"),
        model.set_adapter("both"),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_adapters_are_merged_as_active_as_they_are(original: Any, change: str) -> None:
    options = {"target_modules": ALL["target_modules"]} if change == "weighted" else ALL
    model = adapted(original, lora(**options), lora(**options))
    CHANGES[change](model)
    check_computes_what_peft_computes(model, merge_adapters=True)


@pytest.mark.parametrize("change", ["one of two", "disabled"])
def test_saved_modules_are_taken_as_active_as_they_are(original: Any, change: str) -> None:
    model = adapted(original, *(lora(modules_to_save=["hc_head", "lm_head", "input_layernorm"]) for _ in range(2)))
    CHANGES[change](model)
    check_computes_what_peft_computes(model, merge_adapters=True)


def test_adapters_of_two_tuners_on_one_module(original: Any) -> None:
    model = peft.get_peft_model(copy.deepcopy(original), lora(), mixed=True)
    model.add_adapter("other", peft.LoHaConfig(target_modules=["q_b_proj", "up_proj"], init_weights=False))
    model.set_adapter(["default", "other"])
    check_computes_what_peft_computes(model.eval(), merge_adapters=True)


def test_a_model_with_injected_adapters_is_plain_afterwards(original: Any, tmp_path: Any) -> None:
    """transformers writes only the adapters of a model that it believes to have some."""
    model = copy.deepcopy(original)
    peft.inject_adapter_in_model(lora(), model)
    model._hf_peft_config_loaded = True
    hf.convert(model.eval(), **SIZES, merge_adapters=True).save_pretrained(tmp_path)
    again, ids = type(original).from_pretrained(tmp_path).eval(), random_ids(2, 24)
    close(model(ids).logits, eager_logits(again, ids))


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return all that convert could change: classes, attributes, contents of containers, bits of tensors."""
    state: dict[str, Any] = {name: t.detach().clone() for name, t in model.state_dict(keep_vars=True).items()}
    for name, module in model.named_modules():
        state[f"{name} is"] = type(module)
        for attribute, value in vars(module).items():
            entries = list(value.items()) if isinstance(value, dict) else list(value) if isinstance(value, list) else []
            state[f"{name}.{attribute}"] = id(value), [id(e[1]) if isinstance(e, tuple) else e for e in entries]
    return state


def check_refused_unchanged(model: Any, converted: Any, match: str, *errors: type, **options: Any) -> None:
    ids = random_ids(2, 24)
    want, before = eager_logits(model, ids), state_of(model)
    with pytest.raises(errors or DSV4Error, match=match):
        hf.convert(converted, **SIZES | options)
    after = state_of(model)
    assert set(before) == set(after)
    for name, value in before.items():
        equal = torch.equal(value.view(torch.uint8), after[name].view(torch.uint8)) if isinstance(value, Tensor) and value.dim() else value == after[name]  # fmt: skip # noqa: E501
        assert equal, name
    assert torch.equal(eager_logits(model, ids), want)


def tied(original: Any) -> Any:
    return adapted(tiny_model(tie_word_embeddings=True, **LAYERS), lora(target_modules=["q_b_proj", "lm_head"]))


def hooked(original: Any) -> Any:
    model = adapted(original, lora())
    model.base_model.model.model.layers[1].self_attn.q_b_proj.register_forward_hook(lambda module, args, out: out * 2)
    return model


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "bias": (lambda m: adapted(m, lora(lora_bias=True)), r"self_attn.q_b_proj of layer 0[\s\S]*bias"),
    "aLoRA": (lambda m: adapted(m, lora(alora_invocation_tokens=[1])), r"self_attn.q_b_proj of layer 0[\s\S]*merging"),
    "Lily": (
        lambda m: adapted(m, peft.LilyConfig(target_modules=["q_b_proj"], r=4)),
        r"self_attn.q_b_proj of layer 0",
    ),
    "tied": (tied, r"lm_head[\s\S]*embed_tokens"),
    "hooks": (hooked, r"self_attn.q_b_proj of layer 1[\s\S]*hooks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_no_weights_stand_for_are_refused_and_kept(original: Any, case: str) -> None:
    make, match = REFUSED[case]
    model = make(original)
    check_refused_unchanged(model, model.base_model.model, rf"E208[\s\S]*{match}", merge_adapters=True)


def test_adapters_of_quantised_weights_are_refused(tmp_path: Any) -> None:
    folder, _ = official.make(tmp_path / "official")
    model = hf.revert(hf.load(folder, device="cpu", **SIZES))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapted_model = peft.get_peft_model(model, lora()).eval()
    with pytest.raises(DSV4Error, match=r"E208[\s\S]*self_attn.q_b_proj of layer 0[\s\S]*float8_e4m3fn"):
        hf.convert(model, **SIZES, merge_adapters=True)
    held = adapted_model.unload().state_dict()
    assert all(torch.equal(held[name].view(torch.uint8), t.view(torch.uint8)) for name, t in state.items() if t.dim())


def fails(*args: Any, **kwargs: Any) -> Any:
    raise KeyboardInterrupt("stopped")


@pytest.mark.parametrize(
    "at",
    [
        *("convert.PagedCache", "convert.register_recorded_outputs"),
        *("convert_stack._shared_weights", "convert_stack._swap_classes", "convert_stack.ReadSettings"),
    ],
)
@pytest.mark.parametrize("with_adapters", [False, True])
def test_a_convert_that_ends_early_changes_nothing(
    original: Any, monkeypatch: pytest.MonkeyPatch, at: str, with_adapters: bool
) -> None:
    model = adapted(original, lora(**ALL, modules_to_save=["hc_head"])) if with_adapters else copy.deepcopy(original)
    inner = model.base_model.model if with_adapters else model
    with monkeypatch.context() as patch:
        module, name = at.split(".")
        patch.setattr(importlib.import_module(f"dsv4_compile.hf.model.{module}"), name, fails)
        check_refused_unchanged(model, inner, "stopped", KeyboardInterrupt, merge_adapters=with_adapters)
    if with_adapters:
        check_computes_what_peft_computes(model, merge_adapters=True)


@pytest.mark.parametrize(
    "change", [{"num_key_value_heads": 2}, {"compress_rates": {"heavily_compressed_attention": 64}}]
)
def test_a_refused_configuration_changes_nothing(original: Any, change: dict[str, Any]) -> None:
    model = adapted(original, lora(**ALL))
    ids = random_ids(2, 24)
    want = eager_logits(model, ids)
    inner = model.base_model.model
    held = {name: getattr(inner.config, name) for name in change}
    for name, value in change.items():
        setattr(inner.config, name, value)
    with pytest.raises(DSV4Error, match="E205"):
        hf.convert(inner, **SIZES, merge_adapters=True)
    for name, value in held.items():
        setattr(inner.config, name, value)
    assert torch.equal(eager_logits(model, ids), want)


UNCALLED = [kind for kind in KINDS if kind not in ("embeddings",)]


@pytest.mark.parametrize("kind", UNCALLED)
def test_adapters_of_modules_that_are_not_called_are_refused_and_kept(original: Any, kind: str) -> None:
    model = adapted(original, KINDS[kind]())
    check_refused_unchanged(model, model.base_model.model, r"E208[\s\S]*(layer 0|hc_head)")


CALLED: dict[str, Callable[[], Any]] = {
    "embeddings": KINDS["embeddings"],
    "DoRA": lambda: lora(target_modules=["embed_tokens", "lm_head"], use_dora=True),
    "bias": lambda: lora(target_modules=["lm_head"], lora_bias=True),
    "saved": lambda: lora(target_modules=["lm_head"], modules_to_save=["embed_tokens"]),
    "IA3": lambda: peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[], init_ia3_weights=False),
}


@pytest.mark.parametrize("kind", CALLED)
def test_adapters_of_modules_that_are_called_run(original: Any, kind: str) -> None:
    model = adapted(original, CALLED[kind]())
    converted = check_computes_what_peft_computes(model)
    ids, options = random_ids(1, 9), {"max_new_tokens": 6, "do_sample": False}
    got = converted.generate(ids, **options)
    hf.revert(converted)
    assert torch.equal(got, model.generate(input_ids=ids, **options))


@pytest.mark.parametrize("kind", ["both matrices of experts", "router", "hyper-connections", "shared expert"])
def test_attention_alone_lets_other_adapters_run(original: Any, kind: str) -> None:
    config = KINDS[kind]()
    if kind == "shared expert":
        config.target_modules = r".*shared_experts\.(gate|up|down)_proj"
    check_computes_what_peft_computes(adapted(original, config), attention_only=True)


@pytest.mark.parametrize(
    "path", ["layers.1.mlp.gate", "hc_head", "norm", "layers.0.self_attn.q_a_norm", "layers.0.attn_hc"]
)
def test_parametrised_weights_of_modules_that_are_not_called_are_refused(original: Any, path: str) -> None:
    model = copy.deepcopy(original)
    module = model.model.get_submodule(path)
    name = next(iter(dict(module.named_parameters(recurse=False))))
    nn.utils.parametrize.register_parametrization(module, name, nn.Identity())
    check_refused_unchanged(model, model, rf"E208[\s\S]*{path.rpartition('.')[2]}[\s\S]*parametrised")


@torch.no_grad()
def test_parametrised_weights_of_modules_that_are_called_run(original: Any) -> None:
    class Twice(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    model, ids = copy.deepcopy(original), random_ids(2, 24)
    for module in (model.lm_head, model.model.embed_tokens):
        nn.utils.parametrize.register_parametrization(module, "weight", Twice())
    want = eager_logits(model, ids)
    close(hf.convert(model, **SIZES)(ids).logits, want)
