"""Tilings of the kernels of scenario `sparse_mla_decode`, warm.

`h16 n64 w8 kp` is a program of the Triton kernel with 16 heads, 64 keys and 8 warps, k for keys first and p for
prefetch; `x2` splits for twice as many programs. `hopper 160 136` is the Hopper kernel with these registers, and
`few h8 r168 n3` the one for few heads with 8 heads, 168 registers in each producer thread and 3 buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from dsv4_compile.bench import sparse_mla_decode as scenario
from dsv4_compile.bench.problem import Only, Prepare, Problem, Unavailable, on_gpu
from dsv4_compile.reference.attention.sparse_mla_decode import DecodeArguments

COLUMNS = tuple(name for name in scenario.COLUMNS if name != "fused")

# Heads, keys, warps, keys first, prefetch.
_FEW = (
    (8, 64, 8, 1, 1),
    (8, 32, 4, 1, 1),
    (16, 64, 8, 0, 1),
    (16, 64, 4, 0, 1),
    (16, 32, 4, 0, 1),
    (16, 64, 8, 1, 1),
    (16, 128, 8, 1, 1),
    (16, 32, 4, 0, 0),
)
_SOME = ((32, 64, 8, 1, 1), (32, 32, 4, 1, 1), (16, 64, 8, 0, 1), (16, 64, 4, 0, 1), (32, 64, 8, 1, 0))
_MANY = (
    (64, 64, 8, 0, 0),
    (64, 64, 8, 0, 1),
    (64, 32, 8, 1, 1),
    (64, 32, 8, 0, 0),
    (32, 64, 8, 1, 1),
    (16, 64, 8, 0, 1),
)
TILES: Mapping[int, tuple[tuple[int, ...], ...]] = {16: _FEW, 32: _SOME, 128: _MANY}
"""Tilings of the Triton kernel by the largest number of heads that they are tried for."""
HOPPER: Mapping[str, Mapping[str, Any]] = {
    "hopper": {},
    "hopper 160 136": {"PRODUCER_REGISTERS": 136},
}
"""Constants of the Hopper kernel's module by name of the variant."""
FEW_HEADS: Mapping[int, tuple[tuple[int, int, int], ...]] = {
    8: ((8, 168, 3), (8, 160, 3), (8, 152, 3), (8, 168, 2), (16, 160, 3)),
    16: ((16, 160, 3), (16, 168, 3), (16, 160, 2)),
    32: ((32, 144, 2), (32, 136, 2), (32, 152, 2), (16, 160, 3)),
}
"""Heads, registers and buffers of the kernel for few heads, by the largest number of heads they are tried for."""


def problems(device: torch.device, only: Only) -> Iterator[Problem]:
    """Yield the problems of `sparse_mla_decode` without fused steps, with an implementation for each tiling."""
    for problem in scenario.problems(device, {**only, "fused": ("none",)}):
        heads = int(problem.params["heads"])
        tiles = next(tiles for most, tiles in TILES.items() if heads <= most)
        ways: dict[str, Prepare] = {name_of(t): partial(_portable, t, 1) for t in tiles}
        ways |= {f"{name_of(t)} x2": partial(_portable, t, 2) for t in tiles[:3]}
        shapes = next((shapes for most, shapes in FEW_HEADS.items() if heads <= most), ())
        ways |= {f"few h{h} r{r} n{n}": partial(_few, (h, r, n)) for h, r, n in shapes}
        if heads % 64 == 0:
            ways |= {name: partial(_hopper, constants) for name, constants in HOPPER.items()}
        yield replace(problem, implementations=ways, cold=False)


def name_of(tiles: tuple[int, ...]) -> str:
    """Return the name of a tiling in the table."""
    heads, keys, warps, keys_first, prefetch = tiles
    return f"h{heads} n{keys} w{warps} {'k' if keys_first else ''}{'p' if prefetch else ''}".rstrip()


def _portable(tiles: tuple[int, ...], waves: int) -> Any:
    from dsv4_compile.kernels.attention import sparse_mla_decode_triton as kernel
    from dsv4_compile.kernels.attention.common import decode_call
    from dsv4_compile.kernels.host.gpu import gpu_of

    heads, keys, warps, keys_first, prefetch = tiles
    cut = kernel.Tiles(heads, keys, warps, bool(keys_first), bool(prefetch))

    def call(*args: Any) -> Any:
        gpu = gpu_of(args[0].device)
        wider = gpu._replace(sms=waves * gpu.sms)
        return kernel.launch(decode_call(DecodeArguments(*args)), wider, tiles=cut)

    return on_gpu(call)


def _check_hopper() -> None:
    from dsv4_compile.kernels.host.gpu import SM90 as capability
    from dsv4_compile.kernels.host.gpu import gpu_of

    on_gpu(gpu_of)
    if gpu_of(torch.device("cuda")).capability != capability:
        raise Unavailable("the Hopper kernel runs on Hopper")


def _few(shape: tuple[int, int, int]) -> Any:
    _check_hopper()
    from dsv4_compile.kernels.attention import sparse_mla_decode_sm90_few_heads as kernel
    from dsv4_compile.kernels.attention.common import decode_call
    from dsv4_compile.kernels.host.gpu import gpu_of

    def call(*args: Any) -> Any:
        tiling = kernel.Tiling(*shape)
        return kernel.launch(decode_call(DecodeArguments(*args)), gpu_of(args[0].device), tiling=tiling)

    return call


def _hopper(constants: Mapping[str, Any]) -> Any:
    _check_hopper()
    from dsv4_compile.kernels.attention import sparse_mla_decode_sm90 as kernel
    from dsv4_compile.kernels.attention.common import decode_call
    from dsv4_compile.kernels.host.gpu import gpu_of

    def call(*args: Any) -> Any:
        with mock.patch.multiple(kernel, **constants) if constants else nullcontext():
            return kernel.launch(decode_call(DecodeArguments(*args)), gpu_of(args[0].device))

    return call
