"""Logits of a compiled V4-Flash in bfloat16 are no farther from float32 than those of eager transformers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from dsv4_compile import hf
from dsv4_compile.hf.tiny import FLASH, layers_in_turn, random_model, tiny_config

LAYERS, EXPERTS, BATCH, PROMPT, STEPS = 4, 32, 4, 200, 24
"""Float32 weights of this size are 14 GB."""


def cast(model: Any, dtype: torch.dtype, only: str = "") -> Any:
    """Return `model` with floating parameters with `only` in their names in `dtype`."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and only in name:
            tensor.data = tensor.data.to(dtype)
    return model


@torch.no_grad()
def logits(model: Any, tokens: Tensor) -> Tensor:
    """Return float32 logits `[B, steps, vocabulary]` of the last token of the prompt and of each token after it."""
    out = model(tokens[:, :PROMPT], use_cache=True)
    steps, cache = [out.logits[:, -1].float()], out.past_key_values
    for position in range(PROMPT, tokens.shape[1]):
        out = model(tokens[:, position : position + 1], past_key_values=cache, use_cache=True)
        steps.append(out.logits[:, -1].float())
    return torch.stack(steps, 1)


def test_logits_are_no_farther_from_float32_than_those_of_eager_transformers() -> None:
    device = torch.device("cuda")
    config = tiny_config(**FLASH | layers_in_turn(LAYERS) | {"n_routed_experts": EXPERTS})
    model = cast(random_model(config, device), torch.bfloat16, "norm")
    wide = cast(copy.deepcopy(model), torch.float32)
    ids = torch.randint(1, config.vocab_size, (BATCH, PROMPT), device=device)
    tokens = wide.generate(ids, max_new_tokens=STEPS, do_sample=False, eos_token_id=None)[:, :-1]
    want = logits(wide, tokens)
    del wide
    eager = logits(model, tokens)
    cast(model, torch.float32, "norm")
    hf.convert(model, max_batch_size=BATCH, max_seq_len=512, attention_only=False)
    model.compile(backend="dsv4", fullgraph=True)
    ours = logits(model, tokens)
    for requests in (slice(0, 1), slice(1, None)):
        wrong, theirs = (float((x[:, requests] - want[:, requests]).norm()) for x in (ours, eager))
        assert 0 < wrong <= theirs
    right = [int((x.argmax(-1) == want.argmax(-1)).sum()) for x in (ours, eager)]
    assert right[0] >= right[1]
