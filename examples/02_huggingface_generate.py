"""Generate with a Hugging Face DeepSeek-V4, compiled to one graph for prefill and one for decode.

`convert` works in place and keeps the weights; `model.compile` and `model.generate` work as usual. In a batch of
unequal prompts every prompt gets the tokens that it gets alone, since padding is never stored. Runs in about a minute,
also on a CPU: python examples/02_huggingface_generate.py
"""

from __future__ import annotations

import copy
import time

import torch

import dsv4_compile
from dsv4_compile.hf.tiny import quiet_libraries, tiny_model

PROMPTS = [
    "Attention",
    "One graph for prefill, one for decode.",
    "A longer prompt than the others: from 36 tokens on, the indexer of this CSA layer has to choose its entries.",
]
NEW_TOKENS = 24
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def encode(prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask `[B, S]`, bytes as tokens, padded on the left as by a tokenizer with padding_side="left"."""
    rows = [torch.tensor(list(prompt.encode())) + 1 for prompt in prompts]
    width = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    return ids.to(DEVICE), (ids != 0).long().to(DEVICE)


def main() -> None:
    quiet_libraries()
    # One CSA layer with random weights compiles quickly. `dsv4 demo` has all kinds of layers; a real model comes from
    # DeepseekV4ForCausalLM.from_pretrained(path).
    model = tiny_model(num_hidden_layers=1, layer_types=["compressed_sparse_attention"]).to(DEVICE)
    original = copy.deepcopy(model)

    dsv4_compile.hf.convert(model, max_batch_size=len(PROMPTS), max_seq_len=512)
    model.compile(fullgraph=True, backend="dsv4")

    ids, mask = encode(PROMPTS)
    for what in ("compiling and generating", "generating again"):
        started = time.perf_counter()
        tokens = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
        print(f"{what}: {time.perf_counter() - started:.1f} s")

    for prompt, row in zip(PROMPTS, tokens[:, ids.shape[1] :], strict=True):
        alone = original.generate(encode([prompt])[0], max_new_tokens=NEW_TOKENS, do_sample=False)
        expected = alone[0, -NEW_TOKENS:]
        assert torch.equal(row, expected), f"{row.tolist()} instead of {expected.tolist()}"
        print(f"{len(prompt.encode()):4} tokens in, out: {row[:8].tolist()} ..., equal to eager transformers alone")


if __name__ == "__main__":
    main()
