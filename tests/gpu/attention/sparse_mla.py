"""The decode kernels on a GPU, each by itself, and how their results are compared."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.attention import sparse_mla_decode_triton
from dsv4_compile.kernels.attention.common import DecodeCall, decode_call
from dsv4_compile.kernels.host.gpu import SM90, gpu_of
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.reference.attention.sparse_mla_decode import DecodeArguments, DecodeQuantArguments
from dsv4_compile.testing import Tolerance, assert_close
from dsv4_compile.testing.generate import to_device

CUDA = torch.device("cuda")
BF16: dict[str, Any] = {"dim": 512, "dtype": torch.bfloat16}
EPS = 1e-6
FEW_KEYS = "attention_few_keys"
NORMED_LSE = "lse_normed"
IS_HOPPER = gpu_of(CUDA).capability == SM90

Result = tuple[Tensor, Tensor]


def on_gpu(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(to_device(a, CUDA) if isinstance(a, Tensor) else a for a in args)


def rope(tokens: int, seed: int = 0) -> dict[str, Tensor]:
    """Return positions, some of them outside the table, and a table."""
    generator = torch.Generator(CUDA).manual_seed(seed)
    angle = 6.28 * torch.rand(4096, layout.ROPE_DIM // 2, device=CUDA, generator=generator)
    positions = torch.randint(-9, 4105, (tokens,), device=CUDA, generator=generator)
    return {"positions": positions, "cos_sin_cache": torch.cat((angle.cos(), angle.sin()), dim=1)}


def call_of(args: tuple[Any, ...], options: dict[str, Any]) -> DecodeCall:
    """Return a call of an op; options with `n_groups` are those of the op that quantises."""
    if "n_groups" in options:
        return decode_call(DecodeQuantArguments(*args, **{"inverse_rope": False, **options}))
    return decode_call(DecodeArguments(*args, **options))


def by_triton(args: tuple[Any, ...], splits: int = 0, **options: Any) -> Result:
    return sparse_mla_decode_triton.launch(call_of(args, options), gpu_of(CUDA), splits)


def _by_module(stem: str, args: tuple[Any, ...], splits: int, options: dict[str, Any]) -> Result:
    """Run the kernel of the module `stem`, which must support the call."""
    kernel, call = importlib.import_module(f"dsv4_compile.kernels.{stem}"), call_of(args, options)
    assert kernel.why_unsupported(call) == ""
    result: Result = kernel.launch(call, gpu_of(CUDA), splits)
    return result


def by_many(args: tuple[Any, ...], splits: int = 0, **options: Any) -> Result:
    return _by_module("attention.sparse_mla_decode_sm90", args, splits, options)


def by_few_heads(args: tuple[Any, ...], splits: int = 0, **options: Any) -> Result:
    return _by_module("attention.sparse_mla_decode_sm90_few_heads", args, splits, options)


def by_few_tokens(args: tuple[Any, ...], splits: int = 0, **options: Any) -> Result:
    """Run the kernel for few tokens, however many there are."""
    few_tokens = importlib.import_module("dsv4_compile.kernels.attention.sparse_mla_decode_sm90_few_tokens")
    keys = args[2].shape[1] + args[9].shape[1]
    chosen = few_tokens.choose_tiling(*args[0].shape[:2], keys) or few_tokens.ONE_BLOCK[1]
    with mock.patch.object(few_tokens, "choose_tiling", lambda *_: chosen):
        return _by_module("attention.sparse_mla_decode_sm90_few_tokens", args, splits, options)


SM90_KERNELS = {"many": by_many, "few_heads": by_few_heads, "few_tokens": by_few_tokens}
KERNELS: dict[str, Callable[..., Result]] = {"triton": by_triton, **(SM90_KERNELS if IS_HOPPER else {})}
FOR_MANY = [name for name in KERNELS if name != "few_tokens"]
"""Kernels with results that do not depend on the batch, however large."""
FEW_HEADS = 32


def heads_of(kernel: str, heads: int) -> int:
    """Return `heads`, 64 or 128, or as many as a shard has for the kernel for few heads."""
    return heads // 4 if kernel == "few_heads" else heads


def kernels_for(heads: int) -> list[Callable[..., Result]]:
    """Return all kernels of this GPU that support so many heads."""
    unsupported = ("many", "few_tokens") if heads <= FEW_HEADS else ("few_heads",)
    return [call for name, call in KERNELS.items() if name not in unsupported]


def reference(args: tuple[Any, ...], **options: Any) -> Result:
    result: Result = REFERENCES["sparse_mla_decode"](*args, **options)
    return result


def assert_same(
    got: Result,
    want: Result,
    tolerance: str | Tolerance = "attention_bfloat16",
    lse: str | Tolerance = "lse",
    *,
    turned: int = 0,
) -> None:
    """Check results within tolerances. `turned`: last columns of the outputs that were rotated back."""
    assert_close(got[0], want[0], tolerance, label="out", turned=turned)
    assert_close(got[1], want[1], lse, label="lse")


@pytest.fixture(autouse=True)
def garbage() -> Iterator[None]:
    """Let new outputs and workspaces begin as NaN."""
    with torch.no_grad():
        poison = torch.full((1 << 28,), 0xFF, dtype=torch.uint8, device=CUDA)
        del poison
        yield
