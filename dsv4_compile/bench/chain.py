"""Scenario `chain`: a layer up to its attention, from hidden states to queries and caches, projections included.

`eager` and `inductor` are plain PyTorch (plain.py), run eagerly and by stock torch.compile. `dsv4` is the same work in
this package's ops, compiled by its backend; `ir` and `triton` name the implementation that it prefers. `projections`
are the GEMMs alone: a chain's time less theirs is that of everything else.

A step of up to `MOST_REQUESTS` tokens is a decode step of one token a request: each token closes a group of the
compressor; more tokens are the last chunk of one prompt. The indexer is not part of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import layout
from ..backend import dsv4
from ..config import DeepseekV4Config
from ..modules.linear import linear
from ..reference.common import kv_format
from . import plain
from .chain_layers import CACHE, ENTRIES, STATE, TOKENS_FIRST, WINDOW, ChainInputs, ChainLayer, project
from .gemm import MODELS
from .problem import Args, Only, Prepare, Problem, compiled, keep

TOKENS = {"cuda": (1, 8, 32, 128, 512, 4096, 16384), "cpu": (1, 8)}
COLUMNS = ("op", "layer", "model", "tokens", "impl")
OPS = ("chain", "projections")
LAYERS: Mapping[str, int] = {"SWA": 1, "HCA": layout.HCA_RATIO, "CSA": layout.CSA_RATIO}
MOST_REQUESTS = {"cuda": 512, "cpu": 8}
CONTEXT = {"cuda": 16384, "cpu": 1024}
TYPICAL_TOKENS = {"cuda": 128, "cpu": 4}
_ENTRIES_RESULT = 3
"""Position of the compressor's cache among the results of a chain: the queries, then the written arguments."""


def problems(
    device: torch.device,
    only: Only,
    models: Mapping[str, DeepseekV4Config] | None = None,
    tokens: Sequence[int] | None = None,
) -> Iterator[Problem]:
    """Yield the chain and its projections, for every kind of layer of both models, or other ones, at every size."""
    sizes = [t for t in tokens or TOKENS[device.type] if keep(only, tokens=t) and any(keep(only, op=op) for op in OPS)]
    for model, config in (models or MODELS).items():
        for kind, ratio in LAYERS.items():
            params = {"layer": kind, "model": model}
            if not sizes or not keep(only, **params):
                continue
            most = max(TYPICAL_TOKENS[device.type], MOST_REQUESTS[device.type], *sizes)
            layer = ChainLayer(config, ratio, max(CONTEXT[device.type], most), MOST_REQUESTS[device.type], most, device)
            for op, reference, written, ways in _ops(layer):
                if not keep(only, op=op):
                    continue
                for size in sizes:
                    yield Problem(
                        op=op,
                        params={**params, "tokens": size},
                        make=partial(layer.inputs, size),
                        written=written,
                        cost=layer.cost(size),
                        reference=reference,
                        implementations=ways,
                        published={},
                        differs=differs,
                    )


_Ways = tuple[str, Callable[..., Any], tuple[int, ...], Mapping[str, Prepare]]


def _ops(layer: ChainLayer) -> Iterator[_Ways]:
    """Yield names, references, positions of written arguments, and implementations."""
    dynamic = tuple(i for i in TOKENS_FIRST if layer.ratio > 1 or i < STATE)

    def prepared(function: Callable[..., Any], backend: Any, **options: Any) -> Prepare:
        def typical() -> Args:
            return layer.inputs(TYPICAL_TOKENS[layer.device.type], 0)

        return functools.cache(lambda: compiled(function, backend, typical, dynamic, **options))

    ways = {
        "eager": lambda: layer.in_plain_pytorch,
        "inductor": prepared(layer.in_plain_pytorch, "inductor"),
        "dsv4": prepared(layer.in_ops, dsv4),
        **{impl: prepared(layer.in_ops, dsv4, **{"dsv4.impl": impl}) for impl in ("ir", "triton")},
    }
    written = (WINDOW, STATE, ENTRIES) if layer.ratio > 1 else (WINDOW,)
    yield "chain", layer.in_plain_pytorch, written, ways

    def apart(*args: Any) -> list[Tensor]:
        i, multiply = ChainInputs(*args), torch.nn.functional.linear
        wq_a, wkv, *compressor = i.w_in.split(layer.widths)
        qr = multiply(i.hidden, wq_a)
        wide = (plain.linear_fp32(i.hidden, w) for w in compressor)
        return [multiply(qr, i.wq_b), multiply(i.hidden, wkv), *wide]

    def stacked(*args: Any) -> list[Tensor]:
        i = ChainInputs(*args)
        qr, kv, *scores = project(i.hidden, i.w_in, layer.widths)
        return [linear(qr, i.wq_b), kv.contiguous(), *(x for s in scores for x in halves(s))]

    def halves(x: Tensor) -> list[Tensor]:
        return [half.contiguous() for half in x.chunk(2, dim=-1)]

    yield "projections", apart, (), {"eager": lambda: apart, "stacked": lambda: stacked}


def differs(got: Sequence[Tensor], want: Sequence[Tensor]) -> str:
    """Return why results disagree with plain PyTorch, or "".

    A GEMM may add in a different order, so that a value quantised after it may be a neighbour; caches are compared by
    the vectors that they hold.
    """
    for index, (actual, expected) in enumerate(zip(got, want, strict=True)):
        if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
            return (
                f"result {index} is {actual.dtype} {tuple(actual.shape)}, plain PyTorch gives {tuple(expected.shape)}"
            )
        step = 1 / 64
        if expected.dtype is torch.uint8:
            # The last page of the entries is a dummy.
            pages = expected.shape[0] - (index == _ENTRIES_RESULT)
            actual, expected, step = _vectors(actual[:pages]), _vectors(expected[:pages]), 1 / 8
        wide = expected.float()
        allowed = 1.01 * step * wide.abs() + step / 8 * wide.square().mean().sqrt()
        # Negated, so that NaN is wrong.
        wrong = int((~((actual.float() - wide).abs() <= allowed)).sum())
        if wrong > 2 + 1e-4 * wide.numel():
            return f"result {index}: {wrong} of {wide.numel()} elements are wrong"
    return ""


def _vectors(cache: Tensor) -> Tensor:
    """Return all vectors of a cache in bfloat16."""
    block = cache.shape[1] // (layout.FP8_DS_MLA.data + layout.FP8_DS_MLA.scale)
    return kv_format.load_kv(cache, CACHE, block, torch.arange(cache.shape[0] * block, device=cache.device))
