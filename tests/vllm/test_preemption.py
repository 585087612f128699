"""Requests that vLLM preempts because blocks run out, and resumes: every row of attention, outputs and tokens.

Every token goes to all experts of the model, so no rounding chooses others, and runs that batch tokens otherwise
stay comparable.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoint
import pytest
from jobs import Job, common_rows, final_errors, same_until_near_ties
from test_serving import EAGER_TOLERANCE, TOLERANCE

LENGTHS, SHARED, NEW_TOKENS = [5, 6, 280], [(2, 270)], 64
SMALL = {"num_gpu_blocks_override": 62}
"""Blocks that hold each of the requests, and not all of them when the short ones have grown."""
SERVING = {"max_num_batched_tokens": 32, "max_model_len": 512, "enable_prefix_caching": True}
COUNTED = {"disable_log_stats": False}
"""vLLM counts preemptions."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("preemption")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return checkpoint.write_dense(folder / "model")


@pytest.fixture(scope="module")
def roomy(model: Path, folder: Path) -> dict[str, Any]:
    serving = {**SERVING, **COUNTED, "enforce_eager": True}
    job = Job(serving, LENGTHS, SHARED, NEW_TOKENS, together=True, margins=True)
    return job.run(model, folder / "roomy")


@pytest.mark.parametrize("plugin", ["1", "all"])
def test_preempted_requests_are_resumed_as_if_nothing_had_been(
    plugin: str, model: Path, roomy: dict[str, Any], folder: Path
) -> None:
    eager = plugin == "1"  # with its own layers compiled, since that has one graph for all steps
    serving = {**SERVING, **COUNTED, **SMALL, "enforce_eager": eager}
    job = Job(serving, LENGTHS, SHARED, NEW_TOKENS, together=True, padding=32, plugin=plugin)
    served = job.run(model, folder / plugin)

    assert roomy["preemptions"] == 0 and served["preemptions"] == 2
    assert served["again"] > 300, "rows of the preempted requests are computed again"
    assert served["hits"] == 256 and served["reused"] == roomy["reused"] + 256, "one finds blocks of the other"
    assert served["rows"] == roomy["rows"] + served["again"]
    assert max(served["worst"]) <= EAGER_TOLERANCE
    assert max(served["worst_after_hits"], served["drift"]) <= TOLERANCE

    same_until_near_ties(served, roomy)
    errors = final_errors(folder, plugin, "roomy")
    assert errors.numel() == common_rows(served, roomy) >= sum(LENGTHS), "rows of prompts at least"
    assert float(errors.max()) <= (TOLERANCE if eager else 2 * TOLERANCE)
