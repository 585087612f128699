"""Tests of refusals with advice: prompts that a cache holds, raw inputs, sizes, and weights of other types."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Cache

from dsv4_compile import DSV4Error, hf
from dsv4_compile.hf.model import generate_call as generation
from dsv4_compile.hf.model.cache import CACHE_NAME
from dsv4_compile.hf.model.generate_call import CHUNKS_SKIP_CACHED
from dsv4_compile.hf.tiny import tiny_model
from tests.hf.small import LAYERS, close, random_ids

NO_PADDING: dict[str, Any] = {"pad_token_id": None}
"""So that transformers makes no mask of prompts with a random 0."""
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def converted_model(**sizes: int) -> Any:
    return hf.convert(tiny_model(**LAYERS, **NO_PADDING), **{"max_batch_size": 2, "max_seq_len": 256, **sizes})


@pytest.fixture(scope="module")
def original() -> Any:
    return tiny_model(**LAYERS, **NO_PADDING)


@pytest.fixture(scope="module")
def model() -> Any:
    return converted_model()


PROMPTS: dict[str, Callable[[Tensor], Tensor]] = {
    "the prompt again": lambda answer: answer[:, :20],
    "a prefix": lambda answer: answer[:, :9],
    "all that is cached": lambda answer: answer[:, :-1],
    "an edit of the same length": lambda answer: answer[:, :-1].flip(1),
    "only the new tokens": lambda answer: answer[:, -3:],
}


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("chunk", [None, 8])
def test_a_prompt_that_the_cache_holds_is_refused(prompt: str, chunk: int | None, model: Any, original: Any) -> None:
    cache, first = hf.new_cache(model), random_ids(1, 20)
    options = OPTIONS if chunk is None else {**OPTIONS, "prefill_chunk_size": chunk}
    answer = model.generate(first, past_key_values=cache, **options)
    again = PROMPTS[prompt](answer)
    for arguments, named in (((again,), {}), ((), {"input_ids": again}), ((), {"inputs": again})):
        with pytest.raises(DSV4Error, match=rf"E208[\s\S]*{again.shape[1]} columns[\s\S]*reset\(\)"):
            model.generate(*arguments, past_key_values=cache, **named, **options)
    assert cache.get_seq_length() == 25
    turn = torch.cat((answer, random_ids(1, 4)), dim=1)  # the cache is as it was
    if chunk is not None and not CHUNKS_SKIP_CACHED:
        with pytest.raises(DSV4Error, match="prefill_chunk_size=8 with a cache that holds"):
            model.generate(turn, past_key_values=cache, **options)
        options = OPTIONS
    assert torch.equal(model.generate(turn, past_key_values=cache, **options), original.generate(turn, **OPTIONS))
    cache.reset()  # the advice
    assert torch.equal(model.generate(again, past_key_values=cache, **options), original.generate(again, **OPTIONS))


def test_chunks_of_a_transformers_that_repeats_cached_tokens_are_refused(
    model: Any, original: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "CHUNKS_SKIP_CACHED", False)
    cache, first = hf.new_cache(model), random_ids(1, 20)
    answer = model.generate(first, past_key_values=cache, prefill_chunk_size=8, **OPTIONS)
    turn = torch.cat((answer, random_ids(1, 4)), dim=1)
    config = copy.deepcopy(model.generation_config)
    config.prefill_chunk_size = 8
    for chunks in ({"prefill_chunk_size": 8}, {"generation_config": config}):
        with pytest.raises(DSV4Error, match="prefill_chunk_size=8 with a cache that holds 25 columns"):
            model.generate(turn, past_key_values=cache, **chunks, **OPTIONS)
    assert torch.equal(model.generate(turn, past_key_values=cache, **OPTIONS), original.generate(turn, **OPTIONS))


def test_new_tokens_with_the_mask_of_all_continue_a_cache(model: Any, original: Any) -> None:
    cache, first = hf.new_cache(model), random_ids(1, 20)
    answer = model.generate(first, past_key_values=cache, **OPTIONS)
    new = torch.cat((answer[:, -1:], random_ids(1, 4)), dim=1)
    whole = torch.cat((answer[:, :-1], new), dim=1)
    got = model.generate(new, attention_mask=torch.ones_like(whole), past_key_values=cache, **OPTIONS)
    assert torch.equal(got[:, 5:], original.generate(whole, **OPTIONS)[:, 30:])


def test_copies_of_a_cache_are_branches_of_a_chat(model: Any) -> None:
    cache, ids = hf.new_cache(model), random_ids(1, 30)
    model(ids[:, :20], past_key_values=cache)
    branch = copy.deepcopy(cache)
    model(random_ids(1, 7), past_key_values=cache)
    close(model(ids[:, 20:], past_key_values=branch).logits, model(ids).logits[:, 20:])


RAW: tuple[Any, ...] = (
    [[1, 2]],
    np.ones((1, 2), dtype=np.int64),
    "a prompt",
    {"input_ids": torch.ones(1, 2, dtype=torch.int64)},
    torch.ones(1, 2, dtype=torch.bool),
    torch.ones(1, 2, dtype=torch.uint8),
    torch.ones(1, 2),
    torch.ones(2, dtype=torch.int64),
)


@pytest.mark.parametrize("raw", RAW, ids=lambda raw: f"{type(raw).__name__} {getattr(raw, 'dtype', '')}")
def test_raw_inputs_are_refused(raw: Any, model: Any) -> None:
    for call in (model, model.model, model.generate):
        with pytest.raises(DSV4Error, match=r"E208[\s\S]*input_ids"):
            call(raw)
    ids = random_ids(1, 3)
    for name in ("position_ids", "attention_mask", CACHE_NAME):
        with pytest.raises(DSV4Error, match="E208"):
            model(ids, **{name: [[1, 1, 1]]})


def test_int32_ids_are_ids(model: Any) -> None:
    ids = random_ids(2, 9)
    assert torch.equal(model(ids.int()).logits, model(ids).logits)


def test_continuous_batching_of_transformers_is_refused(model: Any) -> None:
    calls = (lambda: model.generate_batch([[1, 2]]), model.init_continuous_batching)
    for call in (*calls, model.continuous_batching_context_manager):
        with pytest.raises(DSV4Error, match=r"E208[\s\S]*RunningBatch"):
            call()


@pytest.mark.parametrize("handle", [False, True])
def test_every_member_of_a_cache_answers_or_is_refused(handle: bool, model: Any) -> None:
    ids = random_ids(2, 9)
    cache = hf.new_cache(model)
    result = model(ids) if handle else model(ids, past_key_values=cache)
    cache = result[CACHE_NAME]
    assert (cache.batch_size, cache.is_initialized, cache.max_batch_size, len(cache)) == (2, True, 2, 2)
    assert cache.get_max_length() == cache.get_max_cache_shape() == cache.max_cache_len == 256
    assert cache.get_seq_length() == 9
    assert not cache.is_compileable and not cache.is_croppable and not any(cache.is_linear)
    cache.early_initialization(2, 1, 64, torch.float32, torch.device("cpu"))
    with pytest.raises(DSV4Error, match="E204"):
        cache.early_initialization(3, 1, 64, torch.float32, torch.device("cpu"))
    answered = {"early_initialization", "reset", "get_seq_length", "get_max_length", "get_query_offset"}
    answered |= {"is_recording_past", "get_max_cache_shape"}
    members = {name for name in dir(Cache) if not name.startswith("_") and callable(getattr(Cache, name))}
    for name in sorted(members - answered):
        with pytest.raises(DSV4Error, match="E208"):
            getattr(cache, name)(*[1] * (3 if name == "update" else 1))
    assert hf.new_cache(model).batch_size == -1


def test_a_model_that_is_too_small_says_how_it_grows() -> None:
    model, ids = converted_model(max_batch_size=1, max_step_tokens=64), random_ids(3, 70)
    with pytest.raises(DSV4Error, match=r"E204[\s\S]*new_cache\(model, max_batch_size=\.\.\.\)"):
        model(ids)
    with pytest.raises(DSV4Error, match=r"E208[\s\S]*already converted[\s\S]*hf\.convert\(dsv4_compile\.hf\.revert"):
        hf.convert(model, max_batch_size=3, max_seq_len=512)
    with pytest.raises(DSV4Error, match=r"E204[\s\S]*max_seq_len=512[\s\S]*hf\.revert"):
        hf.new_cache(model, max_seq_len=512)
    want = converted_model(max_batch_size=3)(ids).logits
    close(model(ids, past_key_values=hf.new_cache(model, max_batch_size=3, max_step_tokens=70)).logits, want)
    larger = hf.convert(hf.revert(model), max_batch_size=3, max_seq_len=512)
    close(larger(ids).logits, want)
    assert hf.new_cache(larger).get_max_length() == 512


@pytest.fixture(scope="module")
def folder(original: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    original.save_pretrained(path)
    return path


def test_a_loaded_model_grows_as_its_error_says(folder: Path, original: Any) -> None:
    loaded, ids = hf.load(folder, device="cpu", max_batch_size=1, max_seq_len=256), random_ids(2, 300)
    with pytest.raises(DSV4Error, match=r"E204[\s\S]*hf\.convert\(dsv4_compile\.hf\.revert\(model\)"):
        loaded(ids)
    larger = hf.convert(hf.revert(loaded), max_batch_size=2, max_seq_len=512)
    with torch.no_grad():
        close(larger(ids).logits, original(ids, use_cache=False).logits)


@pytest.mark.parametrize("ratios", [[4, 128], [1, 128], [0, 1], [1, 1]])
def test_a_compress_ratio_of_1_is_a_window(ratios: list[int], tmp_path: Path) -> None:
    types = {4: LAYERS["layer_types"][0], 128: LAYERS["layer_types"][1]}
    model = tiny_model(**{**LAYERS, "layer_types": [types.get(ratio, "sliding_attention") for ratio in ratios]})
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "compress_ratios": ratios}))
    loaded, ids = hf.load(tmp_path, device="cpu", max_batch_size=1, max_seq_len=256), random_ids(1, 40)
    with torch.no_grad():
        close(loaded(ids).logits, model(ids, use_cache=False).logits)


class Elsewhere(Tensor):
    """A tensor subclass of a different library, as torchao's."""


