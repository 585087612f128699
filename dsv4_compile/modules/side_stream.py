"""Selection of the indexer on a side stream, in parallel with the projection of q, which does not need it.

    entries = select_on_side_stream(indexer, qr, weights, ...)     # forks here
    q = wq_b(qr)                                                   # on the current stream meanwhile
    join(q, entries, qr, weights)                                  # waits here

Streams are switched inside of ops, so nothing depends on how a compiler treats streams: Inductor launches its kernels
on the stream that was current at the beginning. Events order both streams, so a capture records a fork and a join. On a
CPU the same ops run one after the other.
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
"""Number of streams in torch's pool of a device. It hands them out in turn, the first one again after the last."""
_USED: set[tuple[torch.device, int]] = set()
"""Streams that have a side stream, and the side streams."""


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the side stream of the current one. Layers share it: each joins before the next one forks.

    No two streams share a side stream. When the pool has no unused stream left, it is the current stream itself, and
    nothing overlaps.
    """
    current = torch.cuda.current_stream(device)
    return _unused_stream(device, current.cuda_stream) or current


@functools.cache
def _unused_stream(device: torch.device, stream: int) -> torch.cuda.Stream | None:
    _USED.add((device, stream))
    for _ in range(POOL):
        unused = torch.cuda.Stream(device)
        if (device, unused.cuda_stream) not in _USED:
            _USED.add((device, unused.cuda_stream))
            return unused
    return None


@contextmanager
def on_side_stream(device: torch.device) -> Iterator[None]:
    """Launch on the side stream, after all work that the current stream has so far.

    Because of that wait, memory allocated here needs no `record_stream`: its next user on the side stream starts after
    everything that the current stream did with it. This holds only while no other stream has the same side stream.
    """
    if device.type != "cuda":
        yield
        return
    stream = side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


@torch.library.custom_op("dsv4_stream::select", mutates_args=())
def select_on_side_stream(
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
    extra_block_table: Tensor | None,
    is_valid_token: Tensor,
    extra_block_size: int,
) -> tuple[Tensor, Tensor]:
    """Project, rotate and quantise the indexer's queries, score the entries and select, on the side stream.

    Call `join` before anything reads the result, or changes or frees an argument.

    Args:
        qr: `[T, Q]`, the normed query latent.
        wq_b: `[Hi * Di, Q]`, e4m3 with `wq_b_scale`.
        weights: float32 `[T, Hi]`, of heads, not rounded yet.
        extra_block_table: block table of the extra cache, to return slots; None to return entries of the request.
    Others:
        See `torch.ops.dsv4.indexer_topk_slots`.
    Returns:
        Slots and lengths of `indexer_topk_slots`; without `extra_block_table` the entries of `indexer_logits_topk`, and
        an empty tensor.
    """
    with on_side_stream(qr.device):
        if wq_b_scale is None:
            q = linear(qr, wq_b)
        else:
            q = torch.ops.dsv4.fp8_linear(qr, wq_b, wq_b_scale, quantize_input)
        q = torch.unflatten(q, -1, (weights.shape[1], -1))
        values, scale, weights = torch.ops.dsv4.indexer_q_rope_quant(
            q, positions, cos_sin, weights, cache_format, hadamard, True
        )
        batch = (k_cache, block_table, token_to_req, context_lens, block_size, cache_format, topk)
        if extra_block_table is None:
            entries = torch.ops.dsv4.indexer_logits_topk(values, scale, weights, *batch)
            return entries, entries.new_empty(0)
        slots, lens = torch.ops.dsv4.indexer_topk_slots(
            values, scale, weights, *batch, extra_block_table, is_valid_token, extra_block_size
        )
        return slots, lens


@select_on_side_stream.register_fake
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
    extra_block_table: Tensor | None,
    *_: object,
) -> tuple[Tensor, Tensor]:
    tokens = qr.shape[0]
    lens = qr.new_empty(0 if extra_block_table is None else tokens, dtype=torch.int32)
    return qr.new_empty(tokens, topk, dtype=torch.int32), lens


@torch.library.custom_op("dsv4_stream::join", mutates_args={"x"})
def join(x: Tensor, kept: Sequence[Tensor]) -> None:
    """Make the current stream wait for its side stream.

    Args:
        x: computed before the wait and read after it. The schema marks it as written, so that a compiler keeps the wait
            between the two; nothing is written.
        kept: memory that the side stream reads and writes, which a compiler must not reuse before the wait.
    """
    if x.is_cuda:
        torch.cuda.current_stream(x.device).wait_stream(side_stream(x.device))
