"""Schema, check and fake of `torch.ops.dsv4.markov_drafts`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...cpu.drafts import markov_drafts as cpu
from ...reference.drafts import markov_drafts as reference
from ...selection.costs import FLOAT32, INT64, CostModel
from ..common.define import define
from ..common.invariance import ALONE, AS_IT_IS, Invariance
from ..common.validate import FLOATS, expect, expect_dim
from ..common.validate_batch import expect_positive
from .requests import expect_requests

_OP = "markov_drafts"


def _check(
    base_logits: Tensor,
    anchors: Tensor,
    w1: Tensor,
    w2: Tensor,
    numbers: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> None:
    expect(base_logits, f"{_OP}: base_logits [R, N, V]", FLOATS)
    requests, count, vocabulary = base_logits.shape
    expect_positive(_OP, drafts=count, **{"tokens of base_logits": vocabulary})
    expect(anchors, f"{_OP}: anchors [R]", torch.int64)
    expect_dim(anchors.shape[0], requests, f"{_OP}: anchors has one element for each request")
    expect(w1, f"{_OP}: w1 [V, rank]", FLOATS)
    expect(w2, f"{_OP}: w2 [V, rank]", w1.dtype)
    for name, weight in (("w1", w1), ("w2", w2)):
        expect_dim(weight.shape[0], vocabulary, f"{_OP}: {name} has a row for each token of base_logits")
    expect_dim(w2.shape[1], w1.shape[1], f"{_OP}: w1 and w2 have the same rank")
    expect_positive(_OP, rank=w1.shape[1])
    expect_requests(_OP, requests, numbers, seeds, positions)


def _fake(
    base_logits: Tensor,
    anchors: Tensor,
    w1: Tensor,
    w2: Tensor,
    numbers: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    shape = base_logits.shape
    return anchors.new_empty(shape[:2]), base_logits.new_empty(shape, dtype=torch.float32)


markov_drafts = define(
    "markov_drafts",
    reference=reference.markov_drafts,
    on_cpu=cpu.markov_drafts,
    fake=_fake,
    check=_check,
    kernel="dsv4_compile.kernels.drafts.markov_drafts",
    # N is the vocabulary, K the drafts of a request, D the rank; every draft reads its `w2` once for all requests.
    cost=CostModel(
        lambda R, D, N, K, e=2: (
            R * K * (N * (e + FLOAT32) + e * D + INT64) + e * K * N * D + R * 7 * INT64,
            2 * R * K * N * D,
        ),
    ),
    invariant=Invariance(
        rows=("base_logits", "anchors", "numbers", "seeds", "positions"), on_cpu=ALONE, kernel=AS_IT_IS
    ),
)
