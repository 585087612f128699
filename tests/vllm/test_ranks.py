"""DeepSeek-V4 on two ranks of vLLM's tensor parallel: rows against unsharded layers, outputs against one process.

Every token goes to all experts of the model, so no rounding chooses others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoint
import pytest
from jobs import Job, common_rows, final_errors, same_until_near_ties
from test_serving import EAGER_TOLERANCE, TOLERANCE

LENGTHS, SHARED = [5, 37, 300], [(2, 270)]
SERVING = {"max_num_batched_tokens": 64, "max_model_len": 512, "enable_prefix_caching": True}
EAGER = {"enforce_eager": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return checkpoint.write_dense(folder / "model")


@pytest.fixture(scope="module")
def one(model: Path, folder: Path) -> dict[str, Any]:
    return Job({**SERVING, **EAGER}, LENGTHS, SHARED, margins=True).run(model, folder / "one")


@pytest.mark.parametrize(
    ("name", "llm", "plugin"),
    [
        ("attention", {}, "1"),
        ("layers", {}, "all"),
        ("experts", {**EAGER, "enable_expert_parallel": True}, "all"),
    ],
)
def test_two_ranks_serve_what_one_process_serves(
    name: str, llm: dict[str, Any], plugin: str, model: Path, one: dict[str, Any], folder: Path
) -> None:
    explain = "" if llm else str(folder / f"{name}.json")
    job = Job({**SERVING, **llm}, LENGTHS, SHARED, ranks=2, plugin=plugin, explain=explain)
    served = job.run(model, folder / name)
    ranks = served["ranks"]
    assert [(rank["rank"], rank["ranks"], rank["heads"]) for rank in ranks] == [(0, 2, 4), (1, 2, 4)]
    assert ranks[0]["bits"] == ranks[1]["bits"], "outputs are the same on both"
    assert [rank["breaks"] for rank in ranks] == [0, 0]
    if explain:
        report = json.loads(Path(explain).read_text())
        assert report["ok"] and len(report["graphs"]) == 1 and report["breaks"] == report["recompiles"] == []
    for rank in ranks:
        assert (rank["rows"], rank["reused"], rank["steps"]) == (one["rows"], one["reused"], one["steps"])
        assert max(rank["worst"]) <= (EAGER_TOLERANCE if llm else TOLERANCE)
    same_until_near_ties(served, one)
    errors = final_errors(folder, name, "one")
    assert errors.numel() == common_rows(served, one)
    assert float(errors.max()) <= 2 * TOLERANCE and float(errors.median()) <= TOLERANCE
