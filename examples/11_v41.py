"""DeepSeek-V4.1 on a tiny model: an official folder, its report, a compiled step, drafts, and ways to run a prompt.

The folder is written in DeepSeek's formats (32x32 e4m3 blocks, MXFP4 experts, n-gram tables) and loaded from there, as
a published one would be. Runs in about a minute on a CPU: python examples/11_v41.py
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from typing import Any

import torch

from dsv4_compile.columns import table, terminal_width
from dsv4_compile.doctor import examine_folder, render
from dsv4_compile.models import v41
from dsv4_compile.models.v41.tiny import TINY_DRAFTS, tiny_model

SIZES: dict[str, Any] = {
    "num_layers": 5,
    "compress_ratios": (0, 2, 1, 1, 1),
    "kv_sources": (1, 2),
    "index_sources": (1, 2, 3),
    "candidate_source": 2,
    "engram_layers": (1,),
    "engram_rows": (434,),
}
"""Window only, ratio 2 with an engram, ratio 1 with candidates, and two layers that select inside them."""
DRAFTS = replace(TINY_DRAFTS, stages=1, taps=(2, 3, 4))
NEW_TOKENS = 12


def main() -> None:
    original = tiny_model(**SIZES, drafts=DRAFTS)
    with tempfile.TemporaryDirectory() as folder:
        v41.save_folder(original, folder)
        print(render(examine_folder(folder)))
        # A published folder has a tokenizer, which gives the compressed ids of tokens.
        model = v41.load(folder, device="cpu", dtype=torch.float32, token_map=original.token_map)

    prompts = [torch.randint(64, (length,), generator=torch.Generator().manual_seed(length)) for length in (40, 25)]
    settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "stop": ()}
    eager = v41.generate(model, prompts, **settings)  # with drafts, which the steps below do without
    drafts = model.draft_statistics  # of draft layers that nobody trained
    step = torch.compile(model, fullgraph=True, dynamic=True, backend="dsv4")
    started = time.perf_counter()
    compiled = v41.generate(model, prompts, **settings, mode="full", decode=step)
    seconds = time.perf_counter() - started
    assert compiled == eager, f"{compiled} instead of {eager}"
    print(f"\ncompiled in {seconds:.0f} s, the same tokens: {compiled[0]}")
    print(f"with drafts, the same tokens too: {drafts}")
    print(f"sampled: {v41.generate(model, prompts, **settings, temperature=1.0, seed=7)[0]}")

    exact = v41.prefill(model, prompts, model.new_caches(max_batch_size=2, max_seq_len=64), mode="full")
    rows = []
    for mode in ("full", "tail", "replay"):
        caches = model.new_caches(max_batch_size=2, max_seq_len=64, max_step_tokens=16)
        logits = v41.prefill(model, prompts, caches, mode=mode)
        rows.append([mode, f"{(logits - exact).abs().max():.1e}", f"{caches.nbytes_per_token:.0f}"])
    print(f"\nlayers after {model.config.last_source} need {model.config.exact_tail} tokens of a prompt")
    headers = ["prompt", "largest difference of logits", "bytes a token"]
    print(*table(headers, rows, terminal_width()), sep="\n")


if __name__ == "__main__":
    main()
