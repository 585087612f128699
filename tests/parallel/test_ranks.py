"""Tests of a model that is split over two and four ranks: processes on this CPU, which run all checks of a world."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.parallel import checks, draft_checks, serving_checks, v41_checks
from tests.parallel.processes import Check, Outcomes, run_on_ranks

EVERYWHERE = (
    checks.prefill_and_decode_are_those_of_one_process,
    checks.rows_of_experts_give_the_same,
    checks.results_are_the_same_bits_on_all_ranks,
    checks.a_rank_keeps_its_part_alone,
    v41_checks.v41_gives_what_one_process_gives,
    v41_checks.v41_a_rank_reads_its_part_of_a_folder,
)
ON_TWO = (
    *EVERYWHERE,
    checks.prompts_of_unequal_length_and_chunks_give_the_same,
    checks.sampled_tokens_are_the_same_with_other_seeds,
    checks.a_model_that_has_its_part_is_converted_as_it_is,
    checks.a_rank_reads_its_part_of_a_checkpoint,
    checks.what_a_part_cannot_do_is_an_error,
    checks.ranks_that_differ_are_told_so,
    checks.an_op_that_differs_on_a_rank_is_found_beside_parts,
    checks.an_engines_layer_is_split,
    checks.an_opaque_all_reduce_without_a_buffer_is_that_of_the_backend,
    checks.a_boundary_adds_up_the_parts_of_all_ranks,
    draft_checks.drafts_give_the_text_of_one_process_without_them,
    draft_checks.accepted_drafts_are_counted_alike_on_all_ranks,
    draft_checks.samples_with_drafts_are_those_of_the_seed_of_rank_0,
    draft_checks.equal_logits_of_two_ranks_choose_the_lowest_id,
    draft_checks.ranks_whose_drafts_differ_are_told_so,
    serving_checks.requests_get_the_text_of_the_whole_model,
    serving_checks.requests_with_drafts_get_their_text_on_all_ranks,
    serving_checks.callers_on_rank_0_stream_cancel_and_fail_alone,
    serving_checks.a_batch_is_led_by_rank_0_alone,
    serving_checks.batches_that_differ_are_made_on_no_rank,
    serving_checks.a_step_that_a_rank_cannot_run_is_launched_on_none,
    serving_checks.an_idle_batch_outlives_the_timeout_of_its_group,
    v41_checks.v41_captures_a_step_with_its_collectives,
    v41_checks.v41_requests_get_the_text_of_the_whole_model,
    v41_checks.v41_compiles_to_one_graph_on_a_rank,
    v41_checks.v41_drafts_of_ranks_are_those_of_one_process,
    v41_checks.v41_calls_that_ranks_make_differently_are_errors,
    v41_checks.v41_what_a_part_cannot_do_is_an_error,
    checks.calls_of_a_model_over_symmetric_memory_are_watched,
    checks.compiled_graphs_neither_break_nor_recompile,
    serving_checks.rank_0_dies_in_a_step_and_the_others_say_so,
)
ON_FOUR = (
    *EVERYWHERE,
    checks.a_batch_invariant_sum_is_in_the_order_of_the_ranks,
    checks.a_rank_that_dies_ends_the_others_with_its_name,
)


def asked_for(request: pytest.FixtureRequest, test: str, checks: Sequence[Check]) -> list[Check]:
    """Return those of `checks` for which this run has a test."""
    names = {item.name for item in request.session.items}
    return [check for check in checks if f"{test}[{check.__name__}]" in names]


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_on_ranks(2, asked_for(request, "test_on_two_ranks", ON_TWO), tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_on_ranks(4, asked_for(request, "test_on_four_ranks", ON_FOUR), tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("name", [check.__name__ for check in ON_TWO])
def test_on_two_ranks(name: str, two_ranks: Outcomes) -> None:
    first = "not finished" if "rank_0_dies" in name else ""
    assert two_ranks[name] == [first, ""], "\n".join(two_ranks[name])


@pytest.mark.parametrize("name", [check.__name__ for check in ON_FOUR])
def test_on_four_ranks(name: str, four_ranks: Outcomes) -> None:
    last = "not finished" if "dies" in name else ""
    assert four_ranks[name] == ["", "", "", last], "\n".join(four_ranks[name])
