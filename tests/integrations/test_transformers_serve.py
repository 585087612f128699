"""A converted model behind the server of transformers, by examples/10_serve.py. `make test-serve` installs it."""

from __future__ import annotations

import copy
import json
import runpy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from dsv4_compile import hf
from dsv4_compile.hf.tiny import tiny_model
from tests.integrations.words import word_tokenizer

for needed in ("fastapi", "uvicorn", "openai", "httpx"):
    pytest.importorskip(needed, reason="needs transformers[serving]: make test-serve")

TestClient = pytest.importorskip("fastapi.testclient").TestClient
EXAMPLE = Path(__file__).parents[2] / "examples" / "10_serve.py"
PROMPTS = ("w5 w6 w7", "w300", " ".join(f"w{i}" for i in range(40, 90)))
TOKENS = 12


@pytest.fixture(scope="module")
def server() -> Callable[..., Any]:
    return runpy.run_path(str(EXAMPLE))["server"]


@pytest.fixture(scope="module")
def eager() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def tokenizer(eager: Any) -> Any:
    return word_tokenizer(eager.config.vocab_size)


@pytest.fixture(scope="module")
def model(eager: Any) -> Any:
    return hf.convert(copy.deepcopy(eager), max_batch_size=2, max_seq_len=256, attention_only=False)


@pytest.fixture(scope="module")
def client(server: Any, model: Any, tokenizer: Any) -> Any:
    with TestClient(server("tiny", model, tokenizer), raise_server_exceptions=False) as client:
        yield client


def expected(eager: Any, tokenizer: Any, prompt: str, **options: Any) -> str:
    """Return the text that `generate` of eager transformers adds to `prompt`."""
    tokens = tokenizer(prompt, return_tensors="pt")
    options = {"max_new_tokens": TOKENS, "do_sample": False} | options
    out = eager.generate(**tokens, **options)
    return str(tokenizer.decode(out[0, tokens.input_ids.shape[1] :], skip_special_tokens=True))


def complete(client: Any, prompt: str, **options: Any) -> Any:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0} | options
    return client.post("/v1/completions", json=body)


def events(text: str) -> list[dict[str, Any]]:
    """Return the objects of a stream of server-sent events."""
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]


@pytest.mark.parametrize("options", [{}, {"frequency_penalty": 0.5}], ids=str)
def test_completions_are_those_of_eager_transformers(client: Any, eager: Any, tokenizer: Any, options: Any) -> None:
    penalty = {"repetition_penalty": 1.5} if options else {}
    for prompt in PROMPTS:
        answer = complete(client, prompt, **options).json()
        assert answer["choices"][0]["text"] == expected(eager, tokenizer, prompt, **penalty)
        assert answer["usage"]["completion_tokens"] == TOKENS


def test_a_stream_has_the_text_of_the_answer(client: Any, eager: Any, tokenizer: Any) -> None:
    streamed = events(complete(client, PROMPTS[0], stream=True).text)
    text = "".join(event["choices"][0]["text"] for event in streamed)
    assert text.split() == expected(eager, tokenizer, PROMPTS[0]).split()
    assert streamed[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_chat(client: Any, eager: Any, tokenizer: Any, stream: bool) -> None:
    messages = [{"role": "user", "content": "w8 w9"}, {"role": "assistant", "content": "w4"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": TOKENS, "temperature": 0, "stream": stream}
    answer = client.post("/v1/chat/completions", json=body)
    if stream:
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in events(answer.text))
    else:
        text = answer.json()["choices"][0]["message"]["content"]
    assert text.split() == expected(eager, tokenizer, "w8 w9 w4").split()


def test_requests_at_once_get_their_answers(client: Any, eager: Any, tokenizer: Any) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: complete(client, prompt).json()["choices"][0]["text"], PROMPTS))
    assert answers == [expected(eager, tokenizer, prompt) for prompt in PROMPTS]


def test_refusals_reach_the_client_with_their_code(client: Any, eager: Any, tokenizer: Any) -> None:
    for options, code in (
        ({"max_tokens": 1024}, "E204"),
        ({"prompt": ""}, "E208"),
        ({"generation_config": json.dumps({"num_beams": 2})}, "E208"),
    ):
        answer = complete(client, **({"prompt": PROMPTS[0]} | options))
        assert answer.status_code == 400 and answer.json()["error"]["code"] == code
    assert "E204" in complete(client, PROMPTS[0], max_tokens=1024, stream=True).text
    assert complete(client, PROMPTS[0]).json()["choices"][0]["text"] == expected(eager, tokenizer, PROMPTS[0])


@pytest.mark.parametrize("options", [{"continuous_batching": True}, {"compile": True}], ids=str)
def test_other_caches_of_the_server_are_refused(server: Any, model: Any, tokenizer: Any, options: Any) -> None:
    with TestClient(server("tiny", model, tokenizer, **options), raise_server_exceptions=False) as client:
        answer = complete(client, PROMPTS[0])
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "E208"


def test_the_model_stays_after_a_reset(client: Any, eager: Any, tokenizer: Any, model: Any) -> None:
    """transformers would load the folder anew, as a model that is not converted."""
    assert client.post("/reset").status_code == 200
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert complete(client, PROMPTS[1]).json()["choices"][0]["text"] == expected(eager, tokenizer, PROMPTS[1])
    assert complete(client, PROMPTS[1], model="other").status_code == 400


class Gone(BaseStreamer):
    """A streamer whose client disconnects after two tokens."""

    def __init__(self) -> None:
        self.calls = 0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 3:
            raise ConnectionError

    def end(self) -> None:
        raise AssertionError("the stream has no end")


def test_a_client_that_disconnects_leaves_nothing(client: Any, model: Any, eager: Any, tokenizer: Any) -> None:
    with pytest.raises(ConnectionError):
        model.generate(**tokenizer(PROMPTS[2], return_tensors="pt"), max_new_tokens=TOKENS, streamer=Gone())
    assert complete(client, PROMPTS[0]).json()["choices"][0]["text"] == expected(eager, tokenizer, PROMPTS[0])
