"""Tilings of the kernels of scenario `gemm`, for few tokens.

`n128 w4 s3 p2` is a tile of 128 weight rows, 4 warps, 3 stages, and at least 2 programs for each SM if there are enough
K-blocks. The Hopper kernel takes as many stages as fit, with 2 CTAs resident on an SM; `n128 w4 c8 p3`, for it alone,
is a cluster of 8 CTAs that splits K, 3 CTAs resident on an SM.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from dsv4_compile.bench import gemm
from dsv4_compile.bench.problem import Only, Problem, on_gpu
from dsv4_compile.layout import cdiv
from dsv4_compile.ops.common.kernels import launcher

COLUMNS = gemm.COLUMNS
TOKENS = (1, 8, 16, 32, 64)
TILES = ((64, 4, 4), (64, 4, 6), (128, 4, 3), (128, 4, 4), (128, 8, 4), (256, 8, 3), (256, 8, 4))
"""Weight rows of a tile, warps and stages."""
PROGRAMS = (1, 2, 4)
CLUSTERS = ((64, 4, 2), (64, 4, 4), (64, 4, 8), (128, 4, 4), (128, 4, 8), (256, 8, 4))
"""Weight rows of a tile, warps and CTAs of a cluster, for Hopper."""
PROGRAMS_OF_CLUSTERS = (1, 2, 3)


def problems(device: torch.device, only: Only) -> Iterator[Problem]:
    """Yield the problems of `gemm` with an implementation for each tiling."""
    hopper = _hopper_module()
    for problem in gemm.problems(device, only, tokens=TOKENS):
        ways = {
            f"n{tile[0]} w{tile[1]} s{tile[2]} p{programs}": partial(_prepare, problem.op, tile, programs)
            for tile in TILES
            for programs in PROGRAMS
        }
        if hopper is not None:
            ways |= {
                f"n{rows} w{warps} c{splits} p{programs}": partial(
                    _prepare_clusters, problem.op, hopper, hopper.SmallTiling(rows, warps, programs, splits, True)
                )
                for rows, warps, splits in CLUSTERS
                for programs in PROGRAMS_OF_CLUSTERS
            }
        yield replace(problem, implementations=ways)


def _prepare_clusters(op: str, hopper: Any, tiling: Any) -> Any:
    def call(*args: Any) -> Any:
        with mock.patch.object(hopper, "choose_tiling", lambda *sizes: tiling):
            return launcher(op)(*args)

    return on_gpu(call)


def _prepare(op: str, tile: tuple[int, int, int], programs: int) -> Any:
    portable, (block_n, warps, stages) = importlib.import_module("dsv4_compile.kernels.linear.gemm"), tile
    default = portable.choose_tiling

    def tiling(gpu: Any, tokens: int, groups: int, rows: int, k_blocks: int) -> Any:
        block_m = default(gpu, tokens, groups, rows, k_blocks).block_m
        tiles = cdiv(tokens, block_m) * groups * cdiv(rows, block_n)
        splits = max(1, min(k_blocks, cdiv(gpu.sms * programs, tiles)))
        return portable.GemmTiling(block_m, block_n, warps, stages, cdiv(k_blocks, cdiv(k_blocks, splits)))

    def hopper_tiling(gpu: Any, tokens: int, groups: int, rows: int, k_blocks: int, *kind: bool) -> Any:
        wanted = max(1, min(k_blocks, gpu.sms * programs // (groups * cdiv(rows, block_n))))
        return hopper.SmallTiling(block_n, warps, programs, cdiv(k_blocks, cdiv(k_blocks, wanted)))

    def call(*args: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(portable, "choose_tiling", tiling))
            stack.enter_context(mock.patch.object(portable, "plan", portable.plan.__wrapped__))  # uncached
            if hopper is not None:
                stack.enter_context(mock.patch.object(hopper, "choose_tiling", hopper_tiling))
            return launcher(op)(*args)

    call = on_gpu(call)
    hopper = _hopper_module()
    return call


def _hopper_module() -> Any:
    """Return the module of the Hopper kernel, or None on a different GPU."""
    if not torch.cuda.is_available():
        return None
    gpu = importlib.import_module("dsv4_compile.kernels.host.gpu")
    return gpu.sm90_module(gpu.gpu_of(torch.device("cuda")), "linear.gemm_sm90_small")
