"""Compile a checkpoint's model once and keep the result in a folder that travels: `dsv4 build`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any

import torch

from .. import progress
from ..errors import check
from .loading.load import load
from .model.compiled_model import save_compiled
from .model.warm_up import compile_and_warm_up, serving_options

PROMPT = 16
"""Length of prompts, if none is given."""
STEPS = 3
"""Tokens after each prompt: the first step compiles its graph, and later ones have its final inputs."""


def build(args: argparse.Namespace) -> str:
    """Load, compile, call and save the model, and return the digest of the folder."""
    options = dict(_option(text) for text in args.option)
    batches, prompts = _numbers("--batches", args.batches), _numbers("--prompts", args.prompts)
    model = load(
        args.folder,
        max_batch_size=args.max_batch_size,
        max_seq_len=args.max_seq_len,
        max_step_tokens=args.max_step_tokens,
        device=args.device,
        dtype=None if args.dtype is None else getattr(torch, args.dtype),
        dequantize=args.dequantize,
        kv_cache_dtype=args.kv_cache_dtype,
        indexer_cache_dtype=args.indexer_cache_dtype,
        hadamard=args.hadamard,
    )
    if args.batches is None and args.prompts is None:
        compile_and_warm_up(model, options)
    else:
        device = model.model.dsv4_cache.seq_lens.device
        model.compile(fullgraph=True, backend="dsv4", options=serving_options(device, options) or None)
        call(model, batches or [1, args.max_batch_size], prompts or [PROMPT])
    return save_compiled(model, args.out)


def call(model: Any, batches: Iterable[int], prompts: Iterable[int]) -> None:
    """Run prompts of random tokens of these lengths in these batch sizes, with a few steps after each."""
    sizes = [(batch, length) for batch in dict.fromkeys(batches) for length in dict.fromkeys(prompts)]
    device = model.model.dsv4_cache.seq_lens.device
    generator = torch.Generator().manual_seed(0)
    with progress.stage("compile", total=len(sizes)) as work:
        for batch, length in sizes:
            work.note(f"batch {batch}, prompt of {length} tokens")
            ids = torch.randint(1, model.config.vocab_size, (batch, length), generator=generator).to(device)
            mask = torch.ones_like(ids)
            model.generate(
                ids, attention_mask=mask, max_new_tokens=1 + STEPS, min_new_tokens=1 + STEPS, do_sample=False
            )
            work.advance()


def _numbers(name: str, text: str | None) -> list[int]:
    words = [] if text is None else text.split(",")
    good = all(word.isdecimal() and int(word) for word in words)
    check(good, "E201", got=f"{name} {text}", rule=f"{name} has positive numbers, separated by commas")
    return [int(word) for word in words]


def _option(text: str) -> tuple[str, Any]:
    """Return name and value of an option: JSON where it is some, else text."""
    name, equal, value = text.partition("=")
    check(bool(equal), "E301", got=f"--option {text}", fix="--option dsv4.cudagraph=full")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
