"""Tests of settings, modules and a vocabulary that change after convert: they are used, or unsupported by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsv4_compile import hf
from dsv4_compile.hf.tiny import tiny_model
from tests.hf.small import LAYERS, close, random_ids

BOTH = pytest.mark.parametrize("attention_only", [True, False])


@pytest.fixture(scope="module")
def original() -> Any:
    return tiny_model(**LAYERS)


def converted(original: Any, attention_only: bool = True) -> Any:
    return hf.convert(copy.deepcopy(original), max_batch_size=2, max_seq_len=256, attention_only=attention_only)


def set_all(name: str, value: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for module in model.model.layers[0].self_attn.modules():
            if name in vars(module):
                setattr(module, name, value)

    return change


READ_ONCE: dict[str, Callable[[Any], None]] = {
    "variance_epsilon": set_all("variance_epsilon", 0.5),
    "eps": set_all("eps", 0.5),
    "scaling": set_all("scaling", 1.0),
    "index_topk": set_all("index_topk", 2),
    "weights_scaling": set_all("weights_scaling", 2.0),
    "sliding_window": lambda model: setattr(model.config, "sliding_window", 4),
    "compress_attention_scaling": lambda model: setattr(model.model.rotary_emb, "compress_attention_scaling", 2.0),
}


AROUND: dict[str, tuple[str, Any]] = {
    "mlp.experts": ("act_fn", torch.nn.GELU()),
    "mlp.shared_experts": ("limit", 0.1),
    "attn_hc.input_norm": ("eps", 0.5),
    "ffn_hc.input_norm": ("eps", 0.5),
    "post_attention_layernorm": ("variance_epsilon", 0.5),
}


@pytest.mark.parametrize("path", AROUND)
def test_a_setting_around_attention_is_refused_if_it_was_read_once_and_used_if_not(original: Any, path: str) -> None:
    name, value = AROUND[path]
    model, other, ids = converted(original, False), copy.deepcopy(original), random_ids(1, 9)
    for each in (model, other):
        each.model.layers[0].attn_hc.hc_eps = 0.1
        each.model.layers[1].mlp.gate.top_k = 1
    with torch.no_grad():
        close(model(ids).logits, other(ids, use_cache=False).logits)
    setattr(model.model.layers[1].get_submodule(path), name, value)
    with pytest.raises(ValueError, match=rf"E208[\s\S]*got   {name}=.* of {path} of layer 1"):
        model(ids)


def test_experts_with_two_limits_are_not_converted(original: Any) -> None:
    model = copy.deepcopy(original)
    model.model.layers[1].mlp.shared_experts.limit = 0.1
    with pytest.raises(ValueError, match=r"E208[\s\S]*got   limit=0.1 of mlp.shared_experts of layer 1"):
        hf.convert(model, max_batch_size=1, max_seq_len=128, attention_only=False)


@pytest.mark.parametrize("name", READ_ONCE)
@BOTH
def test_a_setting_that_was_read_once_is_refused_by_name(original: Any, name: str, attention_only: bool) -> None:
    model, ids = converted(original, attention_only), random_ids(1, 9)
    copied = copy.deepcopy(model)
    READ_ONCE[name](copied)
    with pytest.raises(ValueError, match=rf"E208[\s\S]*got   {name}="):
        copied(ids)
    model(ids)
    hf.revert(copied)


def frequencies(model: Any) -> list[tuple[Any, str]]:
    """Return all modules with a buffer of RoPE frequencies, and its name."""
    found = ((m, name) for m in model.model.modules() for name in m._buffers if name.endswith("inv_freq"))
    return [(module, name) for module, name in found if not name.startswith("original")]


@BOTH
@pytest.mark.parametrize("how", ["in place", "replaced"])
@pytest.mark.parametrize("which", [0, -1])
def test_other_rope_frequencies_are_refused(original: Any, how: str, which: int, attention_only: bool) -> None:
    model, ids = converted(original, attention_only), random_ids(1, 9)
    want = model(ids).logits
    module, name = frequencies(model)[which]
    before = getattr(module, name).clone()
    if how == "in place":
        getattr(module, name).mul_(0.5)
    else:
        setattr(module, name, before * 0.5)
    with pytest.raises(ValueError, match=rf"E208[\s\S]*got   {name} of "):
        model(ids)
    with torch.no_grad():
        getattr(module, name).copy_(before)
    assert torch.equal(model(ids).logits, want)
    model.bfloat16().float()  # transformers rounds its frequencies; the layers' tables stay as they are
    assert model(ids).logits.isfinite().all()


def test_a_cache_that_was_allocated_in_inference_mode_is_used_outside(original: Any) -> None:
    model, ids = converted(original), random_ids(1, 9)
    with torch.inference_mode():
        cache = hf.new_cache(model)
        model(ids[:, :8], past_key_values=cache)
    with torch.no_grad():
        got = model(ids[:, 8:], past_key_values=cache).logits
        close(got, original(ids, use_cache=False).logits[:, 8:])


def test_prompts_that_end_in_padding_are_refused(original: Any) -> None:
    model, ids = converted(original), random_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    with pytest.raises(ValueError, match=r"E208[\s\S]*end in padding"):
        model.generate(ids, attention_mask=mask, max_new_tokens=2)


@BOTH
def test_a_hook_of_the_rotary_embedding_is_refused(original: Any, attention_only: bool) -> None:
    model = converted(original, attention_only)
    model.model.rotary_emb.register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match=r"E208[\s\S]*rotary_emb of the model has forward hooks"):
        model(random_ids(1, 4))


@BOTH
@pytest.mark.parametrize("path", ["", ".self_attn"])
def test_an_attention_that_was_not_converted_is_refused(original: Any, path: str, attention_only: bool) -> None:
    model = converted(original, attention_only)
    model.set_submodule(f"model.layers.1{path}", copy.deepcopy(original.get_submodule(f"model.layers.1{path}")))
    with pytest.raises(ValueError, match=r"E208[\s\S]*layer 1 with an attention that was not converted"):
        model(random_ids(1, 4))


def test_layers_that_are_swapped_or_removed_take_effect(original: Any) -> None:
    ids = random_ids(2, 20)
    for change in (lambda layers: layers.insert(0, layers.pop(1)), lambda layers: layers.pop(1)):
        model, other = converted(original, False), copy.deepcopy(original)
        for each in (model, other):
            change(each.model.layers)
        with torch.no_grad():
            close(model(ids).logits, other(ids, use_cache=False).logits)


@BOTH
def test_a_larger_vocabulary(original: Any, attention_only: bool) -> None:
    """Transformers raises for a token that the table of a hash router lacks; ops would read a wrong row."""
    model, other, ids = converted(original, attention_only), copy.deepcopy(original), random_ids(1, 9)
    for each in (model, other):
        torch.manual_seed(0)
        each.resize_token_embeddings(600, mean_resizing=False)
    new = torch.full((1, 1), 550)
    with pytest.raises((IndexError, ValueError), match=r"E208[\s\S]*embedding of 600|out of bounds"):
        model(torch.cat((ids, new), 1))
    for each in (model, other):
        router = each.model.layers[0].mlp.gate
        router.tid2eid = torch.cat((router.tid2eid, router.tid2eid[:88].flip(0)))
    ids = torch.cat((ids, new), 1)
    with torch.no_grad():
        model.model.dsv4_cache.reset()
        close(model(ids).logits, other(ids, use_cache=False).logits)


def test_convert_on_the_meta_device_by_context_is_refused(original: Any) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=r"E208[\s\S]*meta"):
        converted(original)
    assert not converted(original)(random_ids(1, 3)).logits.is_meta
