"""Render the tables of whole models on GPUs from their records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
_PROMPT = 64
"""Tokens of the prompts of batches; rows of longer ones are of single sequences."""
_PARTS: Mapping[str, Sequence[str]] = {
    "experts": ("gate_up", "down_kernel", "split_kernel", "sum_kernel", "reorder_kernel"),
    "collectives": ("all_reduce", "nccl"),
    "hyper-connections": ("mhc_",),
    "rest": (),
}
"""Words in the names of kernels, by part of the model."""


def whole(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of V4-Flash on two GPUs: a step, what it reads, and its parts by kernel."""
    shown = [row for row in rows["tensor_parallel_h200"] if row["prompt"] == _PROMPT]
    head = ["batch", "step, ms", "tokens/s", "weights read by a rank, GB", "kernels"]
    lines = [[*head, *(f"{name}, ms" for name in _PARTS), "first calls, s"]]
    for row in shown:
        took: dict[str, float] = dict.fromkeys(_PARTS, 0.0)
        for name, _, us in row["kernels"]:
            took[
                next(
                    (key for key, words in _PARTS.items() if any(word in name for word in words)),
                    "rest",
                )
            ] += us
        speed = f"{row['batch'] * 1e3 / row['step_ms']:,.0f}"
        step = [str(row["batch"]), f"{row['step_ms']:.1f}", speed, f"{row['weights_gb']:.0f}", str(row["nodes"])]
        lines.append([*step, *(f"{us / 1e3:.1f}" for us in took.values()), f"{row['first_calls_s']:.0f}"])
    return lines, shown


