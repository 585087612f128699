"""Scenario `gemm_tiles`: the products of `gemm` with every cut they could choose, for few tokens.

`n128 w4 s3 p2` is 128 rows of the weight in a tile, 4 warps, 3 stages, and at least 2 programs for each processor, if
there are strips enough. Where the kernel for Hopper runs, it takes as many stages as fit, and 2 programs are as many as
a processor has room for; there, `n128 w4 c8 p3` is tried too, clusters of 8 that share a tile, with room for 3 programs
in a processor. What the launchers choose is read off the table.
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

from ..layout import cdiv
from ..ops.common.kernels import launcher
from . import gemm
from .implementations import on_gpu
from .problem import Only, Problem

COLUMNS = gemm.COLUMNS
TOKENS = (1, 8, 16, 32, 64)
TILES = ((64, 4, 4), (64, 4, 6), (128, 4, 3), (128, 4, 4), (128, 8, 4), (256, 8, 3), (256, 8, 4))
"""Rows of the weight, warps and stages."""
PROGRAMS = (1, 2, 4)
CLUSTERS = ((64, 4, 2), (64, 4, 4), (64, 4, 8), (128, 4, 4), (128, 4, 8), (256, 8, 4))
"""Rows of the weight, warps and programs of a cluster, for Hopper."""
PROGRAMS_OF_CLUSTERS = (1, 2, 3)


def problems(device: torch.device, only: Only) -> Iterator[Problem]:
    """The problems of `gemm`, with a cut for each implementation."""
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
                    _prepare_clusters, problem.op, hopper, hopper.Cut(rows, warps, programs, splits, True)
                )
                for rows, warps, splits in CLUSTERS
                for programs in PROGRAMS_OF_CLUSTERS
            }
        yield replace(problem, implementations=ways)


def _prepare_clusters(op: str, hopper: Any, cut: Any) -> Any:
    def call(*args: Any) -> Any:
        with mock.patch.object(hopper, "choose_cut", lambda *sizes: cut):
            return launcher(op)(*args)

    return on_gpu(call)


def _prepare(op: str, tile: tuple[int, int, int], programs: int) -> Any:
    portable, (block_n, warps, stages) = importlib.import_module("dsv4_compile.kernels.linear.gemm"), tile
    usual = portable.choose_cut

    def cut(gpu: Any, tokens: int, groups: int, rows: int, strips: int) -> Any:
        block_m = usual(gpu, tokens, groups, rows, strips).block_m
        tiles = cdiv(tokens, block_m) * groups * cdiv(rows, block_n)
        splits = max(1, min(strips, cdiv(gpu.sms * programs, tiles)))
        return portable.Cut(block_m, block_n, warps, stages, cdiv(strips, cdiv(strips, splits)))

    def hopper_cut(gpu: Any, tokens: int, groups: int, rows: int, strips: int, *kind: bool) -> Any:
        wanted = max(1, min(strips, gpu.sms * programs // (groups * cdiv(rows, block_n))))
        return hopper.Cut(block_n, warps, programs, cdiv(strips, cdiv(strips, wanted)))

    def call(*args: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(portable, "choose_cut", cut))
            if hopper is not None:
                stack.enter_context(mock.patch.object(hopper, "choose_cut", hopper_cut))
            return launcher(op)(*args)

    call = on_gpu(call)
    hopper = _hopper_module()
    return call


def _hopper_module() -> Any:
    """The kernel for Hopper, None elsewhere."""
    if not torch.cuda.is_available():
        return None
    gpu = importlib.import_module("dsv4_compile.kernels.host.gpu")
    return gpu.sm90_module(gpu.gpu_of(torch.device("cuda")), "linear.gemm_sm90_small")
