"""Tests of heads, embeddings, forwards and tables that a caller replaced: used by calls and batches, or E208."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsv4_compile import hf
from tests.hf.small import close, random_ids

Change = Callable[[Any], Any]


def converted(model: Any, attention_only: bool = False) -> Any:
    return hf.convert(model, max_batch_size=2, max_seq_len=256, attention_only=attention_only)


@torch.no_grad()
def changed(model: Any, change: Change) -> Any:
    torch.manual_seed(0)
    return result if isinstance(result := change(model), nn.Module) else model


@torch.no_grad()
def answer(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)  # token 0 is the padding token
    return model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)[0, len(prompt) :].tolist()


class InFloat32(nn.Module):
    """A head without a weight, in float32."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.head = head.float()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.float()) * 0.5


def forward_of(path: str, scale: float = -1.0) -> Change:
    """Return what wraps the forward of a module."""

    def change(model: Any) -> None:
        module = model.get_submodule(path)
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            if isinstance(result, Tensor):
                return result * scale
            if isinstance(result, tuple):
                return result[0] * scale, *result[1:]
            return type(result)(**{**result, "last_hidden_state": result.last_hidden_state * scale})

        module.forward = forward

    return change


def negated(module: Any, args: Any, out: Any) -> Any:
    name = "logits" if "logits" in out else "last_hidden_state"
    return type(out)(**{**out, name: -out[name]})


