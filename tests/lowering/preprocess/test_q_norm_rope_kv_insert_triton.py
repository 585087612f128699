"""The Triton that Inductor generates from these lowerings: how many kernels, what they compute, where they compile."""

from __future__ import annotations

import pytest

from tests.lowering.claims import MOST_MOVED, TARGETS, Reports

FUSED = ("both_dynamic", "both_one_token", "halves_dynamic", "float32_kv", "plain_bfloat16", "plain_float32")
FUSED += ("fp8_rows_and_queries", "sliced", "accounting_view", "hostile", "all_padding")


@pytest.mark.parametrize("case", FUSED)
def test_q_and_kv_are_one_kernel_each_with_their_neighbours_fused_in(interpreted: Reports, case: str) -> None:
    report = interpreted[case]
    assert report["launches"] == 2, report["kernels"]
    assert set(report["impls"]) == {"ir"}
    # No copy, clone or reference call around them: in particular no copy of the cache.
    assert report["extern"] == []


def test_a_row_is_read_into_registers_once_with_a_dynamic_token_dim(interpreted: Reports) -> None:
    for case in ("both_dynamic", "halves_dynamic"):
        assert all(name.startswith("triton_per_") for name in interpreted[case]["kernels"]), case


def test_producer_and_consumer_are_part_of_the_kernel(interpreted: Reports) -> None:
    kv, q = interpreted["halves_dynamic"]["kernels"]
    assert "mul" in kv and "kv_rope_insert" in kv
    assert "mul" in q and "q_norm_rope" in q


def test_a_norm_in_front_is_part_of_the_insert_but_for_its_sum(interpreted: Reports) -> None:
    report = interpreted["normed"]
    assert report["launches"] == 3
    assert report["extern"] == []
    sum_of_squares, insert, _ = report["kernels"]
    assert "insert" not in sum_of_squares and "kv_rope_insert" in insert


@pytest.mark.parametrize("case", ["both_dynamic", "halves_dynamic"])
def test_one_graph_serves_every_number_of_tokens(interpreted: Reports, case: str) -> None:
    assert interpreted[case]["graphs"] == 1


@pytest.mark.parametrize("case", [*FUSED, "both_no_token", "normed", "ordered_views"])
def test_cache_bytes_are_those_of_the_reference(interpreted: Reports, case: str) -> None:
    # Every byte of the cache's memory: rows of skipped slots, other pages and page padding keep their values.
    assert interpreted[case]["memory"] == []


@pytest.mark.parametrize("case", [*FUSED, "both_no_token", "normed", "ordered_views"])
def test_queries_are_those_of_the_reference_but_for_the_order_of_a_sum(interpreted: Reports, case: str) -> None:
    # The sum of squares has a different order, which moves the norm by its last bits: one step after rounding to
    # bfloat16 or e4m3 (two where the result is scaled and rounded again), and a unit of 2^-23 of the largest element
    # or two in float32.
    assert max(worst for (worst,) in interpreted[case]["ulps"]) <= 2, interpreted[case]["ulps"]
    assert max(interpreted[case]["moved"]) <= MOST_MOVED, interpreted[case]["outputs"]


def test_a_write_keeps_its_place_between_two_opaque_readers(interpreted: Reports) -> None:
    report = interpreted["ordered_views"]
    assert report["impls"] == ["eager", "ir", "eager"]
    assert report["outputs"] == []
    assert sum("kv_rope_insert" in name for name in report["kernels"]) == 1


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_ahead_of_time(compiled: Reports, target: str) -> None:
    for case, report in compiled.items():
        assert len(report["binaries"][target]) == 2, case
        assert all(size > 0 for size in report["binaries"][target])


def test_no_tokens_launch_nothing(interpreted: Reports) -> None:
    assert interpreted["both_no_token"]["launches"] == 0
