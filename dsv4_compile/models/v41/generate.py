"""Greedy and sampled generation of text: prompts in chunks, then one step for all requests a token."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import check, needs
from ...layout import PAD_INDEX
from ...sizes import check_size
from .cache import V41Caches, V41Format
from .calls import check_caches, check_mode, check_prompts, default_device, ids_of, prompts_of
from .captured import CapturedSteps
from .compiled import CompiledSteps
from .draft_generate import Texts, draft_steps_of, generate_with_drafts, sizes_of, uses_drafts
from .model import V41Model
from .prefill import LEAST_ROWS, prefill, to_device
from .ranks import same_on_ranks, step_of_ranks
from .reading import TokenReading


@torch.no_grad()
def generate(
    model: V41Model,
    prompts: Iterable[Any],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Collection[int] | None = None,
    caches: V41Caches | None = None,
    cache_format: V41Format | None = None,
    chunk: int | None = None,
    mode: str = "tail",
    forward: Callable[..., Tensor] | None = None,
    decode: Callable[..., Tensor] | None = None,
    drafts: bool | None = None,
    starts: Sequence[int] | None = None,
    on_tokens: Callable[[list[int | None]], object] | None = None,
) -> list[list[int]]:
    """Return the new token ids of each prompt, the stop token included.

    Args:
        prompts: token ids of each request, 1-D tensors or lists of different lengths; or a matrix `[R, S]`.
        temperature: 0 chooses the likeliest token; top_k, top_p: as in transformers. Request i draws from `seed + i`,
            so a request's tokens do not depend on the others.
        stop: ids that end a request (None = those of the configuration).
        caches: for at least these requests and lengths; None takes those of compiled steps, else allocates them, in
            `cache_format`.
        chunk, mode, forward, starts: see `prefill`. decode: called for steps of one token a request (None = as
            `forward`).
        drafts: verify the model's drafts, so that a step gives a request 1 to N + 1 tokens (None = where model and
            caches have drafts, and without `decode`). Greedy tokens are the same; samples have the same distribution,
            by other random numbers. `model.draft_statistics` says how many were accepted.
        on_tokens: called with the tokens of each step as they come, None for requests that have ended before. E201 with
            drafts=True; otherwise without drafts.

    Raises as `prefill` does, E211 for logits without a finite largest one, and E208 for drafts=True without drafts.
    """
    with needs("hf", "generation"):
        from ...hf.model.arguments import integer, stop_set
        from ...hf.serving.sampling import NO_TOKEN, RequestSampling, choose_tokens
    with same_on_ranks(model, "generate") as facts:
        new = check_size("max_new_tokens", max_new_tokens)
        check_mode(model)
        ids = [ids_of(prompt, model.config) for prompt in prompts_of(prompts)]
        first = integer("seed", seed, 0)
        settings = [RequestSampling(temperature, top_k, top_p, first + i) for i in range(len(ids))]
        stops, device = stop_set(stop, model.config.vocab_size, model.config), model.device
        facts |= {"max_new_tokens": new, "sampling": repr(settings), "stop": sorted(stops), "prompts": len(ids)}
        if caches is None and isinstance(forward, CompiledSteps):
            caches = forward.caches
        both = caches is not None and cache_format is not None
        check(not both, "E201", got="caches and cache_format", rule="caches have their format")
        if not ids:
            return []
        told = on_tokens is not None
        check(not (told and drafts), "E201", got="on_tokens and drafts=True", rule="steps with drafts call nothing")
        with_drafts = uses_drafts(model, False if told else drafts, caches, decode)
        if caches is None:
            sizes = sizes_of(model, ids, new, chunk, with_drafts)
            caches = model.new_caches(cache_format=cache_format, drafts=with_drafts, **sizes)
        check_caches(model.config, caches)
        checked = check_prompts(caches, ids, None, starts, more=new)
    captured = _captured(model, forward, len(ids)) if decode is None else None
    run = next(step for step in (decode, forward, model) if step is not None)  # a compiled model has no truth value
    logits = prefill(model, ids, caches, starts=starts, chunk=chunk, mode=mode, forward=forward)
    lengths, tokens = [prompt.start + len(prompt.ids) for prompt in checked], [list[int]() for _ in ids]
    model.draft_statistics = None
    if with_drafts:
        draft_steps = draft_steps_of(model, caches, forward, len(ids))
        tokens = generate_with_drafts(draft_steps, logits, lengths, settings, Texts(len(ids), stops, new))
        model.draft_statistics = draft_steps.draft_statistics()
        with same_on_ranks(model, "the end of generate") as facts:
            facts["chosen"] = zlib.crc32(repr(tokens).encode())
        return tokens
    live = [True] * len(ids)
    chosen = choose_tokens(logits, _numbers(settings, device))
    if captured is not None:
        captured.load(
            chosen, to_device(torch.tensor(lengths, device="cpu"), device), torch.arange(len(ids), device=device)
        )
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
        if on_tokens is not None:
            on_tokens([token if live[i] else None for i, token in enumerate(values)])
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
        positions = [lengths[i] + step if live[i] else PAD_INDEX for i in range(len(ids))]
        requests = [i if live[i] else PAD_INDEX for i in range(len(ids))]
        missing = [PAD_INDEX] * (LEAST_ROWS - len(ids))
        rows = (values + missing, positions + missing, requests + missing)
        inputs = [to_device(torch.tensor(numbers, device="cpu"), device) for numbers in rows]
        with step_of_ranks(model), default_device():
            logits = run(*inputs, caches)[: len(ids)]
        chosen = choose_tokens(logits, _numbers(settings, device))
    with same_on_ranks(model, "the end of generate") as facts:
        facts["chosen"] = zlib.crc32(repr(tokens).encode())
    return tokens


def _captured(model: V41Model, forward: Any, requests: int) -> CapturedSteps | None:
    """Return the CUDA graphs of decode steps of this many requests, None where `forward` has none."""
    if not isinstance(forward, CompiledSteps):
        return None
    check(forward.model is model, "E208", got="steps that were compiled of a different model", fix="compile this one")
    captured = forward.captured
    if captured is None or not captured.fits(requests):
        return None
    captured.check()
    return captured


def _numbers(settings: Sequence[Any], device: torch.device) -> Tensor:
    """Return what `choose_tokens` takes for the next token of each request, float64 `[R, 4]`."""
    numbers = torch.tensor([setting.draw() for setting in settings], dtype=torch.float64, device="cpu")
    return to_device(numbers, device)
