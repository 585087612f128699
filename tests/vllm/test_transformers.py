"""Logits of the model inside vLLM against those of transformers in float32, from the same checkpoint.

vLLM's caches are e4m3, those of transformers are not: how far such caches take logits, `hf.convert` shows. Every token
goes to all experts of the model, so no rounding chooses others.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import checkpoint
import pytest
import torch
from jobs import Job
from torch import Tensor

from dsv4_compile import hf

LENGTHS, NEW_TOKENS = [5, 37, 300], 12
SERVING = {"max_num_batched_tokens": 64, "max_model_len": 512, "enforce_eager": True}
WORST, AS_FAR = 0.1, 1.1
"""Largest |difference| / |logits| from float32, and how much farther than a converted model on average."""
FORMAT = "fp8_ds_mla"
"""The caches of vLLM."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transformers") / "model"
    return checkpoint.write_dense(folder)


@cache
def loaded(path: Path, converted: bool) -> Any:
    """Return transformers' own model in float32, or a converted one in bfloat16, with the weights of the checkpoint."""
    dtype, kv_cache_dtype = (torch.bfloat16, FORMAT) if converted else (torch.float32, "auto")
    model = hf.load(path, device="cpu", dtype=dtype, max_batch_size=1, max_seq_len=512, kv_cache_dtype=kv_cache_dtype)
    if not converted:
        hf.revert(model)
    return model


@torch.no_grad()
def logits(path: Path, tokens: tuple[int, ...], converted: bool) -> Tensor:
    """Return the logits of every token, float32 `[n, V]`."""
    rows: Tensor = loaded(path, converted)(torch.tensor([tokens])).logits[0].float()
    return rows


@pytest.mark.parametrize("plugin", ["1", "all"])
def test_logits_are_as_near_to_transformers_as_those_of_a_converted_model(
    plugin: str, model: Path, tmp_path: Path
) -> None:
    job = Job(SERVING, LENGTHS, new_tokens=NEW_TOKENS, plugin=plugin)
    served = job.run(model, tmp_path / "served")
    outputs: dict[tuple[int, ...], Tensor] = torch.load(tmp_path / "served" / "final.pt")
    head = loaded(model, converted=True).lm_head.weight
    ours, converted, same = list[float](), list[float](), list[bool]()
    requests = [tokens for tokens in outputs if not any(other[: len(tokens)] == tokens != other for other in outputs)]
    for tokens in requests:
        want = logits(model, tokens, converted=False)
        got = torch.stack([outputs[tokens[: i + 1]] for i in range(len(tokens))]) @ head.T
        for errors, rows in ((ours, got.float()), (converted, logits(model, tokens, converted=True))):
            errors += ((rows - want).norm(dim=-1) / want.norm(dim=-1)).tolist()
        same += (got.argmax(-1) == want.argmax(-1)).tolist()
    assert len(requests) == len(LENGTHS) and len(ours) == served["rows"] == sum(LENGTHS) + len(LENGTHS) * (
        NEW_TOKENS - 1
    )
    assert max(ours) <= WORST
    assert sum(ours) <= AS_FAR * sum(converted)
    assert sum(same) >= 0.9 * len(same), "of random weights, whose largest logits are near each other"
