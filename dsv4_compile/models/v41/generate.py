"""Greedy and sampled generation of text: prompts in chunks, then one step for all requests a token."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import check, needs
from ...layout import PAD_INDEX
from ...sizes import check_size
from .cache import V41Caches, V41Format
from .captured import CapturedSteps
from .compiled import CompiledSteps
from .model import V41Model
from .prefill import LEAST_ROWS, check_prompts, prefill, to_device
from .ranks import same_on_ranks, step_of_ranks


@torch.no_grad()
def generate(
    model: V41Model,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Sequence[int] | None = None,
    caches: V41Caches | None = None,
    cache_format: V41Format | None = None,
    chunk: int | None = None,
    mode: str = "tail",
    forward: Callable[..., Tensor] | None = None,
    decode: Callable[..., Tensor] | None = None,
) -> list[list[int]]:
    """Return the new token ids of each prompt, the stop token included.

    Args:
        prompts: token ids of each request, 1-D tensors or lists of different lengths.
        temperature: 0 chooses the likeliest token; top_k, top_p: as in transformers. Request i draws from `seed + i`,
            so a request's tokens do not depend on the others.
        stop: ids that end a request (None = those of the configuration).
        caches: for at least these requests and lengths; None takes those of compiled steps, else allocates them, in
            `cache_format`.
        chunk, mode, forward: see `prefill`. decode: called for steps of one token a request (None = as `forward`).

    Raises as `prefill` does, and E211 for logits without a finite largest one.
    """
    with needs("hf", "generation"):
        from ...hf.serving.sampling import NO_TOKEN, RequestSampling, choose_tokens
    with same_on_ranks(model, "generate") as facts:
        new = check_size("max_new_tokens", max_new_tokens)
        settings = [RequestSampling(temperature, top_k, top_p, seed + i) for i in range(len(prompts))]
        stops, device = set(model.config.eos_token_id if stop is None else stop), model.device
        facts |= {"max_new_tokens": new, "sampling": repr(settings), "stop": sorted(stops), "prompts": len(prompts)}
        if not prompts:
            return []
        if caches is None and isinstance(forward, CompiledSteps):
            caches = forward.caches
        if caches is None:
            longest = max(len(prompt) for prompt in prompts)
            caches = model.new_caches(
                max_batch_size=len(prompts), max_seq_len=longest + new, max_step_tokens=chunk, cache_format=cache_format
            )
        checked = check_prompts(model.config, caches, prompts, None, None, more=new)
    captured = _captured(model, forward, len(prompts)) if decode is None else None
    run = next(step for step in (decode, forward, model) if step is not None)  # a compiled model has no truth value
    logits = prefill(model, prompts, caches, chunk=chunk, mode=mode, forward=forward)
    lengths, tokens = [len(prompt.ids) for prompt in checked], [list[int]() for _ in prompts]
    live = [True] * len(prompts)
    chosen = choose_tokens(logits, _numbers(settings, device))
    if captured is not None:
        captured.load(chosen, to_device(torch.tensor(lengths), device), torch.arange(len(prompts), device=device))
    for step in range(new):
        reading, is_last = TokenReading(chosen), step == new - 1
        if captured is not None and not is_last:
            # Before the host knows these tokens: a request that ends with them runs one token too many.
            with step_of_ranks(model):
                logits, chosen = captured.step()
            if not all(setting.greedy for setting in settings):
                chosen = choose_tokens(logits, _numbers(settings, device), chosen)
                captured.choose(chosen)
        values = reading.tokens()
        for i, token in enumerate(values):
            if live[i]:
                why = "a NaN in the weights, or a position beyond the caches"
                check(token != NO_TOKEN, "E211", got=f"logits of request {i} without a finite largest one", why=why)
                tokens[i].append(token)
                live[i] = token not in stops
                if captured is not None and not live[i]:
                    captured.stop(i)
        if not any(live) or is_last:
            break
        if captured is not None:
            continue
        positions = [lengths[i] + step if live[i] else PAD_INDEX for i in range(len(prompts))]
        requests = [i if live[i] else PAD_INDEX for i in range(len(prompts))]
        missing = [PAD_INDEX] * (LEAST_ROWS - len(prompts))
        rows = (values + missing, positions + missing, requests + missing)
        inputs = [to_device(torch.tensor(numbers), device) for numbers in rows]
        with step_of_ranks(model):
            logits = run(*inputs, caches)[: len(prompts)]
        chosen = choose_tokens(logits, _numbers(settings, device))
    with same_on_ranks(model, "the end of generate") as facts:
        facts["chosen"] = zlib.crc32(repr(tokens).encode())
    return tokens


def _captured(model: V41Model, forward: Any, requests: int) -> CapturedSteps | None:
    """Return the CUDA graphs of decode steps of this many requests, None where `forward` has none."""
    captured = forward.captured if isinstance(forward, CompiledSteps) else None
    if captured is None or not captured.fits(requests):
        return None
    captured.check()
    return captured


def _numbers(settings: Sequence[Any], device: torch.device) -> Tensor:
    """Return what `choose_tokens` takes for the next token of each request, float64 `[R, 4]`."""
    numbers = torch.tensor([setting.draw() for setting in settings], dtype=torch.float64)
    return to_device(numbers, device)


class TokenReading:
    """Chosen tokens int64 `[R]` on their way to the host, which waits for this copy alone."""

    def __init__(self, tokens: Tensor) -> None:
        self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=tokens.is_cuda)
        self._host.copy_(tokens, non_blocking=True)
        self._copied = torch.cuda.Event() if tokens.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def tokens(self) -> list[int]:
        """Return the tokens, after the work that chooses them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()
