"""Generate several tokens a step: a model that counts, with DSpark draft layers fitted to it, both trained here.

The model is trained by eager transformers on numbers in words, a byte a token, and its draft layers in plain PyTorch
against its frozen hidden states, before `convert` attaches them. `generate` then verifies five drafts a step and gives
the text that it gives without them. Runs in one to two minutes on a CPU: python examples/09_drafts.py
With --quick the model counts to twenty, in half of the time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from dsv4_compile import hf
from dsv4_compile.columns import table, terminal_width
from dsv4_compile.hf.model.cache import CACHE_NAME
from dsv4_compile.hf.tiny import quiet_libraries, tiny_drafts, tiny_model

QUICK = "--quick" in sys.argv
NUMBERS = 20 if QUICK else 100
SEQUENCES, LENGTH, STEPS, DRAFT_STEPS = (8, 64, 80, 100) if QUICK else (16, 96, 200, 250)
"""Sequences of a training step, their tokens, and steps that train the model and its drafts."""
BLOCKS = 8
"""Blocks of drafts that a training step takes from a sequence."""
NEW_TOKENS = 120
PROMPTS = ["seven eight nine ", "three four ", "fourteen fifteen sixteen "]
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "compressed_sparse_attention"],
    "num_hash_layers": 0,
    "n_routed_experts": 4,
    "q_lora_rank": 32,
    "o_lora_rank": 16,
    "index_n_heads": 4,
    "index_head_dim": 16,
}
WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"""


def number_words(number: int) -> str:
    """Return a number from 0 to 99 in words."""
    words = WORDS.split()
    if number < 20:
        return words[number]
    tens, ones = divmod(number, 10)
    return words[18 + tens] + (f"-{words[ones]}" if ones else "")


def encode(text: str) -> Tensor:
    """Return the bytes of a text as token ids."""
    return torch.tensor(list(text.encode()))


def decode(ids: Tensor) -> str:
    """Return the text of token ids."""
    return bytes(ids.tolist()).decode()


def batch(text: Tensor) -> Tensor:
    """Return random pieces `[SEQUENCES, LENGTH]` of a text that repeats."""
    return text[(torch.randint(len(text), (SEQUENCES, 1)) + torch.arange(LENGTH)) % len(text)]


