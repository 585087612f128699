"""The indexer's choice on a second stream, beside the projection of q, which does not need it.

    entries = choose_aside(indexer, qr, weights, ...)     # the second stream goes on from here
    q = wq_b(qr)                                          # the first one meanwhile
    join(q, entries, qr, weights)                         # and waits here

Streams are switched inside of ops, so nothing of it depends on what a compiler makes of streams: Inductor starts its
kernels on the stream that it found at the beginning. Events order both streams, so a capture records a fork and a join.
A CPU has one stream: the same ops run one after the other.

On an H200 it gains nothing beside merged ops, which is why it is an option: V4-Flash's CSA layer with 16k tokens of
context takes 92, 103, 133 and 184 us for 1, 8, 32 and 128 tokens without it, 93, 103, 134 and 186 with it, and 92, 104,
135 and 190 with a second stream of higher priority. q's weights are read by all multiprocessors at once: kernels that
start beside get their turn when that one ends. What had been worth a stream, the norms, the insert and both
compressors, is one launch of 5 us (`dsv4 bench decode_step --only layer=CSA --only impl="graph,graph aside"`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .. import ops  # noqa: F401  (registers torch.ops.dsv4)
from .linear import linear

POOL = 32
"""Streams that torch has of a device. It hands them out in turn, and the first one again after the last."""
_TAKEN: set[tuple[torch.device, int]] = set()
"""Streams that somebody computes on: those that have a second one, and the second ones."""


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The second stream of the current one. Layers share it: each waits for its own part before the next one starts.

    It is nobody else's second stream. Where the pool has no other left it is the current one: nothing overlaps then.
    """
    current = torch.cuda.current_stream(device)
    return _beside(device, current.cuda_stream) or current


@functools.cache
def _beside(device: torch.device, stream: int) -> torch.cuda.Stream | None:
    _TAKEN.add((device, stream))
    for _ in range(POOL):
        found = torch.cuda.Stream(device)
        if (device, found.cuda_stream) not in _TAKEN:
            _TAKEN.add((device, found.cuda_stream))
            return found
    return None


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Launch on the second stream, behind all that the current one has been given so far.

    That first wait is also why memory allocated here needs no record of who reads it: whoever gets it next on this
    stream starts behind everything that the other one did with it. Hence a second stream for each, on which nobody else
    computes.
    """
    if device.type != "cuda":
        yield
        return
    stream = side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


@torch.library.custom_op("dsv4_stream::choose_aside", mutates_args=())
def choose_aside(
    qr: Tensor,
    wq_b: Tensor,
    wq_b_scale: Tensor | None,
    quantize_input: bool,
    weights: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    token_to_req: Tensor,
    context_lens: Tensor,
    block_size: int,
    cache_format: str,
    hadamard: bool,
    topk: int,
    main_block_table: Tensor | None,
    is_valid_token: Tensor,
    main_block_size: int,
) -> tuple[Tensor, Tensor]:
    """Project, rotate and quantise the indexer's queries, score and select, on the second stream.

    `join` before anything reads the result, or changes or frees an argument.

    Args:
        qr: `[T, Q]`, the normed query latent. wq_b: `[Hi * Di, Q]`, e4m3 with `wq_b_scale`.
        weights: float32 `[T, Hi]`, of heads, not rounded yet.
        main_block_table: of the main cache, for slots; None for entries of the request.
    Others:
        See `torch.ops.dsv4.indexer_topk_slots`.
    Returns:
        What that op returns; without `main_block_table` the result of `indexer_logits_topk`, and no lengths.
    """
    with aside(qr.device):
        if wq_b_scale is None:
            q = linear(qr, wq_b)
        else:
            q = torch.ops.dsv4.fp8_linear(qr, wq_b, wq_b_scale, quantize_input)
        q = q.unflatten(-1, (weights.shape[1], -1))
        values, scale, weights = torch.ops.dsv4.indexer_q_rope_quant(
            q, positions, cos_sin, weights, cache_format, hadamard, True
        )
        batch = (k_cache, block_table, token_to_req, context_lens, block_size, cache_format, topk)
        if main_block_table is None:
            chosen = torch.ops.dsv4.indexer_logits_topk(values, scale, weights, *batch)
            return chosen, chosen.new_empty(0)
        slots, lens = torch.ops.dsv4.indexer_topk_slots(
            values, scale, weights, *batch, main_block_table, is_valid_token, main_block_size
        )
        return slots, lens


@choose_aside.register_fake
def _(
    qr: Tensor,
    wq_b: Tensor,
    wq_b_scale: Tensor | None,
    quantize_input: bool,
    weights: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    token_to_req: Tensor,
    context_lens: Tensor,
    block_size: int,
    cache_format: str,
    hadamard: bool,
    topk: int,
    main_block_table: Tensor | None,
    *_: object,
) -> tuple[Tensor, Tensor]:
    tokens = qr.shape[0]
    lens = qr.new_empty(0 if main_block_table is None else tokens, dtype=torch.int32)
    return qr.new_empty(tokens, topk, dtype=torch.int32), lens


@torch.library.custom_op("dsv4_stream::join", mutates_args={"x"})
def join(x: Tensor, kept: Sequence[Tensor]) -> None:
    """Let the current stream wait for the second one.

    Args:
        x: what is computed meanwhile and read afterwards. It is said to be written, so that a compiler leaves the wait
            between the two; nothing is.
        kept: what the second stream reads and writes: memory that a compiler may not use again before the wait.
    """
    if x.is_cuda:
        torch.cuda.current_stream(x.device).wait_stream(side_stream(x.device))
