"""Tables of figures in README and docs follow from their records, and a record that no page shows is not kept."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from dsv4_compile.errors import InputError
from tests.tools import figures

PAGES = [figures.ROOT / "README.md", *sorted((figures.ROOT / "dsv4_compile" / "docs").rglob("*.md"))]
README = PAGES[0]
PERFORMANCE = figures.ROOT / "dsv4_compile" / "docs" / "performance.md"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Return a copy of the records that may be changed."""
    return Path(shutil.copytree(figures.RESULTS, tmp_path / "results"))


def change(results: Path, record: str, **columns: Any) -> dict[str, Any]:
    """Change the first row of a record that has these columns, and return it."""
    path = results / figures.RECORDS[record]
    record_json = json.loads(path.read_text())
    row = next(row for row in record_json["rows"] if all(row.get(name) == value for name, value in columns.items()))
    row |= {"us": 1234.4, "cold_us": 2345.4, "date": "2031-01-02T00:00:00+00:00", "commit": "0123abc"}
    path.write_text(json.dumps(record_json))
    return row


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_show_what_their_records_give(page: Path) -> None:
    assert page.read_text() == figures.with_figures(page.read_text(), page), "run `make docs`"


def test_every_table_and_every_record_is_shown_by_a_page() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert set(re.findall(r"<!-- figures: (\S+) -->", text)) == set(figures.FIGURES)
    shown = {record for figure in figures.FIGURES.values() for record in figure.records}
    assert shown == set(figures.RECORDS)
    files = {path.name for path in figures.RESULTS.iterdir()}
    assert set(figures.RECORDS.values()) - {figures.RECORDS[name] for name in figures.ONCE_MEASURED} <= files
    assert files <= set(figures.RECORDS.values())


@pytest.mark.parametrize("page", [README, PERFORMANCE], ids=["README", "performance"])
def test_a_table_of_numbers_is_a_block_of_figures(page: Path) -> None:
    by_hand = re.sub(r"(?s)<!-- figures: \S+ -->.*?<!-- end -->", "", page.read_text())
    cells = [cell.strip() for line in by_hand.splitlines() if line.startswith("|") for cell in line.split("|")]
    assert [cell for cell in cells if re.match(r"\d+([.,]\d+)?( (us|ms|s|/).*)?$", cell)] == []


