"""Schema, check and fake of `torch.ops.dsv4.accept_drafts`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...cpu.drafts import accept_drafts as cpu
from ...reference.drafts import accept_drafts as reference
from ...selection.costs import FLOAT32, INT32, INT64, CostModel
from ..common.define import define
from ..common.invariance import AS_IT_IS, Invariance
from ..common.validate import FLOATS, expect, expect_dim
from ..common.validate_batch import expect_positive
from .requests import expect_requests

_OP = "accept_drafts"


def _check(
    logits: Tensor,
    drafts: Tensor,
    draft_logits: Tensor | None,
    numbers: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> None:
    expect(logits, f"{_OP}: logits [R * (N + 1), V]", FLOATS)
    expect(drafts, f"{_OP}: drafts [R, N]", torch.int64)
    requests, count = drafts.shape
    expect_dim(logits.shape[0], requests * (count + 1), f"{_OP}: logits has N + 1 rows for each request")
    expect_positive(_OP, **{"columns of logits": logits.shape[1]})
    expect_requests(_OP, requests, numbers, seeds, positions)
    if draft_logits is not None:
        expect(draft_logits, f"{_OP}: draft_logits [R, N, V]", torch.float32)
        for dim, (size, name) in enumerate(((requests, "requests"), (count, "drafts"), (logits.shape[1], "tokens"))):
            expect_dim(draft_logits.shape[dim], size, f"{_OP}: draft_logits and other arguments have the same {name}")


def _fake(
    logits: Tensor,
    drafts: Tensor,
    draft_logits: Tensor | None,
    numbers: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    requests, count = drafts.shape
    return drafts.new_empty((requests,), dtype=torch.int32), drafts.new_empty((requests, count + 1))


accept_drafts = define(
    "accept_drafts",
    reference=reference.accept_drafts,
    on_cpu=cpu.accept_drafts,
    fake=_fake,
    check=_check,
    kernel="dsv4_compile.kernels.drafts.accept_drafts",
    # N is the vocabulary, K the drafts of a request.
    cost=CostModel(
        lambda R, N, K, e=2: (R * (N * (e * (K + 1) + FLOAT32 * K) + INT64 * (2 * K + 7) + INT32), 0),
    ),
    invariant=Invariance(
        rows=("drafts", "draft_logits", "numbers", "seeds", "positions"),
        grouped=("logits",),
        on_cpu=AS_IT_IS,
        kernel=AS_IT_IS,
    ),
)
