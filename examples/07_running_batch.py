"""Serve requests of different lengths through the slots of one running batch of a Hugging Face DeepSeek-V4.

Requests join when a slot is free and leave at their last token; long prompts are prefilled in chunks between decode
steps. Each request has its own sampling, stop tokens and stream, and gets the tokens that it gets alone. On a GPU the
steps are compiled and captured. A small random model, in seconds on a CPU: python examples/07_running_batch.py
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from dsv4_compile import hf
from dsv4_compile.hf.tiny import quiet_libraries, tiny_model

REQUESTS, SLOTS, MAX_SEQ_LEN, CHUNK = 12, 4, 256, 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKEND = "dsv4" if DEVICE == "cuda" else None


def submit(batch: hf.RunningBatch, seed: int) -> hf.Request:
    """Queue a random request: every third one samples."""
    rng = random.Random(seed)
    prompt = [rng.randrange(1, 512) for _ in range(rng.choice([4, 20, 60, 100]))]
    sampling = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": seed} if seed % 3 == 0 else {}
    return batch.submit(prompt, max_new_tokens=rng.randint(8, 24), **sampling)


def throughput(model: Any, slots: int) -> tuple[list[hf.Request], float]:
    """Return the requests after they ran through `slots`, and their new tokens a second."""
    batch = hf.RunningBatch(model, slots=slots, prefill_chunk=CHUNK, backend=BACKEND)
    batch.submit([1, 2, 3], max_new_tokens=2)
    batch.run()  # compiles and captures, where it does
    requests = [submit(batch, seed) for seed in range(REQUESTS)]
    started = time.perf_counter()
    batch.run()
    return requests, sum(len(request.tokens) for request in requests) / (time.perf_counter() - started)


def main() -> None:
    quiet_libraries()
    # A real model comes from DeepseekV4ForCausalLM.from_pretrained(path), or hf.load(path) alone.
    model = tiny_model(num_hidden_layers=1, layer_types=["compressed_sparse_attention"]).to(DEVICE)
    hf.convert(model, max_batch_size=1, max_seq_len=MAX_SEQ_LEN, attention_only=False)

    together, fast = throughput(model, SLOTS)
    single, slow = throughput(model, 1)
    assert [request.tokens for request in together] == [request.tokens for request in single]
    print(f"{REQUESTS} requests on {DEVICE}: {fast:.0f} tokens/s through {SLOTS} slots, {slow:.0f} through one")
    print("each request has the tokens that it has alone")

    batch = hf.RunningBatch(model, slots=SLOTS, prefill_chunk=CHUNK, backend=BACKEND)
    stop = together[1].tokens[5]
    counts: list[int] = []
    stopped = batch.submit(together[1].prompt, max_new_tokens=64, stop_tokens=[stop], on_token=counts.append)
    cancelled = batch.submit(together[2].prompt, max_new_tokens=64)
    stream = iter(stopped)  # a step of the whole batch for each token
    print("streamed:", next(stream), next(stream), end=" ")
    cancelled.cancel()
    print(*stream)
    print(f"{stopped!r} ended at its stop token; {cancelled!r} left its slot")
    assert counts == stopped.tokens and stopped.tokens[-1] == stop and batch.idle


if __name__ == "__main__":
    main()
