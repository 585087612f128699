"""Results of a router are compared in units of their rows, not of memory."""

from __future__ import annotations

import torch

from dsv4_compile.bench import router


def test_strides_of_a_single_row_mean_nothing() -> None:
    ids, weights = torch.rand(4, 256).topk(6)[1].int(), torch.rand(4, 6)
    padded = torch.empty(1, 256, dtype=torch.int32)[:, :6].copy_(ids[:1])
    assert router.differs([ids[:1], weights[:1]], [padded, weights[:1]]) == ""
    strided = torch.empty(4, 12, dtype=torch.int32)[:, ::2].copy_(ids)
    assert "the reference gives" in router.differs([ids, weights], [strided, weights])
