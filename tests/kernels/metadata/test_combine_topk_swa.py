"""The kernel behind `combine_topk_swa` and its list form, bit for bit against the reference, every access checked."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.metadata import combine_topk_swa as kernel
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.testing import assert_bitwise, hostile_indices, padded, strided
from dsv4_compile.testing.batch import Batch, random_batch
from dsv4_compile.testing.samples import op_samples
from tests.ops.metadata.test_combine_topk_swa import arguments
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
OUTPUTS = tuple(f"outputs[{i}]" for i in range(3))


def check(*args: Any) -> None:
    """Both ops on these arguments."""
    for op in ("combine_topk_swa", "combine_topk_swa_ragged"):
        with checked(OUTPUTS) as launched:
            got = launcher(op)(*args)
        assert launched == ["combine_topk_swa_kernel"] * (args[0].shape[0] > 0)
        for ours, theirs in zip(got, REFERENCES[op](*args), strict=True):
            assert_bitwise(ours, theirs, strides=True)


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
def test_samples() -> None:
    for args in op_samples("combine_topk_swa"):
        check(*args)


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize(("window", "ratio", "topk"), [(128, 4, 16), (8, 4, 3), (8, 128, 5), (8, 1, 0), (5, 3, 7)])
def test_random_chunks(window: int, ratio: int, topk: int, hostile: bool, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(2):
        batch = random_batch(rng, max_seq_len=20, max_requests=3)
        n = 20 // ratio if topk else 0
        indices = hostile_indices((batch.num_tokens, topk + 2), n, fraction=0.3 if hostile else 0.0)
        args = arguments(batch, indices, window, ratio, topk, n + 25, n, first=rng.choice((0, 50)))
        if hostile:
            args[3] = hostile_indices(tuple(args[3].shape), 30)
        check(*args)


@interpreted
def test_more_requests_than_are_looked_at_together() -> None:
    batch = Batch((1, *(0,) * 200, 3, *(0,) * 90, 2), (9, *(7,) * 200, 30, *(0,) * 90, 2), padding=1)
    check(*arguments(batch, hostile_indices((7, 4), 8, fraction=0.1), 3, 4, 4, 20, 8))


@interpreted
def test_rows_longer_than_a_program_writes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "MAX_COLUMNS", 32)
    check(*arguments(Batch((9, 3), (70, 3)), hostile_indices((12, 40), 20, fraction=0.2), 30, 4, 40, 90, 20))


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
def test_strides_and_wide_integers_do_not_matter(spread: Any) -> None:
    args = arguments(
        Batch((4, 0, 9), (40, 3, 9), padding=1), hostile_indices((14, 6), 12, fraction=0.3), 8, 4, 5, 40, 12
    )
    check(*(spread(x.long() if i % 2 else x) if isinstance(x, Tensor) else x for i, x in enumerate(args)))


@interpreted
def test_places_beyond_int32_are_padding() -> None:
    check(*arguments(Batch((3, 3), (3, 30)), hostile_indices((6, 4), 9, fraction=0.1), 8, 4, 4, 2**31 - 1, 2**31 - 40))


@interpreted
def test_tokens_in_front_of_all_queries_and_requests_shorter_than_theirs() -> None:
    args = arguments(Batch((5, 6), (3, -2)), hostile_indices((11, 4), 9, fraction=0.1), 8, 2, 4, 40, 9)
    check(*args)


@interpreted
def test_nothing() -> None:
    check(*arguments(Batch((0,), (0,)), torch.empty(0, 4, dtype=torch.int32), 8, 4, 4, 40, 10))
    none = torch.empty(0, dtype=torch.int32)
    check(torch.zeros(2, 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), none, none, 8, 4, 4, 40, 10)


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str) -> None:
    args = arguments(Batch((4, 9), (700, 9)), torch.zeros(13, 512, dtype=torch.int32), 128, 4, 512, 1000, 300)
    with compiled_for(target) as compiled:
        launcher("combine_topk_swa")(*args)
        launcher("combine_topk_swa_ragged")(*args)
    assert len(compiled) == 2
    assert all(binary.assembled for binary in compiled)
