"""Scores of lm-evaluation-harness with a converted model, compared with eager transformers: `make test-serve`."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_compile import hf
from dsv4_compile.errors import DSV4Error
from dsv4_compile.hf.tiny import tiny_model
from tests.integrations.words import word_tokenizer

pytest.importorskip("lm_eval", reason="needs lm-eval: make test-serve")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

BATCH, LENGTH = 4, 96
TOLERANCE = 1e-4


def words(first: int, count: int) -> str:
    return " ".join(f"w{2 + (first + 7 * i) % 500}" for i in range(count))


CONTEXTS = [words(5, 3), words(9, 40), words(9, 40), words(200, 130), words(31, 70), words(77, 1), words(60, 12)]
PAIRS = [(context, " " + words(11 * i, 1 + i % 3)) for i, context in enumerate(CONTEXTS)] + [("", words(2, 3))]
UNTIL = [{"until": ["w1"], "max_gen_toks": 9}, {"until": ["w7", words(3, 1)], "max_gen_toks": 5, "do_sample": False}]


@pytest.fixture(scope="module")
def eager() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def model(eager: Any) -> Any:
    return hf.convert(copy.deepcopy(eager), max_batch_size=BATCH, max_seq_len=LENGTH, attention_only=False)


def evaluated(model: Any, **options: Any) -> Any:
    tokenizer = word_tokenizer(model.config.vocab_size)
    options = {"batch_size": BATCH, "max_length": LENGTH, "softmax_dtype": "float64"} | options
    return HFLM(pretrained=model, tokenizer=tokenizer, **options)


def ask(evaluated: Any, kind: str, arguments: list[tuple[Any, ...]]) -> Any:
    requests = [Instance(request_type=kind, doc={}, arguments=each, idx=i) for i, each in enumerate(arguments)]
    return getattr(evaluated, kind)(requests, disable_tqdm=True)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 1},
        {"batch_size": 3},
        {"batch_size": BATCH, "max_length": 48, "truncation": True},
        {"batch_size": BATCH, "prefix_token_id": 9, "logits_cache": False},
        {"batch_size": "auto", "max_batch_size": BATCH},
    ],
    ids=str,
)
def test_scores_are_those_of_eager_transformers(model: Any, eager: Any, options: Any) -> None:
    ours, theirs = evaluated(model, **options), evaluated(eager, **options)
    pairs = zip(ask(ours, "loglikelihood", PAIRS), ask(theirs, "loglikelihood", PAIRS), strict=True)
    for (score, greedy), (other, other_greedy) in pairs:
        assert abs(score - other) < TOLERANCE and greedy == other_greedy
    texts = [(context,) for context in CONTEXTS]
    rolling = [ask(each, "loglikelihood_rolling", texts) for each in (ours, theirs)]
    assert rolling[0] == pytest.approx(rolling[1], abs=TOLERANCE)
    assert min(rolling[0]) < -100  # windows of a text longer than the model's length are summed


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_of_a_batch_are_those_of_eager_transformers_one_by_one(model: Any, eager: Any, side: str) -> None:
    """HFLM pads contexts on the left, whatever the tokenizer does. Eager transformers compresses padding, too."""
    asked = [(context, UNTIL[i % 2]) for i, context in enumerate(CONTEXTS)]
    pair = evaluated(model, batch_size=3), evaluated(eager, batch_size=1)
    for each in pair:
        each.tokenizer.padding_side = side
    ours, theirs = (ask(each, "generate_until", asked) for each in pair)
    assert ours == theirs and all(ours)


def test_a_local_task(model: Any, eager: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    rows = [
        {"question": words(i, 5 + i), "choices": [words(i + 1, 1), words(i + 50, 2)], "answer": i % 2} for i in range(6)
    ]
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "local_words",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.json")}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    ours, theirs = (
        simple_evaluate(model=evaluated(each), tasks=[task], task_manager=TaskManager(include_defaults=False))
        for each in (model, eager)
    )
    assert ours["results"]["local_words"]["acc,none"] == theirs["results"]["local_words"]["acc,none"]
    for mine, other in zip(ours["samples"]["local_words"], theirs["samples"]["local_words"], strict=True):
        scores = [[response[0][0] for response in each["resps"]] for each in (mine, other)]
        assert torch.allclose(*(torch.tensor(each, dtype=torch.float64) for each in scores), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"batch_size": BATCH + 1}, "E204"),
        ({"batch_size": "auto"}, "E204"),
        ({"max_length": None}, "E204"),
        ({"mixed_precision_dtype": "bfloat16"}, "E208"),
    ],
    ids=str,
)
def test_refusals(model: Any, eager: Any, options: Any, code: str) -> None:
    with pytest.raises(DSV4Error, match=code):
        ask(evaluated(model, **options), "loglikelihood", [*PAIRS, (words(5, 300), " w9")])
    good = PAIRS[:3]
    assert ask(evaluated(model), "loglikelihood", good)[0][0] == pytest.approx(
        ask(evaluated(eager), "loglikelihood", good)[0][0], abs=TOLERANCE
    )
