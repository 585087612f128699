"""Tests of a whole compiled model: one prefill and one decode graph, no break, no recompile, the tokens of eager.

Every comparison is with eager Hugging Face, one prompt at a time. torch specialises sizes 0 and 1, so a single row and
a batch have a prefill and a decode graph each.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import hf
from dsv4_compile._compat import counters
from dsv4_compile.hf.tiny import quiet_libraries, tiny_config, tiny_model

PROMPT_LENGTHS = (1, 110, 126, 370)
DECODE_STEPS = 24
"""All prompts but the first close a group of 128 while they decode, the longest its third, the first of a second
page."""
MAX_SEQ_LEN = 512
LAYERS = {"num_hidden_layers": 2, "layer_types": tiny_config().layer_types[1:3], "hc_sinkhorn_iters": 2}
"""One that indexes and one that does not, hashed and routed experts; both attend to a window as well. Two layers only,
as each takes seconds to compile."""
MAX_GRAPHS = 4
"""A prefill and a decode graph for one row, and the same for several."""


@pytest.fixture(scope="module")
def original() -> Any:
    return tiny_model(**LAYERS)


@pytest.fixture(scope="module")
def compiled() -> Iterator[Any]:
    quiet_libraries()
    model = hf.convert(tiny_model(**LAYERS), max_batch_size=4, max_seq_len=MAX_SEQ_LEN)
    # Inductor calls PyTorch here, because compiling C++ would double the time; a test of the examples compiles C++.
    model.compile(fullgraph=True, backend="dsv4", options={"fallback_by_default": True})
    counters["stats"].clear()
    counters["graph_break"].clear()
    yield model


@pytest.fixture(scope="module")
def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(1, 512, (n,), generator=generator) for n in PROMPT_LENGTHS]


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def padded(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    width = max(len(p) for p in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
    return ids, mask


def generate(model: Any, ids: Tensor, mask: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, dim=1)


@pytest.fixture(scope="module")
def expected(original: Any, prompts: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [generate(original, p[None], torch.ones(1, len(p), dtype=torch.long), DECODE_STEPS) for p in prompts]


def test_a_batch_of_unequal_prompts_decodes_as_each_prompt_alone(
    compiled: Any, prompts: list[Tensor], expected: list[tuple[Tensor, Tensor]]
) -> None:
    tokens, logits = generate(compiled, *padded(prompts), DECODE_STEPS)
    for row, (alone, alone_logits) in enumerate(expected):
        assert torch.equal(tokens[row], alone[0]), f"prompt of {PROMPT_LENGTHS[row]} tokens"
        torch.testing.assert_close(logits[row], alone_logits[0], atol=1e-4, rtol=0)
    assert graphs() == 2
    assert not counters["graph_break"]


def test_each_prompt_alone_decodes_the_same_tokens(
    compiled: Any, prompts: list[Tensor], expected: list[tuple[Tensor, Tensor]]
) -> None:
    before = graphs()
    for prompt, (alone, alone_logits) in zip(prompts, expected, strict=True):
        tokens, logits = generate(compiled, *padded([prompt]), 16)
        assert torch.equal(tokens, alone[:, :16])
        torch.testing.assert_close(logits, alone_logits[:, :16], atol=1e-4, rtol=0)
    assert graphs() - before == 2, "one row is a prefill and a decode graph of its own, whatever its length"
    assert not counters["graph_break"]


def test_nothing_recompiles_over_random_batches(compiled: Any) -> None:
    """One row and several are the warm-up; a recompile is an error here."""
    for rows in (1, 2):
        ids, mask = padded([torch.randint(1, 512, (20,))] * rows)
        compiled.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    before = graphs()
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(12):
            rows = [torch.randint(1, 512, (random.randint(2, 60),)) for _ in range(random.randint(1, 4))]
            ids, mask = padded(rows)
            compiled.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert graphs() == before


def test_chunked_prefill_gives_the_tokens_of_a_whole_prefill(
    compiled: Any, prompts: list[Tensor], expected: list[tuple[Tensor, Tensor]]
) -> None:
    """Existing graphs serve a prompt in chunks of 44 and a rest."""
    ids, mask = padded(prompts[-1:])
    got = compiled.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, prefill_chunk_size=44)
    assert torch.equal(got[:, ids.shape[1] :], expected[-1][0][:, :20])
    assert graphs() <= MAX_GRAPHS


@torch.no_grad()  # as in generate: the gradient mode is part of a graph's guards
def step(model: Any, cache: hf.PagedCache, ids: Tensor) -> Tensor:
    """Return logits `[B, vocab]` after the last of `ids` `[B, S]`, through the call that generate makes."""
    inputs = model.prepare_inputs_for_generation(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return model(**inputs, return_dict=True).logits[:, -1]


@pytest.mark.parametrize("split", [[150], [1, 5, 44, 100], [1] * 150], ids=["whole", "chunked", "token-by-token"])
def test_any_split_of_a_prompt_uses_the_same_graphs(compiled: Any, original: Any, split: list[int]) -> None:
    ids = torch.randint(1, 512, (1, 150))
    with torch.no_grad():
        reference = original(ids, use_cache=False).logits[0]
    cache, end = hf.new_cache(compiled), 0
    for piece in ids.split(split, dim=1):
        end += piece.shape[1]
        logits = step(compiled, cache, piece)
        torch.testing.assert_close(logits[0], reference[end - 1], atol=1e-4, rtol=0)
    assert graphs() <= MAX_GRAPHS


def test_a_sequence_over_its_capacity_raises(compiled: Any) -> None:
    cache = hf.new_cache(compiled)
    step(compiled, cache, torch.randint(1, 512, (1, MAX_SEQ_LEN)))
    with pytest.raises(ValueError, match="E204"):
        step(compiled, cache, torch.randint(1, 512, (1, 1)))
