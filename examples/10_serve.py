"""Serve a converted model through `transformers serve`: an OpenAI-compatible server of transformers.

`transformers serve FOLDER` itself loads with `from_pretrained`. This hands the same handlers a model of `hf.load`.
Chat, completions and responses, streamed or not; requests run one after the other.

    pip install 'transformers[serving]'
    python examples/10_serve.py FOLDER --max-seq-len 8192 --port 8000
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from transformers import AutoTokenizer
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import GenerationState

import dsv4_compile

try:
    from transformers.cli.serving.systemone import SystemOneHandler
except ImportError:  # transformers before 5.20
    SystemOneHandler = None


class LoadedModel(ModelManager):
    """A model manager that has one model and loads no other."""

    def __init__(self, name: str, model: Any, tokenizer: Any) -> None:
        super().__init__(device=str(model.device))
        self.force_model, self.pair = name, (model, tokenizer)

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        return self.pair

    def list_models(self, *_: Any) -> list[dict[str, Any]]:
        return [
            {"id": self.force_model, "object": "model", "created": 0, "owned_by": "", "status": {"value": "loaded"}}
        ]


def server(name: str, model: Any, tokenizer: Any, **options: Any) -> FastAPI:
    """Return the application of `transformers serve` with `model` under `name`; `options` are of GenerationState."""
    manager, state = LoadedModel(name, model, tokenizer), GenerationState(**options)
    handlers: dict[str, Any] = {
        "chat_handler": ChatCompletionHandler,
        "completion_handler": CompletionHandler,
        "response_handler": ResponseHandler,
        "transcription_handler": TranscriptionHandler,
    }
    if SystemOneHandler is not None:
        handlers["systemone_handler"] = SystemOneHandler
    handlers = {role: handler(manager, state) for role, handler in handlers.items()}
    app = build_server(manager, generation_state=state, **handlers)

    @app.exception_handler(dsv4_compile.DSV4Error)
    async def explain(_: Request, fault: dsv4_compile.DSV4Error) -> JSONResponse:
        return JSONResponse({"error": {"code": fault.code, "message": str(fault)}}, status_code=400)

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--max-seq-len", type=int, default=8192)
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = dsv4_compile.hf.load(
        args.folder, device=device, max_batch_size=1, max_seq_len=args.max_seq_len, warm_up=True
    )
    uvicorn.run(server(args.folder, model, tokenizer), host=args.host, port=args.port)


if __name__ == "__main__":
    main()
