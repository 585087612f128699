"""Tests of text tables: widths, lines broken between words, equal cells merged."""

from __future__ import annotations

import pytest

from dsv4_compile import columns

PATH = "examples/03_finding_graph_breaks.py:40"
SENTENCE = "C++ of it takes longer to compile than it saves; dsv4.impl=ir uses it all the same"
NODES = [[str(i), f"{i * 7.25:.2f}", "-", "aten._scaled_dot_product_attention", "", PATH] for i in range(9, 12)]
HEADERS = ["node", "us", "gap", "op", "kernel", "line"]


@pytest.mark.parametrize("width", [72, 80, 96, 120])
def test_no_word_is_broken_while_all_fit(width: int) -> None:
    lines = list(columns.table(["op", "reason"], [["compress_norm_rope_insert", SENTENCE], ["inv_rope", PATH]], width))
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    assert PATH in words and all(word in words for word in SENTENCE.split())


def test_columns_that_fit_are_not_wrapped() -> None:
    lines = list(columns.table(HEADERS, NODES, 120))
    assert len(lines) == 1 + len(NODES)
    assert all(line.endswith(PATH) for line in lines[1:])


def test_long_names_are_broken_after_separators() -> None:
    lines = list(columns.table(HEADERS, NODES, 70))
    assert max(map(len, lines)) <= 70
    pieces = [line.split()[-1] for line in lines[1:]]
    assert pieces[0].endswith(("/", "_")) and "".join(pieces[: len(pieces) // 3]).endswith(":40")


@pytest.mark.parametrize("word", ["x" * 300, "x" * 100_000, "a/" * 200, "", " ", "\u200b" * 200])
def test_any_cell_ends_in_lines(word: str) -> None:
    lines = list(columns.table(["op", "line"], [[word, PATH], [PATH, word]], 60))
    assert len(lines) < 400 and max(map(len, lines)) <= 60 + columns._LONGEST_PIECE


def test_numbers_are_aligned_right_and_text_left() -> None:
    assert list(columns.table(["op", "us"], [["mul", "7.0"], ["masked_fill", "10.5"], ["add", "-"]], 80)) == [
        "op             us",
        "mul           7.0",
        "masked_fill  10.5",
        "add             -",
    ]


def test_rows_with_equal_last_cells_share_one_that_wraps_beside_them() -> None:
    rows = [["gather", SENTENCE], ["inv_rope", SENTENCE], ["route", "no kernel"], ["topk", "no kernel"]]
    lines = list(columns.table(["op", "reason"], rows, 60, merge=True))
    assert [line.split()[0] for line in lines] == ["op", "gather", "inv_rope", "route", "topk"]
    assert " ".join(line[10:] for line in lines[1:3]) == SENTENCE
    assert lines[3:] == ["route     no kernel", "topk"]
    apart = list(columns.table(["op", "reason"], rows, 60))
    assert len(apart) == 1 + 2 + 2 + 1 + 1


@pytest.mark.parametrize(("variable", "width"), [("80", 80), ("20", columns.NARROWEST), ("900", columns.WIDEST)])
def test_the_width_is_that_of_the_terminal_within_limits(
    variable: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", variable)
    assert columns.terminal_width() == width


def test_columns_without_text_are_left_out() -> None:
    rows = [["mul", "", "7"], ["add", "", ""]]
    assert list(columns.table(["op", "kernel", "us"], rows, 80)) == ["op   us", "mul   7", "add"]


def test_empty_tables_have_no_lines() -> None:
    assert list(columns.table([], [], 80)) == []
    assert list(columns.table(["op", "us"], [], 80)) == ["op  us"]
