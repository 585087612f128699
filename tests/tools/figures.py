"""Render the tables of figures in README and docs from records: `make docs` writes them, a test compares them.

A page marks a block by `<!-- figures: NAME -->` and `<!-- end -->`; NAME is one of `FIGURES`. A block is a table and a
line with its command, machine, versions, dates and record. `RECORDS` names the records, in examples/results.
"""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4_compile.bench.record import Record
from dsv4_compile.errors import check
from tests.tools import figures_indexer as indexer
from tests.tools import figures_model as model
from tests.tools import figures_mutations as changes
from tests.tools import figures_starts as starts
from tests.tools import figures_vllm as vllm

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "examples" / "results"
RECORDS: Mapping[str, str] = {
    "all_reduce_boundary": "all_reduce_boundary_h200.json",
    "compile_time": "compile_time_h100.json",
    "cpu_models": "cpu_models.json",
    "decode_step": "decode_step_h100.json",
    "experts": "experts.json",
    "gemm": "gemm_h200.json",
    "indexer": "indexer_h200.json",
    "indexer_long": "indexer_long_h200.json",
    "mhc": "mhc.json",
    "mutations": "mutations.json",
    "one_rank_attention": "one_rank_attention.json",
    "one_rank_whole": "one_rank_whole.json",
    "preprocess": "preprocess_h200.json",
    "preprocess_insert": "preprocess_insert_h200.json",
    "router": "router.json",
    "soak": "soak_h200.json",
    "sparse_mla_decode": "sparse_mla_decode_h200.json",
    "sparse_mla_prefill": "sparse_mla_prefill_h200.json",
    "tensor_parallel": "tensor_parallel_h100.json",
    "tensor_parallel_h200": "tensor_parallel_h200.json",
    **{name: f"{name}.json" for name in ("drafts_h100", "drafts_h200", "batch_invariant_h200")},
    "vllm": "vllm_h100.json",
    "vllm_h200": "vllm_h200.json",
    "whole_model": "whole_model_h100.json",
    "whole_model_43": "whole_model_43_h100.json",
    **starts.measured(RESULTS),
}
"""The current record of each scenario and script that a page shows."""
AROUND = ("experts", "router", "mhc")
ONE_RANK = ("one_rank_attention", "one_rank_whole")
ONCE_MEASURED = (*AROUND, *ONE_RANK, "mutations")
"""Records that a page shows once they are measured."""
Row = Mapping[str, Any]
_BLOCK = re.compile(r"(?s)(<!-- figures: (\S+) -->\n).*?(<!-- end -->)")
_WEIGHTS = {"bfloat16": "bfloat16", "fp8": "e4m3"}


@dataclass(frozen=True, slots=True)
class Figures:
    """A table of figures: its renderer, the records it reads, and the command that measures them."""

    render: Callable[[Mapping[str, list[Row]]], tuple[list[list[str]], list[Row]]]
    records: tuple[str, ...]
    command: str


@dataclass(frozen=True, slots=True)
class Kernel:
    """A line of the table of kernels: rows of a record with these columns, and a peer of the same record."""

    label: str
    record: str
    columns: Mapping[str, str | int]
    tokens: Sequence[int]
    peer: tuple[str, str] = ("", "")


