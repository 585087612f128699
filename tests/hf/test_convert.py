"""Tests of a converted model without compilation: numbers of eager Hugging Face, shared weights, errors, revert."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GenerationConfig

from dsv4_compile import hf
from dsv4_compile.hf.tiny import tiny_model
from dsv4_compile.runtime.captures import tensor_bytes
from tests.hf.small import eager_logits, random_ids

MAX_SEQ_LEN = 512


@pytest.fixture(scope="module")
def original():
    return tiny_model()


@pytest.fixture(scope="module")
def converted():
    return hf.convert(tiny_model(), max_batch_size=4, max_seq_len=MAX_SEQ_LEN)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 126, 127, 128, 130, 300])
def test_prefill_logits_equal_eager_hugging_face(original, converted, length: int) -> None:
    ids = random_ids(2, length)
    torch.testing.assert_close(converted(ids).logits, eager_logits(original, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "steps", [[1, 5, 44, 250], [300], [1] * 150 + [150]], ids=["chunked", "whole", "token-by-token"]
)
def test_any_split_of_the_prompt_gives_the_same_logits(original, converted, steps: list[int]) -> None:
    ids = random_ids(1, 300)
    cache = hf.new_cache(converted)
    got = torch.cat([converted(chunk, past_key_values=cache).logits for chunk in ids.split(steps, dim=1)], dim=1)
    torch.testing.assert_close(got, eager_logits(original, ids), atol=1e-4, rtol=0)
    assert cache.get_seq_length() == 300


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_never_reaches_another_row(original, converted, side: str) -> None:
    """Each row of an unequal batch equals its prompt alone, padded on either side (transformers#45938)."""
    prompts = [random_ids(n) for n in (1, 5, 126, 130)]
    width = max(len(p) for p in prompts)
    ids, mask = torch.zeros(4, width, dtype=torch.long), torch.zeros(4, width, dtype=torch.long)
    spans = [slice(width - len(p), width) if side == "left" else slice(0, len(p)) for p in prompts]
    for row, (prompt, span) in enumerate(zip(prompts, spans, strict=True)):
        ids[row, span], mask[row, span] = prompt, 1
    logits = converted(ids, attention_mask=mask).logits
    for row, (prompt, span) in enumerate(zip(prompts, spans, strict=True)):
        torch.testing.assert_close(logits[row, span], eager_logits(original, prompt[None])[0], atol=1e-4, rtol=0)


def test_generate_equals_eager_generate_row_by_row(original, converted) -> None:
    prompts = [random_ids(n) for n in (3, 40, 126)]
    width = 126
    ids, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
    got = converted.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    for row, prompt in enumerate(prompts):
        alone = original.generate(prompt[None], max_new_tokens=20, do_sample=False)
        assert torch.equal(got[row, width:], alone[0, len(prompt) :])


def test_generate_prefills_in_chunks_when_a_step_is_bounded(original) -> None:
    model = hf.convert(tiny_model(), max_batch_size=2, max_seq_len=MAX_SEQ_LEN, max_step_tokens=48)
    ids = random_ids(1, 200)
    with pytest.raises(ValueError, match="E204"):
        model.generate(ids, max_new_tokens=4, do_sample=False)
    got = model.generate(ids, max_new_tokens=12, do_sample=False, prefill_chunk_size=48)
    assert torch.equal(got, original.generate(ids, max_new_tokens=12, do_sample=False))
    whole = hf.convert(tiny_model(), max_batch_size=2, max_seq_len=MAX_SEQ_LEN)
    assert model.model.dsv4_cache.nbytes < whole.model.dsv4_cache.nbytes


def test_a_second_turn_continues_from_the_cache(original, converted) -> None:
    cache = hf.new_cache(converted)
    first = converted.generate(random_ids(1, 30), past_key_values=cache, max_new_tokens=8, do_sample=False)
    turn = torch.cat((first, random_ids(1, 20)), dim=1)
    second = converted.generate(turn, past_key_values=cache, max_new_tokens=8, do_sample=False)
    assert torch.equal(second, original.generate(turn, max_new_tokens=8, do_sample=False))


def test_reset_empties_a_used_cache(converted) -> None:
    ids, cache = random_ids(2, 140), hf.new_cache(converted)
    fresh = converted(ids, past_key_values=cache).logits
    converted(random_ids(2, 200), past_key_values=cache)
    cache.reset()
    assert torch.equal(converted(ids, past_key_values=cache).logits, fresh)


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "fp8"])
def test_quantised_caches_stay_close(original, kv_cache_dtype: str) -> None:
    model = hf.convert(tiny_model(), max_batch_size=1, max_seq_len=256, kv_cache_dtype=kv_cache_dtype,
                       indexer_cache_dtype="float32")  # fmt: skip
    ids = random_ids(1, 30)  # fewer than index_topk * 4 tokens, so that all entries are selected
    similarity = torch.nn.functional.cosine_similarity(model(ids).logits, eager_logits(original, ids), dim=-1)
    # The median, because rounding may route single tokens to different experts.
    assert similarity.median() > (0.9999 if kv_cache_dtype == "bfloat16" else 0.99)


@pytest.mark.parametrize("everything", [False, True], ids=["norms-and-sinks-float32", "all-bfloat16"])
def test_bfloat16_models(original, everything: bool) -> None:
    """Models as transformers loads them, and after model.to(bfloat16), which casts sinks and norms too."""
    model = tiny_model(dtype=torch.bfloat16)
    if everything:
        model.to(torch.bfloat16)
    hf.convert(model, max_batch_size=1, max_seq_len=256)
    ids = random_ids(1, 30)
    similarity = torch.nn.functional.cosine_similarity(model(ids).logits.float(), eager_logits(original, ids), dim=-1)
    assert similarity.median() > 0.999