def fit(what: str, module: nn.Module, steps: int, loss: Callable[[], Tensor]) -> None:
    """Minimise `loss()` over all parameters of `module`."""
    module.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(module.parameters(), betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    started = time.perf_counter()
    for _ in range(steps):
        value = loss()
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    module.eval().requires_grad_(False)
    print(f"{what}: {steps} steps in {time.perf_counter() - started:.0f} s, loss {value.item():.2f}", flush=True)


class Context:
    """Stands in for a cache: gives each draft layer's attention context rows before the rows of the block."""

    def __init__(self, rows: list[Tensor]) -> None:
        self.rows = rows

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, **_: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values `[B, 1, W + N, D]`, which are the same tensor in DeepSeek-V4."""
        rows = torch.cat((self.rows[layer_idx], keys), 2)
        return rows, rows


def draft_loss(model: Any, drafts: Any, ids: Tensor, taps: Tensor) -> Tensor:
    """Return the cross entropy of drafts in random blocks of sequences, in plain differentiable PyTorch.

    Args:
        ids: `[B, S]`.
        taps: `[B, S, layers * D]`, hidden states of the model after the layers that drafts read.
    """
    stack, window, count = drafts.model, model.config.sliding_window, drafts.num_drafts
    sequence = torch.arange(len(ids)).repeat_interleave(BLOCKS)[:, None]
    first = torch.randint(1, ids.shape[1] - count, (len(sequence), 1))
    block, context = first + torch.arange(count), first + torch.arange(-window, 0)

    def rope(positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = stack.rotary_emb(taps, position_ids=positions, layer_type="main")
        return cos, sin

    main, everywhere = drafts.main_norm(drafts.main_proj(taps)), rope(torch.arange(ids.shape[1])[None])
    rows = []
    for layer in stack.layers:
        attention = layer.self_attn
        kv = apply_rotary_pos_emb(attention.kv_norm(attention.kv_proj(main))[:, None], *everywhere)
        rows.append(kv[sequence, 0, context.clamp(min=0)][:, None])
    missing = torch.zeros(context.shape).masked_fill(context < 0, -torch.inf)
    mask = pad(missing, (0, count))[:, None, None].expand(-1, -1, count, -1)

    tokens = torch.full(block.shape, drafts.settings.noise_token)
    tokens[:, :1] = ids[sequence, first]
    streams = model.model.embed_tokens(tokens).unsqueeze(2).repeat(1, 1, model.config.hc_mult, 1)
    inputs = {"position_embeddings": {"main": rope(block)}, "position_ids": block, "attention_mask": mask}
    for layer in stack.layers:
        streams = layer(streams, **inputs, **{CACHE_NAME: Context(rows)})
    logits = model.lm_head(stack.norm(stack.hc_head(streams)))
    logits = logits + drafts.markov_w1[ids[sequence, block]] @ drafts.markov_w2.t()
    return cross_entropy(logits.flatten(0, 1), ids[sequence, block + 1].flatten())


def train() -> tuple[Any, Any]:
    """Return a model of transformers that counts, and draft layers for it."""
    text = encode("".join(f"{number_words(number)} " for number in range(NUMBERS)))
    model: Any = tiny_model(**SIZES)

    def model_loss() -> Tensor:
        ids = batch(text)
        logits = model(ids, use_cache=False).logits
        return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    fit("model", model, STEPS, model_loss)

    drafts: Any = tiny_drafts(model, stages=1)
    taps: dict[int, Tensor] = {}
    hooks = [
        model.model.layers[i].register_forward_hook(lambda *call, i=i: taps.update({i: call[-1].mean(2)}))
        for i in drafts.tap_layers
    ]

    def loss_of_drafts() -> Tensor:
        ids = batch(text)
        with torch.no_grad():
            model(ids, use_cache=False)
        return draft_loss(model, drafts, ids, torch.cat([taps[i] for i in drafts.tap_layers], 2))

    fit("drafts", drafts, DRAFT_STEPS, loss_of_drafts)
    for hook in hooks:
        hook.remove()
    return model, drafts


def generate(model: Any, ids: Tensor, **options: Any) -> tuple[Tensor, float]:
    """Return new tokens `[n]` and ms a token, of the second of two calls; the first one compiles."""
    for _ in range(2):
        started = time.perf_counter()
        out = model.generate(ids[None], max_new_tokens=NEW_TOKENS, do_sample=False, **options)
        seconds = time.perf_counter() - started
    return out[0, len(ids) :], seconds / NEW_TOKENS * 1e3


def main() -> None:
    quiet_libraries()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads make so small a model slower
    model, drafts = train()
    ids = encode(PROMPTS[0])
    expected, eager_ms = generate(model, ids)
    rows = [["eager transformers", f"{eager_ms:.2f}", "1", "-"]]

    hf.convert(model, drafts=drafts, max_batch_size=1, max_seq_len=256, attention_only=False)
    model.compile(fullgraph=True, backend="dsv4")
    for drafted in (True,) if QUICK else (False, True):
        tokens, ms = generate(model, ids, drafts=drafted)
        assert torch.equal(tokens, expected), f"{decode(tokens)!r} instead of {decode(expected)!r}"
        rows.append([f"compiled, {'with' if drafted else 'without'} drafts", f"{ms:.2f}", "1", "-"])
    statistics = model.draft_statistics
    rows[-1][2:] = f"{statistics.tokens_per_step:.2f}", " ".join(f"{share:.2f}" for share in statistics.acceptance)
    print(f"\n{PROMPTS[0]}|{decode(tokens)}\n")
    headers = ["the same text by", "ms a token", "tokens a step", f"accepted, drafts 1 to {drafts.num_drafts}"]
    print(*table(headers, rows, terminal_width()), sep="\n")
    assert statistics.tokens_per_step > 2

    # A running batch verifies the drafts of all its requests in one step.
    running = hf.RunningBatch(model, slots=len(PROMPTS))
    requests = [running.submit(encode(prompt), max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
    running.run()
    print(f"\n{len(requests)} requests in one batch: {running.draft_statistics}")
    assert requests[0].tokens == expected.tolist()


if __name__ == "__main__":
    main()