_DECODE = {"op": "sparse_mla_decode", "fused": "none"}
_FEW, _GEMM = (1, 8, 32, 128, 512), (1, 32, 64, 128, 512)
_FLASH_MLA, _SCALED_MM = ("FlashMLA", "flash_mla"), ("`scaled_mm`", "scaled_mm")
KERNELS: Sequence[Kernel] = (
    Kernel("decode attention, 64 heads, 640 keys", "sparse_mla_decode", _DECODE | {"heads": 64}, _FEW, _FLASH_MLA),
    Kernel("decode attention, 128 heads, 1,152 keys", "sparse_mla_decode", _DECODE | {"heads": 128}, _FEW, _FLASH_MLA),
    Kernel(
        "decode attention, 64 heads, with q norm, RoPE and inverse RoPE",
        "sparse_mla_decode",
        _DECODE | {"heads": 64, "fused": "both"},
        _FEW,
    ),
    Kernel(
        "prefill attention, 64 heads, 640 keys",
        "sparse_mla_prefill",
        {"heads": 64, "pattern": "random"},
        (256, 1024, 4096, 16384),
        _FLASH_MLA,
    ),
    Kernel(
        "prefill attention, 128 heads, 1,152 keys",
        "sparse_mla_prefill",
        {"heads": 128, "pattern": "random"},
        (256, 1024, 4096, 16384),
        _FLASH_MLA,
    ),
    Kernel(
        "indexer, score and top-k 512 of 4,096 entries",
        "indexer",
        {"op": "indexer_topk_slots", "topk": 512, "context": 16384},
        _FEW,
    ),
    Kernel(
        "q norm, RoPE and KV insert, 64 heads",
        "preprocess",
        {"op": "q_norm_rope_kv_insert", "heads": 64},
        (1, 128, 4096, 16384),
    ),
    Kernel(
        "inverse RoPE and quantisation, 64 heads",
        "preprocess",
        {"op": "inv_rope_fp8_quant", "heads": 64},
        (1, 128, 4096, 16384),
    ),
    Kernel(
        "norms, insert and compressor of an HCA layer",
        "preprocess_insert",
        {"kind": "hca", "latent": 1024},
        _FEW,
        ("separate kernels", "separate"),
    ),
    Kernel("e4m3 GEMM of wq_a and wkv", "gemm", {"op": "fp8_linear", "layer": "wq_a + wkv"}, _GEMM, _SCALED_MM),
    Kernel("e4m3 GEMM of wq_b", "gemm", {"op": "fp8_linear", "layer": "wq_b"}, _GEMM, _SCALED_MM),
    Kernel("e4m3 GEMM of wo_b", "gemm", {"op": "fp8_linear", "layer": "wo_b"}, _GEMM, _SCALED_MM),
    Kernel("grouped e4m3 GEMM of wo_a", "gemm", {"op": "fp8_grouped_einsum", "layer": "wo_a"}, _GEMM),
    Kernel("grouped bfloat16 GEMM of wo_a", "gemm", {"op": "grouped_linear", "layer": "wo_a"}, _GEMM, ("`bmm`", "bmm")),
)


