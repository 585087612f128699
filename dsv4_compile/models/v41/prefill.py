"""Prompts in chunks, through a causal encoder-decoder: layers after the last source run on a prompt's tail alone.

Later tokens need nothing of these layers but their windows, so a prompt runs them on its last tokens:

| mode | tokens of layers after the last source | logits of the last token, and later tokens |
|---|---|---|
| full | all | exact |
| tail | the last `exact_tail`, 2,414 in V4.1-Flash | exact |
| replay | the last 128, the window | approximate: windows begin at the first of them, as the model was trained to |

The last source itself inserts window rows, entries and keys of all tokens in every mode.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import check
from ...layout import PAD_INDEX
from ...sizes import check_optional_size
from .cache import V41Caches
from .calls import Prompt, check_caches, check_mode, check_prompts, check_settings, default_device, ids_of, prompts_of
from .config import V41Config
from .model import V41Model
from .ranks import same_on_ranks, step_of_ranks
from .step import Tail

MODES = ("full", "tail", "replay")
LEAST_ROWS = 2
"""Fewest tokens of a step, of its tail, and of its logits, with padding: a size of 1 is a graph of torch.compile."""


def tail_length(config: V41Config, mode: str) -> int | None:
    """Return the tokens of a prompt that layers after the last source run, None for all."""
    check(mode in MODES, "E201", got=f"prefill={mode!r}", rule=f"one of {', '.join(MODES)}")
    if mode == "full" or config.last_source >= config.num_layers:
        return None
    return config.exact_tail if mode == "tail" else config.sliding_window


class Chunk(NamedTuple):
    """A step of prompts, as tensors on the CPU.

    Attributes:
        ids, positions, requests: int64 `[T]`.
        tail: rows that layers after the last source run; None for all.
        ends: numbers of prompts that end here, and their row among those that run all layers.
    """

    ids: Tensor
    positions: Tensor
    requests: Tensor
    tail: Tail | None
    ends: list[tuple[int, int]]


class Piece(NamedTuple):
    """Tokens `first` to `last` of a prompt, which a step runs."""

    prompt: Prompt
    first: int
    last: int


def chunk_of(pieces: Sequence[Piece], tail: int | None) -> Chunk:
    """Return the step of these tokens, which fill at least two rows.

    `tail` is the number of a prompt's last tokens that run all layers, None for all of them.
    """
    ids, positions, requests, tail_rows, first, ends, rows = [], [], [], [], [], [], 0
    for number, (prompt, begin, end) in enumerate(pieces):
        at = torch.arange(begin, end) + prompt.start
        tail_begin = 0 if tail is None else max(prompt.start + len(prompt.ids) - tail, 0)
        ids.append(prompt.ids[begin:end])
        positions.append(at)
        requests.append(torch.full((len(at),), prompt.request))
        tail_rows.append((at >= tail_begin).nonzero()[:, 0] + rows)
        # Rows before this prompt's tail are missing, those of an earlier turn are there.
        first.append(torch.full((len(tail_rows[-1]),), tail_begin if tail_begin > prompt.start else 0))
        rows += len(at)
        if end == len(prompt.ids):
            ends.append((number, sum(map(len, tail_rows)) - 1))
    on_tail = None if tail is None else Tail(torch.cat(tail_rows), torch.cat(first))
    return _padded(Chunk(torch.cat(ids), torch.cat(positions), torch.cat(requests), on_tail, ends))


def chunks_of(prompts: Sequence[Prompt], chunk: int, tail: int | None) -> Iterator[Chunk]:
    """Yield steps with up to `chunk` tokens of each prompt."""
    steps = max((-(-len(prompt.ids) // chunk) for prompt in prompts), default=0)
    for number in range(steps):
        begin = number * chunk
        pieces = [Piece(prompt, begin, min(begin + chunk, len(prompt.ids))) for prompt in prompts]
        numbers = [index for index, piece in enumerate(pieces) if piece.first < piece.last]
        step = chunk_of([pieces[index] for index in numbers], tail)
        yield step._replace(ends=[(numbers[index], row) for index, row in step.ends])


def _padded(step: Chunk) -> Chunk:
    """Return a step with at least two tokens, and two of its tail if it has one."""
    short = len(step.ids) < LEAST_ROWS or (step.tail is not None and len(step.tail.rows) == 1)
    if not short:
        return step
    ids, positions, requests = (
        torch.nn.functional.pad(values, (0, 1), value=value)
        for values, value in ((step.ids, 0), (step.positions, PAD_INDEX), (step.requests, PAD_INDEX))
    )
    tail = step.tail
    if tail is not None and len(tail.rows):
        tail = Tail(
            torch.nn.functional.pad(tail.rows, (0, 1), value=len(step.ids)), torch.nn.functional.pad(tail.first, (0, 1))
        )
    return Chunk(ids, positions, requests, tail, step.ends)


@torch.no_grad()
def prefill(
    model: V41Model,
    prompts: Iterable[Any],
    caches: V41Caches,
    *,
    requests: Sequence[int] | None = None,
    starts: Sequence[int] | None = None,
    chunk: int | None = None,
    mode: str = "tail",
    forward: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Run prompts through the model and return the float32 logits `[R, V]` of their last tokens.

    Args:
        prompts: token ids of each request, 1-D tensors or lists, at least one token each; or a matrix `[R, S]`.
        requests: row of the caches of each prompt (None = 0, 1, 2...).
        starts: tokens that each request already has in the caches (None = 0).
        chunk: most tokens of a request in one step (None = `caches.max_step_tokens`).
        mode: see the module.
        forward: called in place of the model, such as what `compile` returns.

    Raises E204 for prompts that do not fit the caches, E201 for ids outside the vocabulary, and E208 for image tokens,
    a model in training mode, caches of a different one, and torch.autocast.
    All ranks of a split model make the same call, E702 on all of them otherwise.
    """
    with same_on_ranks(model, "prefill") as facts:
        check_mode(model)
        tail = tail_length(model.config, mode)
        check_caches(model.config, caches)
        size = min(check_optional_size("chunk", chunk) or caches.max_step_tokens, caches.max_step_tokens)
        check_settings(model.device)
        ids = [ids_of(prompt, model.config) for prompt in prompts_of(prompts)]
        checked = check_prompts(caches, ids, requests, starts)
        facts |= facts_of(checked) | {"chunk": size, "mode": mode}
    run = model if forward is None else forward
    logits = torch.empty(len(checked), model.config.vocab_size, dtype=torch.float32, device=model.device)
    with default_device():
        for step in chunks_of(checked, size, tail):
            result = run_chunk(model, run, caches, step)
            for row, (index, _) in enumerate(step.ends):
                logits[index] = result[row]
    return logits


