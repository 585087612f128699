"""Tilings of the kernels of scenario `indexer`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dsv4_compile.bench import indexer
from dsv4_compile.bench.problem import Only, Prepare, Problem, on_gpu
from dsv4_compile.ops.common.kernels import kernel_module, launcher

COLUMNS = indexer.COLUMNS

_Tiles = Mapping[str, Mapping[str, Any]]
_COMPRESS = ((1, 4), (1, 8), (2, 4), (4, 4), (4, 2))
_QUERIES = ((4, 1), (8, 2), (16, 4), (16, 2), (32, 4), (64, 8))
_SCORE = ((64, 4, 1), (64, 4, 2), (64, 4, 3), (64, 4, 5), (64, 4, 7), (64, 8, 3), (32, 4, 3))
_SELECT = ((4096, 8), (4096, 4), (4096, 16), (8192, 16), (2048, 8))
TILES: Mapping[str, _Tiles] = {
    "compress_norm_rope_insert": {f"parts {p} w{w}": {"tiling": (p, w)} for p, w in _COMPRESS},
    "indexer_q_rope_quant": {f"h{h} w{w}": {"tile": (h, w)} for h, w in _QUERIES},
    "indexer_logits_topk": {
        **{f"e{e} w{w} s{s}": {"score_tile": (e, w, s)} for e, w, s in _SCORE},
        **{f"p{p}": {"programs": p} for p in (256, 512, 1024, 2048)},
        **{f"t{t} w{w}": {"select_tile": (t, w)} for t, w in _SELECT},
    },
}
"""Launcher arguments by op and name: heads, entries or keys of a tile, then warps, then stages; or programs; or parts
of an entry and warps, which replace those of the default tiling."""


def problems(device: torch.device, only: Only) -> Iterator[Problem]:
    """Yield the problems of `indexer` with a choice of tilings, with an implementation for each tiling."""
    for problem in indexer.problems(device, only):
        if problem.op in TILES:
            ways: dict[str, Prepare] = {n: partial(_prepare, problem.op, t) for n, t in TILES[problem.op].items()}
            yield replace(problem, implementations=ways)


def _prepare(op: str, tiles: Mapping[str, Any]) -> Any:
    if "tiling" not in tiles:
        return on_gpu(partial(launcher(op), **tiles))
    kernel, (parts, warps) = kernel_module(op), tiles["tiling"]

    def call(*args: Any) -> Any:
        default = kernel.pool_tiling(len(args[1]), args[10], len(args[6]))
        return launcher(op)(*args, tiling=default._replace(parts=parts, warps=warps))

    return on_gpu(call)
