"""`diverge_ranks` on two ranks, which are processes with a gloo group that run all checks of `rank_checks`."""

from __future__ import annotations

import pytest
import torch

import dsv4_compile
from tests.debug import rank_checks
from tests.parallel.processes import Outcomes, run_on_ranks

CHECKS = (
    rank_checks.equal_ranks_agree,
    rank_checks.other_epsilon_is_found_at_its_op,
    rank_checks.other_weight_is_found_before_the_step,
    rank_checks.other_op_is_found_where_it_runs,
    rank_checks.other_op_with_the_same_result_is_found_too,
    rank_checks.difference_by_rounding_is_none,
    rank_checks.parts_are_compared_after_a_collective,
    rank_checks.a_rank_that_fails_is_named_on_all,
)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_on_ranks(2, CHECKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_on_two_ranks(name: str, two_ranks: Outcomes) -> None:
    assert not any(two_ranks[name]), "\n".join(two_ranks[name])


def test_without_a_process_group_it_is_an_error() -> None:
    with pytest.raises(dsv4_compile.DSV4Error, match=r"E701[\s\S]*no process group"):
        dsv4_compile.debug.diverge_ranks(torch.neg, torch.ones(2))