def run_chunk(
    model: V41Model, run: Callable[..., Tensor], caches: V41Caches, step: Chunk, rows: Sequence[int] | None = None
) -> Tensor:
    """Run a step of prompts by the model or what `compile` returns.

    Returns logits `[N, V]` that begin with those of `rows` among the tokens that run all layers (None = the `ends`).
    """
    ids, positions, requests = (to_device(values, model.device) for values in (step.ids, step.positions, step.requests))
    if step.tail is not None and not len(step.tail.rows):
        with step_of_ranks(model):
            getattr(run, "encode", model.encode)(ids, positions, requests, caches)
        return torch.empty(0, model.config.vocab_size, device=model.device)
    tail = None if step.tail is None else Tail(*(to_device(values, model.device) for values in step.tail))
    wanted = [row for _, row in step.ends] if rows is None else [*rows]
    last = to_device(torch.tensor(wanted + [0] * (LEAST_ROWS - len(wanted)), dtype=torch.int64), model.device)
    with step_of_ranks(model):
        return run(ids, positions, requests, caches, tail=tail, last=last)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the CPU to a device, from pinned memory to a GPU, so that the host does not wait."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def facts_of(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return what ranks must have in common of prompts."""
    digest = zlib.crc32(repr([prompt.ids.tolist() for prompt in prompts]).encode())
    return {"rows": [(prompt.request, prompt.start, len(prompt.ids)) for prompt in prompts], "tokens": digest}
