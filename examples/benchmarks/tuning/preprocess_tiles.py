"""Tilings of the kernels of scenario `preprocess`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from dsv4_compile.bench import preprocess
from dsv4_compile.bench.problem import Only, Prepare, Problem, on_gpu
from dsv4_compile.ops.common.kernels import kernel_module, launcher

COLUMNS = preprocess.COLUMNS


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice of an op's kernel file: the function that makes it, short names of its values, and values to try."""

    function: str
    names: tuple[str, ...]
    values: tuple[tuple[int, ...], ...]


_ROWS_WARPS = Choice("tile", ("r", "w"), ((1, 1), (2, 1), (4, 1), (8, 1), (4, 2), (4, 4), (8, 4)))
CHOICES: Mapping[str, Choice] = {
    "fused_q_kv_rmsnorm": Choice("_warps", ("w",), ((1,), (2,), (4,), (8,))),
    "q_norm_rope": _ROWS_WARPS,
    "kv_rope_insert": _ROWS_WARPS,
    "q_norm_rope_kv_insert": _ROWS_WARPS,
    "inv_rope": Choice("_rows", ("h",), ((1,), (2,), (4,), (8,))),
    "inv_rope_fp8_quant": Choice("_block", ("t", "h"), ((1, 1), (1, 2), (1, 4), (2, 1), (4, 1), (4, 2), (8, 1))),
}


def problems(device: torch.device, only: Only) -> Iterator[Problem]:
    """Yield the problems of `preprocess` with an implementation for each tiling: `r4 w1` is 4 rows and 1 warp."""
    for problem in preprocess.problems(device, only):
        yield replace(problem, implementations=_implementations(problem.op))


def module_of(op: str) -> ModuleType:
    """Return the kernel module of `op`."""
    return kernel_module(op)


def _implementations(op: str) -> dict[str, Prepare]:
    choice = CHOICES[op]
    return {
        " ".join(f"{name}{n}" for name, n in zip(choice.names, value, strict=True)): partial(_prepare, op, value)
        for value in choice.values
    }


def _prepare(op: str, value: tuple[int, ...]) -> Any:
    module = module_of(op)
    chosen = value if len(value) > 1 else value[0]

    def call(*args: Any) -> Any:
        with mock.patch.object(module, CHOICES[op].function, lambda *sizes: chosen):
            return launcher(op)(*args)

    return on_gpu(call)