HEADS: dict[str, Change] = {
    "a sequence": lambda m: setattr(m, "lm_head", nn.Sequential(m.lm_head, nn.Tanh())),
    "a bias and more rows": lambda m: setattr(m, "lm_head", nn.Linear(128, 600)),
    "no weight": lambda m: setattr(m, "lm_head", InFloat32(m.lm_head)),
    "hidden states": lambda m: setattr(m, "lm_head", nn.Identity()),
    "quantised": lambda m: torch.ao.quantization.quantize_dynamic(m, {"lm_head"}, dtype=torch.qint8),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("head", HEADS)
def test_a_head_of_the_caller(original: Any, head: str) -> None:
    model, prompt = changed(copy.deepcopy(original), HEADS[head]), random_ids(9).tolist()
    want = answer(model, prompt)
    assert answer(converted(copy.deepcopy(model)), prompt) == want
    after = changed(converted(copy.deepcopy(original)), HEADS[head])
    assert answer(after, prompt) == want
    request = hf.RunningBatch(after, slots=2).submit(prompt, max_new_tokens=4)
    assert list(request) == want


def test_a_head_in_float32_leaves_a_bfloat16_model_in_bfloat16(original: Any) -> None:
    model = changed(copy.deepcopy(original).bfloat16(), HEADS["no weight"])
    assert converted(model).model.dsv4_cache.paged.cache_format.kv_dtype == torch.bfloat16


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_embedding_without_a_weight_is_refused(original: Any, when: str) -> None:
    model = copy.deepcopy(original) if when == "before" else converted(copy.deepcopy(original))
    model.model.embed_tokens = nn.Sequential(model.model.embed_tokens, nn.Tanh())
    with pytest.raises(ValueError, match=r"E208[\s\S]*embed_tokens, a Sequential without a weight"):
        converted(model) if when == "before" else model(random_ids(1, 4))


@pytest.mark.parametrize("attention_only", [True, False])
@pytest.mark.parametrize("path", ["model", "model.layers.1.self_attn", "model.layers.0.self_attn"])
def test_a_forward_that_calls_the_replaced_one_is_refused(original: Any, path: str, attention_only: bool) -> None:
    model = changed(copy.deepcopy(original), forward_of(path))
    with pytest.raises(ValueError, match=r"E208[\s\S]*with a replaced forward"):
        converted(model, attention_only)
    after = changed(converted(copy.deepcopy(original), attention_only), forward_of(path))
    ids = random_ids(1, 20)
    with torch.no_grad():
        close(after(ids).logits, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("path", ["model.layers.1", "model.layers.1.mlp", "model.embed_tokens", "lm_head"])
def test_a_forward_around_what_is_called_runs(original: Any, path: str) -> None:
    model, prompt = changed(copy.deepcopy(original), forward_of(path, 0.5)), random_ids(9).tolist()
    want = answer(model, prompt)
    model = converted(model)
    assert answer(model, prompt) == want
    assert list(hf.RunningBatch(model, slots=2).submit(prompt, max_new_tokens=4)) == want


PASSED_OVER: dict[str, Change] = {
    "a hook of the model": lambda m: m.register_forward_hook(negated),
    "a hook of the stack": lambda m: m.model.register_forward_hook(negated),
    "a hook before the model": lambda m: m.register_forward_pre_hook(lambda *args: None),
    "a forward of the stack": forward_of("model"),
    "a forward of the model": lambda m: setattr(m, "forward", lambda *args, **kwargs: None),
    "a compiled forward of the caller": lambda m: setattr(m, "forward", torch.compile(lambda *args: None)),
}


@pytest.mark.parametrize("what", PASSED_OVER)
def test_a_running_batch_refuses_what_it_would_not_run(original: Any, what: str) -> None:
    model = converted(copy.deepcopy(original))
    batch, prompt = hf.RunningBatch(model, slots=2), random_ids(9).tolist()
    request = batch.submit(prompt, max_new_tokens=4)
    batch.step()
    changed(model, PASSED_OVER[what])
    with pytest.raises(ValueError, match=r"E208[\s\S]*(hooks|of its own)"):
        batch.step()
    for module in (model, model.model):
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        vars(module).pop("forward", None)
    batch.run()
    assert request.tokens == answer(original, prompt)


def test_a_running_batch_runs_beside_a_compiled_forward(original: Any) -> None:
    model, prompt = converted(copy.deepcopy(original)), random_ids(9).tolist()
    model.forward = torch.compile(model.forward, backend="eager")
    assert list(hf.RunningBatch(model, slots=2).submit(prompt, max_new_tokens=4)) == answer(original, prompt)


def test_layers_in_a_list_are_refused(original: Any) -> None:
    model = copy.deepcopy(original)
    layers = list(model.model.layers)
    del model.model.layers
    model.model.layers = layers
    with pytest.raises(ValueError, match=r"E208[\s\S]*layers in a list"):
        converted(model)


@pytest.mark.parametrize("expert", [-1, 8, 77])
def test_a_table_that_names_no_expert_is_refused(original: Any, expert: int) -> None:
    model = copy.deepcopy(original)
    model.model.layers[0].mlp.gate.tid2eid[300, 1] = expert
    with pytest.raises(ValueError, match=r"E208[\s\S]*tid2eid of layer 0"):
        converted(model)
    converted(model, attention_only=True)


def test_a_flag_of_a_hash_router_that_changes_is_refused(original: Any) -> None:
    model = converted(copy.deepcopy(original))
    model(random_ids(1, 4))
    model.model.layers[1].mlp.is_hash = True
    with pytest.raises(ValueError, match=r"E208[\s\S]*is_hash=True of mlp of layer 1"):
        model(random_ids(1, 4))


@pytest.mark.parametrize("name", ["input_ids", "attention_mask"])
def test_inputs_on_another_device_are_refused(original: Any, name: str) -> None:
    model, ids = converted(copy.deepcopy(original)), random_ids(1, 4)
    cache = hf.new_cache(model)
    with pytest.raises(ValueError, match=r"E208[\s\S]*on meta"):
        model(**{"input_ids": ids, "attention_mask": torch.ones_like(ids), name: ids.to("meta")}, past_key_values=cache)
    with torch.no_grad():
        close(model(ids, past_key_values=cache).logits, original(ids, use_cache=False).logits)


def test_a_call_of_a_model_without_memory_is_refused(original: Any) -> None:
    model = converted(copy.deepcopy(original).to("meta"))
    with pytest.raises(ValueError, match=r"E208[\s\S]*meta"):
        model(random_ids(1, 4).to("meta"))


def linear(m: Any) -> Any:
    return m.model.layers[1].self_attn.q_a_proj


def as_buffer(m: Any) -> None:
    weight = linear(m).weight.detach() * 2
    del linear(m).weight
    linear(m).register_buffer("weight", weight)


def as_attribute(m: Any) -> None:
    weight = linear(m).weight.detach() * 2
    del linear(m).weight
    linear(m).weight = weight


NO_PARAMETERS: dict[str, Change] = {
    "a buffer": as_buffer,
    "an attribute": as_attribute,
    "none": lambda m: setattr(linear(m), "weight", None),
    "sparse": lambda m: setattr(linear(m), "weight", nn.Parameter(linear(m).weight.detach().to_sparse_csr())),
    "negative bits": lambda m: setattr(linear(m), "weight", nn.Parameter(torch._neg_view(linear(m).weight.detach()))),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("what", NO_PARAMETERS)
def test_weights_that_are_no_plain_parameters_are_refused(original: Any, what: str) -> None:
    with pytest.raises(ValueError, match=r"E20[78]"):
        converted(changed(copy.deepcopy(original), NO_PARAMETERS[what]))
    model = converted(copy.deepcopy(original))
    changed(model, NO_PARAMETERS[what])
    with pytest.raises(ValueError, match=r"E208[\s\S]*q_a_proj"):
        model(random_ids(1, 4))


def test_a_converted_model_that_lost_its_memory_is_refused(original: Any) -> None:
    model = converted(copy.deepcopy(original))
    model(random_ids(1, 4))
    model.to("meta")
    with pytest.raises(ValueError, match=r"E20[78]"):
        model(random_ids(1, 4))


@pytest.mark.parametrize("value", ["no", None, 0, [], torch.tensor(True)])
@pytest.mark.parametrize("name", ["hadamard", "merge_adapters", "attention_only"])
def test_a_flag_that_is_no_bool_is_refused(original: Any, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"E201[\s\S]*{name} is True or False"):
        hf.convert(copy.deepcopy(original), max_batch_size=1, max_seq_len=256, **{name: value})


@pytest.mark.parametrize("name", ["hadamard", "dequantize", "attention_only"])
def test_a_flag_of_load_that_is_no_bool_is_refused(tmp_path: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"E201[\s\S]*{name} is True or False"):
        hf.load(tmp_path, max_batch_size=1, max_seq_len=256, **{name: "no"})