def test_a_claim_has_the_numbers_of_the_tables_of_its_section() -> None:
    introduction, *sections = re.split(r"(?m)^## ", PERFORMANCE.read_text())
    whole = next(section for section in sections if section.startswith("Whole models"))
    wrong, count = [], 0
    for text in (introduction + whole, *sections):
        tables = "".join(re.findall(r"(?s)<!-- figures: \S+ -->(.*?)<!-- end -->", text))
        claims = re.sub(r"(?s)<!-- figures: \S+ -->.*?<!-- end -->", "", text)
        claims = re.sub(r"(?m)^\[\^\w+\]: .*\n( {4}.*\n)*", "", claims)  # footnotes
        numbers = re.findall(r"(?<![\w.])\d+\.\d+(?![\w.]*\d)", claims)
        count += len(numbers)
        wrong += [number for number in numbers if not re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", tables)]
    assert wrong == [] and count > 5


def test_every_row_of_a_record_says_when_and_of_which_commit_and_warm_from_cold() -> None:
    for path in sorted(figures.RESULTS.iterdir()):
        record = json.loads(path.read_text())
        assert record["rows"] and "commit" in record, path.name
        assert [row for row in record["rows"] if not row["date"] or not row["commit"]] == [], path.name
        # Times of kernels and layers: "us" is warm, "cold_us" is cold or, where that was not measured, None.
        timed = [row for row in record["rows"] if row.get("us") is not None]
        assert [row for row in timed if "cold_us" not in row] == [], path.name


def test_a_block_that_differs_from_its_record_is_found() -> None:
    text = PERFORMANCE.read_text()
    wrong = re.sub(r"\| SWA \| bfloat16 \| \d", "| SWA | bfloat16 | 9", text)
    assert wrong != text and figures.with_figures(wrong, PERFORMANCE) == text


def test_a_changed_record_changes_the_table_and_its_source(results: Path) -> None:
    change(results, "decode_step", layer="SWA", weights="bfloat16", end="together", tokens=1, impl="graph")
    text = figures.block("layers", README, results)
    assert "| SWA | bfloat16 | 1234 / 2345 |" in text
    assert "2026-11-26 to 2031-01-02;" in text and "commit 0123abc" in text.replace("\n", " ")
    assert text != figures.block("layers", README)


def test_the_stack_is_in_milliseconds_with_cold_times_of_graphs_alone(results: Path) -> None:
    for impl in ("graph", "eager"):
        change(results, "decode_step", layer="stack", weights="fp8", end="together", tokens=1, impl=impl)
    text = figures.block("stack", README, results)
    assert "| e4m3 | one CUDA graph | 1.2 / 2.3 |" in text
    assert "| e4m3 | eager ops | 1.2 |" in text


def test_kernels_have_warm_and_cold_times_floors_and_peers(results: Path) -> None:
    row = change(results, "sparse_mla_decode", heads=128, fused="none", tokens=512, impl="triton")
    peer = change(results, "sparse_mla_decode", heads=128, fused="none", tokens=512, impl="flash_mla")
    lines = figures.block("kernels", README, results).split("\n")
    (line,) = (text for text in lines if text.startswith("| decode attention, 128 heads"))
    _, tokens, warm, cold, floor, peers = line.strip("| ").split(" | ")
    assert tokens.endswith("/ 512") and warm.endswith("/ 1,234") and cold.endswith("/ 2,345")
    assert floor.endswith(f"/ {row['floor_us']:.0f}") and peers.startswith("FlashMLA ") and peers.endswith("/ 1,234")
    assert peer["us"] == 1234.4


def test_a_row_without_a_time_shows_its_status(results: Path) -> None:
    path = results / figures.RECORDS["decode_step"]
    record = json.loads(path.read_text())
    for row in record["rows"]:
        row |= {"us": None, "status": "wrong"}
    path.write_text(json.dumps(record))
    assert "| SWA | bfloat16 | wrong |" in figures.block("layers", README, results)


def test_a_missing_row_and_an_unknown_table_are_errors(results: Path) -> None:
    path = results / figures.RECORDS["decode_step"]
    record = json.loads(path.read_text())
    record["rows"] = [row for row in record["rows"] if row["tokens"] != 8]
    path.write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"no row with .*'tokens': 8"):
        figures.block("layers", README, results)
    with pytest.raises(InputError, match=r"README\.md: figures 'none'"):
        figures.with_figures("<!-- figures: none -->\n<!-- end -->", README)


def around(results: Path, record: str, *rows: dict[str, Any]) -> None:
    """Write a record of these rows, as examples/benchmarks/around_attention.py does."""
    of = {"machine": "A GPU, 132 multiprocessors", "torch": "2.13.0", "triton": "3.7.1", "date": "2031-01-02T00:00:00"}
    more = {"status": "ok", "floor_us": 3.0, "date": "2031-01-02T00:00:00", "commit": "0123abc"}
    text = json.dumps(of | {"commit": "0123abc", "rows": [more | row for row in rows]})
    (results / figures.RECORDS[record]).write_text(text)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("experts", "around_attention.py"),
        ("around", "around_attention.py"),
        ("rank_layers", "one_rank.py --parts attention"),
        ("rank_stages", "one_rank.py --parts attention"),
        ("rank_whole", "one_rank.py --parts whole"),
    ],
)
def test_a_table_without_its_record_says_how_to_measure_it(name: str, command: str, results: Path) -> None:
    for record in figures.ONCE_MEASURED:
        (results / figures.RECORDS[record]).unlink(missing_ok=True)
    said = f"Not measured yet: `python examples/benchmarks/{command}`."
    assert figures.block(name, PERFORMANCE, results) == said


def test_layers_of_one_rank_have_a_column_for_each_number_of_ranks_and_the_share_of_the_largest(results: Path) -> None:
    of = {"layer": "SWA", "tokens": 32}
    one = {"ranks": 1, "us": 50.2, "cold_us": 60.0, "of_one": 1.0}
    eight = {"ranks": 8, "us": 25.1, "cold_us": None, "of_one": 0.5}
    failed = {"layer": "CSA", "tokens": 32, "ranks": 8, "us": None, "cold_us": None, "status": "failed"}
    around(results, "one_rank_attention", of | one, of | eight, failed)
    assert figures.block("rank_layers", PERFORMANCE, results).split("\n")[:4] == [
        "| layer | batch | 1 rank | 8 ranks | share of 1 rank at 8, warm / cold | floor at 8 |",
        "|---|---|---|---|---|---|",
        "| SWA | 32 | 50 / 60 | 25 / - | 0.50 / - | 3 |",
        "| CSA | 32 | - / - | failed | failed | 3 |",
    ]