def layers(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of decode layers: warm / cold, us."""
    sizes, shown = (1, 8, 32, 128, 512), []
    lines = [["layer", "weights", f"batch {sizes[0]}", *map(str, sizes[1:])]]
    for layer in ("SWA", "HCA", "CSA"):
        for weights, name in _WEIGHTS.items():
            cells = []
            for tokens in sizes:
                row = _one(rows["decode_step"], _GRAPH, layer=layer, weights=weights, tokens=tokens)
                shown.append(row)
                cells.append(_warm_cold(row, "{:.0f}".format))
            lines.append([layer, name, *cells])
    return lines, shown


def stack(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of all layers of V4-Flash: warm / cold, ms."""
    sizes, shown = (1, 8, 32, 128), []
    ways = {"graph": "one CUDA graph", "reduce-overhead": "stock torch.compile, `reduce-overhead`"}
    ways |= {"dsv4": '`backend="dsv4"`, no graph', "stock": "stock torch.compile", "eager": "eager ops"}
    lines = [["weights", "implementation", f"batch {sizes[0]}", *map(str, sizes[1:])]]
    for weights, name in _WEIGHTS.items():
        for impl, label in ways.items():
            measured = [
                _find(rows["decode_step"], _STACK, impl=impl, weights=weights, tokens=tokens) for tokens in sizes
            ]
            timed = [row for row in measured if row is not None]
            if timed:
                shown += timed
                lines.append([name, label, *("" if row is None else _warm_cold(row, _ms) for row in measured)])
    return lines, shown


def kernels(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of single kernels: warm, cold and floor, us, and a peer's warm times."""
    lines, shown = [["kernel", "tokens", "warm, us", "cold, us", "floor, us", "peer, warm, us"]], []
    for kernel in KERNELS:
        ours = [_one(rows[kernel.record], kernel.columns, impl="triton", tokens=n) for n in kernel.tokens]
        label, impl = kernel.peer
        peers = [_find(rows[kernel.record], kernel.columns, impl=impl, tokens=n) for n in kernel.tokens]
        shown += [*ours, *(row for row in peers if row is not None)]
        # A peer that cannot run a size has no time there.
        theirs = " / ".join("-" if row is None or row["us"] is None else _us(row, "us") for row in peers)
        lines.append(
            [
                kernel.label,
                " / ".join(f"{n:,}" for n in kernel.tokens),
                *(" / ".join(_us(row, column) for row in ours) for column in ("us", "cold_us", "floor_us")),
                f"{label} {theirs}" if any(peers) else "",
            ]
        )
    return lines, shown


def cpu_models(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of the demo's models on a CPU: ms of eager transformers, and converted."""
    shown = [row for row in rows["cpu_models"] if row["measured"] != "compile"]
    lines = [["model", "threads", "batch", "what", "eager, ms", "converted and compiled, ms", "ratio"]]
    for row in shown:
        what = f"prefill of {row['prompt']}" if "prompt" in row else row["measured"]
        ms = [f"{row[name]:,.0f}" if row[name] >= 100 else f"{row[name]:.1f}" for name in ("eager_ms", "dsv4_ms")]
        lines.append([row["model"], str(row["threads"]), str(row["batch"]), what, *ms, f"{row['ratio']:.2f}"])
    return lines, shown


def cpu_compile(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of the demo's compile times on a CPU: both graphs."""
    shown = [row for row in rows["cpu_models"] if row["measured"] == "compile"]
    lines = [["model", "threads", "cache", "s", "CPU time, s"]]
    for row in shown:
        cells = [row["model"], str(row["threads"]), row["cache"], f"{row['wall_s']:.0f}", f"{row['cpu_s']:.0f}"]
        lines.append(cells)
    return lines, shown


def experts(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of routed experts: cold, us, by format of the weights and implementation."""
    shown = [row for row in rows["experts"] if row["shared"] == "none"]
    sizes = list(dict.fromkeys(row["tokens"] for row in shown))
    lines = [["weights", "implementation", *(f"{size} token{'s' * (size > 1)}" for size in sizes)]]
    for weights in dict.fromkeys(row["weights"] for row in shown):
        of_weights = [row for row in shown if row["weights"] == weights]
        floors = {row["tokens"]: row for row in of_weights}
        lines.append([weights, "floor", *(_us(floors[n], "floor_us") if n in floors else "-" for n in sizes)])
        for impl in dict.fromkeys(row["impl"] for row in of_weights):
            measured = [_find(of_weights, {}, impl=impl, tokens=n) for n in sizes]
            name = _OURS if impl == "triton" else f"`{impl}`"
            lines.append([weights, name, *("-" if row is None else _cold(row) for row in measured)])
    return lines, shown


def around(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of routers and hyper-connections: cold and floor, us, and transformers."""
    lines, shown = [["op", "tokens", f"{_OURS}, us", "floor, us", "transformers, us"]], []
    for scenario_rows in (rows["router"], rows["mhc"]):
        for name in dict.fromkeys(_variant(row) for row in scenario_rows):
            mine = [row for row in scenario_rows if _variant(row) == name]
            sizes = list(dict.fromkeys(row["tokens"] for row in mine))
            ours, peers = ([_find(mine, {}, impl=impl, tokens=n) for n in sizes] for impl in ("triton", "transformers"))
            shown += mine
            cells = [["-" if row is None else _cold(row) for row in timed] for timed in (ours, peers)]
            floors = [_us(row or peer or {}, "floor_us") for row, peer in zip(ours, peers, strict=True)]
            lines.append(
                [name, *(" / ".join(cell) for cell in ([f"{n:,}" for n in sizes], cells[0], floors, cells[1]))]
            )
    return lines, shown


def _variant(row: Row) -> str:
    more = ", ".join(f"{name} {row[name]}" for name in ("routing", "gate") if name in row)
    return f"`{row['op']}`" + (f", {more}" if more else "")


def _cold(row: Row) -> str:
    """Return a cell: the cold time, warm where it was not measured, or the status of a row without times."""
    return _us(row, "cold_us" if row.get("cold_us") else "us")


def soak(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of long decodes: steps by test and setup, and how they ended."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows["soak"]:
        groups.setdefault((row["test"], row["setup"]), []).append(row)
    lines = [["test", "setup", "steps", "passed"]]
    for (test, setup), runs in groups.items():
        steps = sum(row.get("steps", 0) for row in runs)
        passed = sum(row["status"] == "ok" for row in runs)
        lines.append([test, setup, f"{steps:,}" if steps else "", f"{passed} of {len(runs)} runs"])
    return lines, rows["soak"]


_OURS, _RANKS, _DRAFTS = "dsv4_compile", "torchrun --nproc-per-node 2", ("drafts_h200", "drafts_h100")
_SPLIT = f"{_RANKS} examples/benchmarks/tensor_parallel.py --layers 43 --experts rows"
_SPLIT += " --collectives symmetric --prompt 64"
_SPLIT_H200 = f"{_SPLIT} --batches 1,8,32,128 --contexts 2048 --steps 1000 --generate 66"
_SPLIT_H100 = f"{_SPLIT} --batches 1,8,32 --contexts 2048,4096,8192,16384"
_ONE_RANK = "python examples/benchmarks/one_rank.py"
_WHOLE_MODEL = "python examples/benchmarks/whole_model.py"
_UNCHANGED = f"{_WHOLE_MODEL} --layers 43 --batches 1 --experts 8 --forms captured,unchanged"
_VLLM = "python tests/gpu/vllm/run.py --what"
_GRAPH: Mapping[str, str | int] = {"impl": "graph", "end": "together"}
_STACK: Mapping[str, str | int] = {"layer": "stack", "end": "together"}
_BENCH_KERNELS = tuple(dict.fromkeys(kernel.record for kernel in KERNELS))
FIGURES: Mapping[str, Figures] = {
    "headline": Figures(model.headline, ("whole_model",), _WHOLE_MODEL),
    "whole": Figures(model.whole, ("tensor_parallel_h200",), _SPLIT),
    "whole_headline": Figures(model.whole_headline, _DRAFTS[:1], f"{_RANKS} examples/benchmarks/drafts.py"),
    "drafts": Figures(model.drafts, _DRAFTS, f"{_RANKS} examples/benchmarks/drafts.py"),
    "batch_invariant": Figures(
        model.batch_invariant, ("batch_invariant_h200",), "python examples/benchmarks/batch_invariant.py"
    ),
    "contexts": Figures(model.contexts, ("tensor_parallel",), _SPLIT_H100),
    "whole_h200": Figures(model.steps, ("tensor_parallel_h200",), _SPLIT_H200),
    "four_layers": Figures(model.four_layers, ("whole_model",), _WHOLE_MODEL),
    "unchanged": Figures(model.unchanged, ("whole_model_43",), _UNCHANGED),
    "all_reduce": Figures(
        model.all_reduce, ("all_reduce_boundary",), f"{_RANKS} examples/benchmarks/all_reduce_boundary.py"
    ),
    "rank_layers": Figures(model.rank_layers, ONE_RANK[:1], f"{_ONE_RANK} --parts attention"),
    "rank_stages": Figures(model.rank_stages, ONE_RANK[:1], f"{_ONE_RANK} --parts attention"),
    "rank_whole": Figures(model.rank_whole, ONE_RANK[1:], f"{_ONE_RANK} --parts whole"),
    "layers": Figures(layers, ("decode_step",), "dsv4 bench decode_step --only impl=graph"),
    "stack": Figures(stack, ("decode_step",), "dsv4 bench decode_step --only layer=stack"),
    "kernels": Figures(kernels, _BENCH_KERNELS, "dsv4 bench SCENARIO"),
    "compile_time": Figures(starts.compile_time, ("compile_time",), "python examples/benchmarks/compile_time.py"),
    "cpu_models": Figures(cpu_models, ("cpu_models",), "python examples/benchmarks/cpu_models.py"),
    "cpu_compile": Figures(cpu_compile, ("cpu_models",), "python examples/benchmarks/cpu_models.py"),
    "indexer_long": Figures(
        indexer.long_contexts, ("indexer_long",), "python examples/benchmarks/indexer_long.py --no-checks"
    ),
    "experts": Figures(experts, AROUND[:1], "python examples/benchmarks/around_attention.py"),
    "around": Figures(around, AROUND[1:], "python examples/benchmarks/around_attention.py"),
    "mutations": Figures(changes.scores, ("mutations",), "make mutate"),
    "survivors": Figures(changes.survivors, ("mutations",), "make mutate ARGS=--again"),
    "soak": Figures(soak, ("soak",), "python tests/gpu/soak.py"),
    "vllm_rows": Figures(vllm.rows, ("vllm",), f"{_VLLM} rows"),
    "vllm_shadow": Figures(vllm.shadow, ("vllm",), f"{_VLLM} shadow"),
    "vllm_replays": Figures(vllm.replays, ("vllm",), f"{_VLLM} replay --plugin 1,all"),
    "vllm_served": Figures(vllm.served, ("vllm_h200",), f"{_VLLM} preempted,ranks --plugin all"),
    "vllm_times": Figures(vllm.times, ("vllm",), f"{_VLLM} times --plugin 1,all"),
    **{name: Figures(*parts) for name, parts in starts.tables(RECORDS).items()},
}
"""The blocks that a page may have."""


def with_figures(text: str, page: Path, results: Path = RESULTS) -> str:
    """Return the text of `page` with every block of figures rendered again. E201 for a name not in `FIGURES`."""

    def rendered(found: re.Match[str]) -> str:
        check(found[2] in FIGURES, "E201", got=f"{page.name}: figures {found[2]!r}", fix=f"one of {', '.join(FIGURES)}")
        return f"{found[1]}{block(found[2], page, results)}\n{found[3]}"

    return _BLOCK.sub(rendered, text)


def block(name: str, page: Path, results: Path = RESULTS) -> str:
    """Return the table `name` and the line with its sources, with links relative to `page`."""
    figure = FIGURES[name]
    paths = {record: results / RECORDS[record] for record in figure.records}
    if not all(path.exists() for name, path in paths.items() if name in ONCE_MEASURED):
        return f"Not measured yet: `{figure.command}`."
    records: dict[str, Record] = {record_name: json.loads(path.read_text()) for record_name, path in paths.items()}
    lines, shown = figure.render({record_name: record["rows"] for record_name, record in records.items()})
    table = [f"| {' | '.join(line)} |" for line in lines]
    table.insert(1, "|" + "---|" * len(lines[0]))
    links = [f"[{path.stem}]({Path(os.path.relpath(path, page.parent)).as_posix()})" for path in paths.values()]
    return "\n".join([*table, "", _source(figure.command, list(records.values()), shown, links)])


def _source(command: str, records: Sequence[Record], rows: Iterable[Row], links: Sequence[str]) -> str:
    machines = dict.fromkeys(record["machine"].split(",")[0] for record in records)
    versions = dict.fromkeys(f"torch {r['torch'].split('+')[0]}, Triton {r['triton']}" for r in records)
    stamped = list(rows)
    days = sorted({row["date"][:10] for row in stamped if "date" in row} or {r["date"][:10] for r in records})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    commits = dict.fromkeys(row["commit"] for row in stamped if row.get("commit", "unknown") != "unknown")
    facts = [*machines, *versions, when, *(f"commit {commit}" for commit in commits)]
    text = f"`{command}`; {'; '.join(facts)}; {', '.join(links)}."
    return "\n".join(textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False))


def _find(rows: Iterable[Row], columns: Mapping[str, str | int], **more: str | int) -> Row | None:
    """Return the row with these columns, or None."""
    wanted = {**columns, **more}
    return next((row for row in rows if all(row.get(name) == value for name, value in wanted.items())), None)


def _one(rows: Iterable[Row], columns: Mapping[str, str | int], **more: str | int) -> Row:
    """Return the row with these columns. E201 if the record has none."""
    row = _find(rows, columns, **more)
    check(
        row is not None, "E201", got=f"no row with { ({**columns, **more}) }", rule="a table's rows are in its record"
    )
    assert row is not None
    return row


def _warm_cold(row: Row, form: Callable[[float], str]) -> str:
    """Return a cell: warm / cold, a dash for a time that was not measured, or the status of a row without times."""
    if row["us"] is None:
        return str(row["status"])
    cold = row.get("cold_us")
    return form(row["us"]) + (f" / {form(cold) if cold else '-'}" if row["impl"] == "graph" else "")


def _us(row: Row, column: str) -> str:
    us = row.get(column)
    if us is None:
        return "-" if row["us"] is not None else str(row["status"])
    return f"{us:.1f}" if us < 10 else f"{us:,.0f}"


def _ms(us: float) -> str:
    return f"{us / 1e3:.1f}" if us < 1e4 else f"{us / 1e3:.0f}"