class Int8Linear(nn.Module):
    """A linear of a quantising library: integers and scales."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


def _as_subclass(model: Any, path: str) -> None:
    linear = model.get_submodule(path)
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Elsewhere), requires_grad=False)


def _as_int8(model: Any, path: str) -> None:
    model.set_submodule(path, Int8Linear(model.get_submodule(path)))


ATTENTION, SHARED = "model.layers.1.self_attn", "model.layers.0.mlp.shared_experts"
MISREAD: dict[str, Callable[[Any], Any]] = {
    "float64": lambda model: model.double(),
    "a float64 compressor": lambda model: model.get_submodule(f"{ATTENTION}.compressor").double(),
    "attention in another dtype": lambda model: model.get_submodule(ATTENTION).bfloat16(),
    "a layer in another dtype": lambda model: model.model.layers[1].half(),
    "the embedding in another dtype": lambda model: model.model.embed_tokens.half(),
    "dynamic quantisation": lambda model: torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=True),
    "dynamic float16": lambda model: torch.ao.quantization.quantize_dynamic(
        model, {nn.Linear}, dtype=torch.float16, inplace=True
    ),
    "int8 attention": lambda model: _as_int8(model, f"{ATTENTION}.o_b_proj"),
    "an int8 expert": lambda model: _as_int8(model, f"{SHARED}.up_proj"),
    "tensors of another library": lambda model: _as_subclass(model, f"{ATTENTION}.q_a_proj"),
    "a shared expert of another library": lambda model: _as_subclass(model, f"{SHARED}.down_proj"),
}


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated")
@pytest.mark.parametrize("change", MISREAD)
def test_weights_that_ops_would_misread_are_refused(change: str) -> None:
    model = tiny_model(**LAYERS)
    MISREAD[change](model)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(DSV4Error, match="E208"):
        hf.convert(model, max_batch_size=1, max_seq_len=128)
    assert [type(module) for module in model.modules()] == kinds


def test_an_output_head_is_called_and_may_be_quantised() -> None:
    model, ids = tiny_model(**LAYERS), random_ids(1, 20)
    _as_int8(model, "lm_head")
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
    close(hf.convert(model, max_batch_size=1, max_seq_len=128)(ids).logits, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_that_was_cast_whole_is_close_to_eager(dtype: torch.dtype) -> None:
    model, ids = tiny_model(**LAYERS).to(dtype), random_ids(2, 30)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits.float()
    got = hf.convert(model, max_batch_size=2, max_seq_len=128)(ids).logits
    assert got.dtype is dtype
    # A near tie of two entries or experts may fall otherwise, and changes one token.
    assert (got.float() - want).abs().amax(-1).median() < (0.02 if dtype is torch.float16 else 0.1)
