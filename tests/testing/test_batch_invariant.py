"""Ops that claim it give a row the same bits in any call, and `check_batch_invariant` sees those that do not."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4_compile.cpu import native
from dsv4_compile.errors import CompileError
from dsv4_compile.ops.common.define import OPS, REFERENCES
from dsv4_compile.ops.common.invariance import CLAIMS, STEP_TOKENS, TOKENS_ON_CPU
from dsv4_compile.testing import check_batch_invariant
from dsv4_compile.testing.samples import op_samples

LONG = bool(os.environ.get("DSV4_LONG"))
CLAIMED = sorted(op for op, claims in CLAIMS.items() if claims.rows and (claims.on_cpu or claims.exact))


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """Build the C++ kernels, as the first compilation does."""
    native.build()


@pytest.mark.parametrize("op", CLAIMED)
def test_rows_of_an_op_have_the_bits_that_they_have_alone(op: str, gemms_by_size: None) -> None:
    assert check_batch_invariant(op, compositions=20 if LONG else 3).rows > 0


def test_a_step_promises_nothing_for_larger_calls(gemms_by_size: None) -> None:
    x, weight = torch.randn(STEP_TOKENS + 1, 24), torch.randn(8, 24)
    step = [(x[:STEP_TOKENS], weight, 1), (x, weight, 1)]
    check_batch_invariant("grouped_linear", step[:1], level="step")
    check_batch_invariant("grouped_linear", step, level="tokens")


@pytest.mark.parametrize("op", ["moe_experts", "grouped_linear", "markov_drafts", "mhc_pre"])
def test_references_whose_gemms_follow_the_number_of_rows_are_seen(op: str, gemms_by_size: None) -> None:
    names = [argument.name for argument in OPS[op]._schema.arguments]
    rows = [names.index(name) for name in CLAIMS[op].rows]
    with pytest.raises(AssertionError, match="other bits alone"):
        check_batch_invariant(REFERENCES[op], op_samples(op), rows=rows)


def in_order(x: Tensor) -> Tensor:
    """Sum each row from its first column to its last."""
    return functools.reduce(torch.add, x.unbind(1))


def split_by_batch(x: Tensor) -> Tensor:
    """Sum each row in as many parts as fit the number of rows."""
    parts = max(1, 8 // x.shape[0])
    return in_order(torch.stack([in_order(columns) for columns in x.chunk(parts, 1)], 1))


def tile_by_tokens(x: Tensor) -> Tensor:
    """Sum a row from its end where it is in the last, incomplete tile of four rows."""
    tiled = x.shape[0] // 4 * 4
    return torch.cat([in_order(x[:tiled]), in_order(x[tiled:].flip(1))])


def largest_of_all(x: Tensor) -> Tensor:
    """Scale each row by the largest element of the call."""
    return x / x.nan_to_num().abs().max()


@pytest.mark.parametrize("broken", [split_by_batch, tile_by_tokens, largest_of_all])
def test_functions_that_break_it_are_seen(broken: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(AssertionError, match=r"row \d+ in position \d+ of \d+.* elements differ"):
        check_batch_invariant(broken, [(torch.randn(6, 100),)], rows=[0])


def test_a_form_that_sums_by_the_number_of_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TOKENS_ON_CPU.moe_route  # type: ignore[attr-defined]

    def by_tokens(x: Tensor, *args: object) -> tuple[Tensor, Tensor]:
        ids, weights = right(x, *args)
        return ids, weights * (1 + 2**-20 * (len(x) > 16))

    monkeypatch.setattr(TOKENS_ON_CPU, "moe_route", by_tokens)
    with pytest.raises(AssertionError, match="moe_route on sample 0"):
        check_batch_invariant("moe_route")


def test_a_neighbour_of_nan_is_seen() -> None:
    with pytest.raises(AssertionError, match="nan"):
        check_batch_invariant(lambda x: x + 0 * x.sum(), [(torch.ones(6, 4),)], rows=[0])


def test_ops_without_a_claim_and_other_targets_are_refused() -> None:
    with pytest.raises(CompileError, match=r"(?s)E303.*sparse_mla_prefill"):
        check_batch_invariant("sparse_mla_prefill")
    for target in (3, "no_op", torch.nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="E201"):
            check_batch_invariant(target)
    with pytest.raises(ValueError, match=r"(?s)E201.*compile the model in place"):
        check_batch_invariant(torch.compile(torch.nn.Linear(2, 2)))
    for args in ((torch.ones(6, 4), 2), torch.ones(6, 4)):
        with pytest.raises(ValueError, match=r"(?s)E201.*list of argument tuples"):
            check_batch_invariant(torch.mul, args, rows=[0])