def test_stages_of_a_layer_say_what_ranks_split_and_what_they_take_on_the_fewest_and_the_most(results: Path) -> None:
    def row(layer: str, ranks: int, tokens: int = 32, **us: float) -> dict[str, Any]:
        stages = {name.replace("_of_", "of ").replace("wo", "wo_"): {"us": time} for name, time in us.items()}
        return {"layer": layer, "tokens": tokens, "ranks": ranks, "us": 9.0, "details": {"stages": stages}}

    one = row("SWA", 1, _of_latent=8.0, attention=9.04, woa=17.0)
    rest = row("SWA", 2, attention=7.0), row("SWA", 8, attention=5.0, woa=4.0), row("SWA", 8, 128, attention=99.0)
    around(results, "one_rank_attention", one, *rest, row("CSA", 8, indexer=7.5))
    lines = figures.block("rank_stages", PERFORMANCE, results).split("\n")
    assert lines[0] == "| stage | split by | SWA: 1 / 8 ranks | CSA: 1 / 8 ranks |"
    assert lines[4] == "| `wq_b`; the indexer's is whole | heads | 8.0 / - |  |"
    assert lines[6:9] == [
        "| scores and top-k | no |  | - / 7.5 |",
        "| attention | heads | 9.0 / 5.0 |  |",
        "| `wo_a` | groups | 17.0 / 4.0 |  |",
    ]


def test_steps_of_a_whole_rank_are_beside_the_floor_of_its_weights(results: Path) -> None:
    of = {"layers": 43, "ranks": 2, "step_ms": 4.96, "weights_gb": 6.27, "floor_ms": 1.5, "read_ms": 7.04}
    counts = {"nodes": 640, "graph_launches": 1, "launches": 2}
    around(results, "one_rank_whole", of | {"batch": 1} | counts, of | {"batch": 8})
    assert figures.block("rank_whole", PERFORMANCE, results).split("\n")[2:4] == [
        "| 43 | 2 | 1 | 5.0 | 1.5 | 6.3 | 7.0 | 640 | 1 | 2 |",
        "| 43 | 2 | 8 | 5.0 | 1.5 | 6.3 | 7.0 | - | - | - |",
    ]


def test_experts_have_cold_times_floors_and_peers(results: Path) -> None:
    of = {"op": "moe_experts", "weights": "bfloat16", "shared": "none"}
    times = {"us": 4.0, "cold_us": 5.0}
    around(
        results,
        "experts",
        of | {"tokens": 1, "impl": "triton"} | times,
        of | {"tokens": 1, "impl": "marlin", "us": None, "status": "unavailable"},
        of | {"tokens": 8, "impl": "triton"} | times | {"cold_us": 234.4, "floor_us": 120.0},
        of | {"tokens": 8, "impl": "triton", "shared": "e4m3"} | times | {"cold_us": 999.0},
    )
    assert figures.block("experts", PERFORMANCE, results).split("\n")[:5] == [
        "| weights | implementation | 1 token | 8 tokens |",
        "|---|---|---|---|",
        "| bfloat16 | floor | 3.0 | 120 |",
        "| bfloat16 | dsv4_compile | 5.0 | 234 |",
        "| bfloat16 | `marlin` | unavailable | - |",
    ]


def test_routers_and_hyper_connections_are_beside_transformers(results: Path) -> None:
    route, boundary = {"op": "moe_route", "routing": "bias", "gate": "float32"}, {"op": "mhc_boundary"}
    for record, of in (("router", route), ("mhc", boundary)):
        pairs = [{"tokens": n, "impl": impl} for n in (1, 8) for impl in ("triton", "transformers")]
        around(results, record, *(of | pair | {"us": 4.0, "cold_us": 5.0 + i} for i, pair in enumerate(pairs)))
    text = figures.block("around", PERFORMANCE, results)
    assert "| `moe_route`, routing bias, gate float32 | 1 / 8 | 5.0 / 7.0 | 3.0 / 3.0 | 6.0 / 8.0 |" in text
    assert "| `mhc_boundary` | 1 / 8 | 5.0 / 7.0 | 3.0 / 3.0 | 6.0 / 8.0 |" in text
    assert "A GPU;" in text and "commit 0123abc" in text.replace("\n", " ")


def test_links_are_relative_to_the_page() -> None:
    assert "(../../examples/results/soak_h200.json)" in figures.block("soak", PERFORMANCE)
    assert "(examples/results/soak_h200.json)" in figures.block("soak", README)