def steps(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of V4-Flash steps on two GPUs, with and without a token read by the host."""
    shown = rows["tensor_parallel_h200"]
    head = ["batch", "tokens in the cache", "step, ms", "step whose token the host reads, ms", "prefill, ms"]
    lines = [[*head, "weights read by a rank, GB", "kernels", "commit"]]
    for row in shown:
        times = [f"{row['step_ms']:.1f}", f"{row['read_ms']:.1f}", f"{row['prefill_ms']:,.0f}"]
        sizes = [f"{row['weights_gb']:.0f}", str(row["nodes"]), row["commit"]]
        lines.append([str(row["batch"]), f"{row['prompt']:,}", *times, *sizes])
    return lines, shown


def drafts(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of steps with DSpark drafts: from which acceptance on they are faster."""
    shown = [row for name in ("drafts_h200", "drafts_h100") for row in rows[name]]
    head = ["GPUs", "layers", "batch", "step of one token, ms", "verifying six, ms", "step with drafts, ms"]
    lines = [[*head, "drafts are faster from, tokens a step", "ms a token at 3.5 a step", "against one a step"]]
    for row in sorted(shown, key=lambda row: (-int(row["ranks"]), int(row["batch"]))):
        plain, step = row["plain_ms"], row["step_ms"]
        times = [f"{plain:.2f}", f"{row['verify_ms']:.2f}" if "verify_ms" in row else "-", f"{step:.2f}"]
        sizes = [
            f"{row['ranks']} {'H200' if row in rows['drafts_h200'] else 'H100'}",
            str(row["layers"]),
            str(row["batch"]),
        ]
        lines.append([*sizes, *times, f"{step / plain:.2f}", f"{step / 3.5:.2f}", f"{3.5 * plain / step:.2f}x"])
    return lines, shown


def batch_invariant(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of values of dsv4.batch_invariant: ms, multiples of off, compared tokens."""
    shown = rows["batch_invariant_h200"]
    batches = list(shown[0]["step_ms"])
    head = [
        "`dsv4.batch_invariant`",
        *(f"step of {batch}, ms" for batch in batches),
        f"prompt of {shown[0]['prompt']:,}, ms",
    ]
    head += ["times off", "kernels of a step, times off"]
    lines = [[*head, "tokens compared", "the same in running batches", "a difference"]]
    off: dict[str, float] = {}
    for row in shown:
        times = [*(row["step_ms"][batch] for batch in batches), row["prompt_ms"]]
        of_kernels = {batch: sum(us for _, _, us in row["kernels"][batch]) for batch in batches}
        # A row with the option follows the row without it of the same run.
        off = of_kernels if row["level"] == "off" else off
        multiples = ", ".join(f"{multiple:.2f}" for multiple in (*row["of_off"].values(), row["prompt_of_off"]))
        multiples_of_kernels = ", ".join(f"{of_kernels[batch] / off[batch]:.2f}" for batch in batches)
        checked = ["-"] * 3
        if "compared" in row:
            differing = row["difference"] or row.get("running_difference") or "none"
            checked = [f"{row['compared']:,}", f"{row['running']:,}", differing]
        lines.append([row["level"], *(f"{ms:.2f}" for ms in times), multiples, multiples_of_kernels, *checked])
    return lines, shown


def whole_headline(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the README's table: all layers on two GPUs, without and with drafts."""
    shown = rows["drafts_h200"]
    lines = [["43 layers of V4-Flash, official formats, two GPUs", "one token a step", "drafts, 3.5 tokens a step"]]
    for row in shown:
        plain, step = row["plain_ms"] / row["batch"], row["step_ms"] / row["batch"] / 3.5
        name = "one sequence" if row["batch"] == 1 else f"{row['batch']} sequences"
        lines.append([f"decode, {name}, ms a token", f"{plain:.1f}", f"{step:.1f}"])
    return lines, shown


def all_reduce(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of all-reduces with the boundary after them, us."""
    shown, forms = rows["all_reduce_boundary"], ("boundary", "fused", "symmetric", "nccl")
    head = ["tokens", "boundary alone", "all-reduce inside", "symmetric memory, then boundary", "NCCL, then boundary"]
    return [head, *([str(row["tokens"]), *(f"{row[f'{form}_us']:.1f}" for form in forms)] for row in shown)], shown


_STAGES: Mapping[str, tuple[str, str]] = {
    "of hidden": ("`wq_a`, `wkv`, compressors", "no"),
    "insert": ("norms, inserts, compression", "no"),
    "of latent": ("`wq_b`; the indexer's is whole", "heads"),
    "indexer queries": ("indexer queries", "no"),
    "indexer": ("scores and top-k", "no"),
    "attention": ("attention", "heads"),
    "wo_a": ("`wo_a`", "groups"),
    "wo_b": ("`wo_b`", "columns"),
}
"""Names of the stages of a layer, and the dim that ranks split them by."""
_STAGES_TOKENS = 32
"""Tokens of the layers with stages in the table."""


def rank_layers(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of a decode layer on one of several ranks: warm / cold, us, and its share."""
    shown = rows["one_rank_attention"]
    numbers = list(dict.fromkeys(row["ranks"] for row in shown))
    head = ["layer", "batch", *(f"{number} rank{'s' * (number > 1)}" for number in numbers)]
    lines = [[*head, f"share of 1 rank at {numbers[-1]}, warm / cold", f"floor at {numbers[-1]}"]]
    for layer, tokens in dict.fromkeys((row["layer"], row["tokens"]) for row in shown):
        by_ranks = {row["ranks"]: row for row in shown if (row["layer"], row["tokens"]) == (layer, tokens)}
        last = by_ranks.get(numbers[-1], {})
        cells = [_pair(by_ranks.get(number, {}), ("us", "cold_us"), "{:.0f}") for number in numbers]
        floor = f"{last['floor_us']:.0f}" if "floor_us" in last else "-"
        lines.append([layer, str(tokens), *cells, _pair(last, ("of_one", "cold_of_one"), "{:.2f}"), floor])
    return lines, shown


def rank_stages(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of a layer's stages: us on the fewest ranks and on the most."""
    shown = [row for row in rows["one_rank_attention"] if row["tokens"] == _STAGES_TOKENS]
    kinds, ends = list(dict.fromkeys(row["layer"] for row in shown)), (min, max)
    few, many = (end(row["ranks"] for row in shown) for end in ends)
    lines = [["stage", "split by", *(f"{kind}: {few} / {many} ranks" for kind in kinds)]]
    stages = {(row["layer"], row["ranks"]): row.get("details", {}).get("stages", {}) for row in shown}
    for stage, names in _STAGES.items():
        pairs = ([stages.get((kind, number), {}).get(stage) for number in (few, many)] for kind in kinds)
        cells = [[f"{times['us']:.1f}" if times else "-" for times in pair] if any(pair) else [] for pair in pairs]
        lines.append([*names, *map(" / ".join, cells)])
    return lines, shown


def _pair(row: Row, names: Sequence[str], form: str) -> str:
    """Return a cell of two numbers, a dash for each that was not measured, or the status of a row without times."""
    if row.get("us") is None and "status" in row:
        return str(row["status"])
    return " / ".join(form.format(row[name]) if row.get(name) else "-" for name in names)


def rank_whole(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of a step of a rank's part of all layers, with its weight floor."""
    shown = rows["one_rank_whole"]
    head = ["layers", "ranks", "batch", "step, ms", "floor of its weights, ms", "weights read, GB"]
    head += ["step whose token the host reads, ms", "kernels", "graph launches", "other launches"]
    lines = [head]
    for row in shown:
        sizes = [str(row[name]) for name in ("layers", "ranks", "batch")]
        times = [f"{row[name]:.1f}" for name in ("step_ms", "floor_ms", "weights_gb", "read_ms")]
        lines.append([*sizes, *times, *(str(row.get(name, "-")) for name in ("nodes", "graph_launches", "launches"))])
    return lines, shown


def contexts(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of V4-Flash on two GPUs with one sequence: its prefill and a step after it."""
    shown = [row for row in rows["tensor_parallel"] if row["prompt"] != _PROMPT]
    lines = [["tokens in the cache", "prefill, ms", "tokens/s of it", "step, ms", "kernels"]]
    for row in shown:
        speed = f"{row['prompt'] * 1e3 / row['prefill_ms']:,.0f}"
        lines.append(
            [f"{row['prompt']:,}", f"{row['prefill_ms']:,.0f}", speed, f"{row['step_ms']:.1f}", str(row["nodes"])]
        )
    return lines, shown


def unchanged(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of all layers with few experts, in a block of `hf.unchanged` and outside."""
    said = {"captured": "outside", "unchanged": "in a block"}
    shown = rows["whole_model_43"]
    names = ("kernels_ms", "step_ms", "read_ms", "generate_ms", "prefill_ms")
    lines = [["", "kernels of a step, ms", "step, ms", "step whose token the host reads, ms"]]
    lines[0] += ["`generate`, ms a token", "prefill, ms"]
    lines += [[said[row["form"]], *(f"{row[name]:.1f}" for name in names)] for row in shown]
    return lines, shown


def headline(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the README's table: four layers on one GPU, eager transformers and compiled."""
    form = {(row["form"], row["batch"]): row for row in rows["whole_model"]}
    measured = (
        ("decode, one sequence, ms a token", "generate_ms", 1),
        ("decode, 32 sequences, ms a step", "generate_ms", 32),
        ("prefill of 2,048 tokens, ms", "prefill_ms", 1),
    )
    lines = [["four layers of V4-Flash, bfloat16", "eager transformers", 'compiled, `backend="dsv4"`', "faster"]]
    for what, name, batch in measured:
        eager, compiled = (form[key, batch][name] for key in ("eager", "whole"))
        lines.append([what, f"{eager:.1f}", f"{compiled:.1f}", f"{eager / compiled:.1f}x"])
    return lines, [form[key, batch] for key in ("eager", "whole") for batch in (1, 32)]


def four_layers(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of four layers of V4-Flash in bfloat16 on one GPU, and eager transformers."""
    said = {"whole": "converted, compiled, captured", "captured": "prompts captured too", "eager": "eager transformers"}
    said |= {"unchanged": "in a block of `hf.unchanged`", "running": "`hf.RunningBatch`"}
    shown = rows["whole_model"]
    head = ["batch", "prompt", "", "prefill, ms", "its kernels, ms", "`generate`, ms a token", "step, ms"]
    lines = [[*head, "step whose token the host reads, ms", "kernels", "first calls, s"]]
    for row in sorted(shown, key=lambda row: int(row["batch"])):
        names = ("prefill_ms", "generate_ms", "step_ms", "read_ms")
        times = [f"{row[name]:.1f}" if name in row else "-" for name in names]
        first = f"{row['first_prefill_s'] + row['first_steps_s']:.0f}"
        name = said.get(row["form"], row["form"])
        kernels = sum(us for _, _, us in row.get("prefill_kernels", ()))
        times.insert(1, f"{kernels / 1e3:.1f}" if kernels else "-")
        lines.append([str(row["batch"]), f"{row['prompt']:,}", name, *times, str(row.get("nodes", "-")), first])
    return lines, shown