def test_bfloat16_is_as_close_to_float32_as_eager_hugging_face() -> None:
    """Tokens of both may differ when two logits are close, so the distance to float32 is compared."""
    model = tiny_model(dtype=torch.bfloat16).to(torch.bfloat16)
    exact, converted = copy.deepcopy(model).float(), hf.convert(copy.deepcopy(model), max_batch_size=6, max_seq_len=256)
    ids = random_ids(6, 120)
    want = eager_logits(exact, ids)
    ours, theirs = ((out.float() - want).abs().mean() for out in (converted(ids).logits, eager_logits(model, ids)))
    assert ours < 1.5 * theirs


def test_norms_return_the_dtype_of_their_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm of transformers 5.17 returns the dtype of its weight."""
    model = hf.convert(tiny_model(dtype=torch.bfloat16), max_batch_size=1, max_seq_len=256)
    norm = model.model.norm
    monkeypatch.setattr(hf.model.causal_lm.hf.DeepseekV4RMSNorm, "forward", lambda self, x: self.weight * x)
    assert norm.weight.dtype is torch.float32
    assert norm(torch.ones(2, norm.weight.shape[0], dtype=torch.bfloat16)).dtype is torch.bfloat16


def storage_bytes(model) -> int:
    """Return the bytes of the memory that parameters and stacked matrices span."""
    tensors = list(model.parameters())
    for layer in model.model.layers:
        tensors += [t for t in layer.self_attn.dsv4.buffers() if t is not layer.self_attn.dsv4.cos_sin]
    return tensor_bytes(tensors)


def test_weights_are_shared_and_keep_their_names() -> None:
    model = tiny_model()
    before = {name: (p, p.clone()) for name, p in model.named_parameters()}
    keys = list(model.state_dict())
    hf.convert(model, max_batch_size=1, max_seq_len=256)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0], name
        assert torch.equal(parameter, before[name][1]), name
    assert list(model.state_dict()) == keys
    for layer in model.model.layers:
        ours = {id(p) for p in layer.self_attn.dsv4.parameters()}
        assert ours == {id(p) for p in layer.self_attn.parameters()}
    assert storage_bytes(model) == sum(p.nbytes for p in model.parameters())


@torch.no_grad()
def test_later_changes_of_weights_take_effect(tmp_path) -> None:
    model = hf.convert(tiny_model(), max_batch_size=1, max_seq_len=256)
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5  # as in engines that receive new weights
    model.to(torch.float64).to(torch.float32)
    assert storage_bytes(model) == sum(p.nbytes for p in model.parameters())
    model.save_pretrained(tmp_path)
    plain = type(tiny_model()).from_pretrained(tmp_path).eval()
    for (name, a), (_, b) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    ids = random_ids(1, 20)
    torch.testing.assert_close(model(ids).logits, eager_logits(plain, ids), atol=2e-4, rtol=2e-4)


def test_revert_restores_the_model(original) -> None:
    model = tiny_model()
    types = [type(m) for m in model.modules()]
    hf.revert(hf.convert(model, max_batch_size=1, max_seq_len=256))
    assert [type(m) for m in model.modules()] == types
    ids = random_ids(1, 20)
    assert torch.equal(eager_logits(model, ids), eager_logits(original, ids))
    hf.convert(model, max_batch_size=1, max_seq_len=256)


class TestErrors:
    """Unsupported calls raise before anything is written."""

    def test_model_types(self, converted) -> None:
        with pytest.raises(ValueError, match="already converted"):
            hf.convert(converted, max_batch_size=1, max_seq_len=256)
        with pytest.raises(ValueError, match="E208"):
            hf.convert(torch.nn.Linear(2, 2), max_batch_size=1, max_seq_len=256)
        with pytest.raises(ValueError, match="E208"):
            hf.convert(tiny_model().train(), max_batch_size=1, max_seq_len=256)
        with pytest.raises(ValueError, match="E208"):
            hf.revert(tiny_model())

    @pytest.mark.parametrize(
        "kwargs",
        [
            {"num_beams": 2},
            {"use_cache": False},
            {"cache_implementation": "static"},
            {"output_attentions": True, "return_dict_in_generate": True},
        ],
        ids=lambda k: next(iter(k)),
    )
    def test_generation_modes(self, converted, kwargs: dict) -> None:
        with pytest.raises(ValueError, match="E208"):
            converted.generate(random_ids(1, 4), max_new_tokens=2, do_sample=False, **kwargs)

    def test_too_long_and_too_many(self, converted) -> None:
        with pytest.raises(ValueError, match="E204"):
            converted.generate(random_ids(1, 4), max_new_tokens=MAX_SEQ_LEN)
        with pytest.raises(ValueError, match="E204"):
            converted(random_ids(5, 4))

    def test_training_and_embeddings(self, converted) -> None:
        converted.train()
        with pytest.raises(ValueError, match="E208"):
            converted(random_ids(1, 4))
        converted.eval()
        with pytest.raises(ValueError, match="E208"):
            converted(inputs_embeds=torch.randn(1, 4, 128))


def test_generate_warns_once_that_it_is_not_compiled(caplog) -> None:
    model = hf.convert(tiny_model(), max_batch_size=1, max_seq_len=256)
    for _ in range(2):
        model.generate(random_ids(1, 4), generation_config=GenerationConfig(max_new_tokens=2, pad_token_id=0))
    warned = [r for r in caplog.records if "without torch.compile" in r.message]
    assert len(warned) == 1
