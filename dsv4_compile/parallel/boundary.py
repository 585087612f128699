"""`mhc_boundary` on the output of a split sub-layer, in one launch with the all-reduce before it.

The launch of the boundary reads the parts of all ranks through symmetric memory. More tokens than it takes, and devices
without its kernel, run the all-reduce and then `mhc_boundary`. `passes.fuse_streams` makes calls of this op.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import fail
from ..ops.common.kernels import kernel_module, runs_kernel
from ..ops.hyper_connections.mhc_pre import fake_pre
from ..reference.hyper_connections.mhc_boundary import MhcBoundary
from .collectives import gather_objects
from .ranks import Ranks

OP = "mhc_boundary"
POLLS = 64_000_000
"""Polls of a CTA before it gives up on a rank: some 17 s on an H200."""


class _Exchange(NamedTuple):
    """Addresses in the symmetric memory of all ranks, and memory of this rank, see `kernels.device.exchange.Peers`.

    `memory` keeps what the addresses point to.
    """

    rank: int
    mailboxes: tuple[int, ...]
    fault: Tensor
    failed: Tensor
    memory: tuple[Any, ...] = ()


_exchanges: dict[tuple[str, torch.device], _Exchange] = {}


def prepare(ranks: Ranks, device: torch.device) -> None:
    """Allocate mailboxes, and exchange their addresses with all ranks; `symmetric.prepare` does it."""
    _exchanges.pop((ranks.name, device), None)
    if not runs_kernel(OP, device):
        return
    from .._compat import symmetric_memory

    memory: Any = symmetric_memory
    kernels = kernel_module(OP)
    words = 2 * ranks.size * kernels.EXCHANGE_CTAS * kernels.MAILBOX_WORDS
    boxes: Tensor = memory.empty(words, dtype=torch.int32, device=device).zero_()
    handle = memory.rendezvous(boxes, ranks.name)
    failed = torch.zeros(1, dtype=torch.int32, device=device)
    fault = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    torch.cuda.synchronize(device)
    gather_objects(None, ranks)  # mailboxes are zeros on every rank before one is filled
    at = tuple(map(int, handle.buffer_ptrs))
    _exchanges[ranks.name, device] = _Exchange(ranks.rank, at, fault, failed, (boxes, handle))


def check_arrived(groups: frozenset[str]) -> None:
    """Raise E705 if a rank of one of `groups` did not come to an exchange of an earlier step."""
    for (name, _), exchange in _exchanges.items():
        if name in groups and (late := int(exchange.fault)):
            fail(
                "E705",
                got=f"rank {late - 1} of group {name} did not come to an all-reduce of rank {exchange.rank}",
                why="it has ended, or has run a different step; what this rank has computed since then is not valid",
                fix="look at the output of that rank, and start all ranks again",
            )


@torch.library.custom_op("dsv4_collectives::all_reduce_mhc_boundary", mutates_args=())
def all_reduce_mhc_boundary(
    streams: Tensor,
    output: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run `mhc_boundary` on the sum of `output` over the ranks of the group `name`.

    The same bits as `dsv4_collectives::all_reduce` and `dsv4::mhc_boundary`: the sum is rounded between them.
    """
    check_arrived(frozenset({name}))
    mix = fn, base, scale, norm_weight, norm_eps, hc_eps, iterations
    exchange = _exchanges.get((name, streams.device))
    if exchange is not None:
        kernels = kernel_module(OP)
        a = MhcBoundary(streams, output, post, comb, *mix)
        if not kernels.why_unsupported_over_ranks(a):
            _, boxes, fault, failed, _ = exchange
            peers = kernels.Peers(boxes, fault.data_ptr(), failed, POLLS)
            fused: tuple[Tensor, Tensor, Tensor, Tensor] = kernels.all_reduce_mhc_boundary(a, peers, exchange.rank)
            return fused
    summed = torch.ops.dsv4_collectives.all_reduce(output.contiguous(), name)
    apart: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.dsv4.mhc_boundary(streams, summed, post, comb, *mix)
    return apart


@all_reduce_mhc_boundary.register_fake
def _(streams: Tensor, output: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return streams.new_empty(streams.shape), *fake_pre(streams)
