"""`torch.ops.dsv4.mhc_post`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...cpu.hyper_connections import mhc_post as cpu
from ...reference.hyper_connections import mhc_post as reference
from ...selection.costs import CallSizes, CostModel
from ..common.define import Traced, define
from ..common.invariance import AS_IT_IS, Invariance
from ..common.validate import FLOATS, expect, expect_dim
from .mhc_pre import coefficients


def check_post(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor, op: str = "mhc_post") -> None:
    """Raise E201 where the arguments of `mhc_post`, on behalf of `op`, are wrong."""
    expect(streams, f"{op}: streams [T, N, D]", FLOATS)
    expect(output, f"{op}: output [T, D]", streams.dtype)
    expect(post, f"{op}: post [T, N]", torch.float32)
    expect(comb, f"{op}: comb [T, N, N]", torch.float32)
    tokens, count, dim = streams.shape
    for name, tensor in (("output", output), ("post", post), ("comb", comb)):
        expect_dim(tensor.shape[0], tokens, f"{op}: {name} and streams have the same tokens")
    expect_dim(output.shape[1], dim, f"{op}: output has the last dim of streams")
    for name, size in (("post", post.shape[1]), ("comb", comb.shape[1]), ("comb", comb.shape[2])):
        expect_dim(size, count, f"{op}: {name} has a coefficient for each stream")


def _fake(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return streams.new_empty(streams.shape)


mhc_post = define(
    "mhc_post",
    reference=reference.mhc_post,
    on_cpu=cpu.mhc_post,
    fake=_fake,
    check=check_post,
    lowering=Traced(static=("streams",)),
    cost=CostModel(
        lambda T, D, G, e=2: (T * (e * (2 * G + 1) * D + coefficients(G)), 0),
        sizes=CallSizes.of_streams,
    ),
    invariant=Invariance(rows=("streams", "output", "post", "comb"), elementwise=True, on_cpu=AS_IT_IS),
)
