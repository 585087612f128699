"""The decode kernels on a GPU, each by itself, and what their results are compared with."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.attention import sparse_mla_decode_triton as portable
from dsv4_compile.kernels.attention.sparse_mla_decode_plan import Fusion, Source, results_for
from dsv4_compile.kernels.host.gpu import SM90, gpu_of
from dsv4_compile.ops.common.define import REFERENCES
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
    """Positions, some of them outside the table, and a table."""
    generator = torch.Generator(CUDA).manual_seed(seed)
    angle = 6.28 * torch.rand(4096, layout.ROPE_DIM // 2, device=CUDA, generator=generator)
    positions = torch.randint(-9, 4105, (tokens,), device=CUDA, generator=generator)
    return {"positions": positions, "cos_sin_cache": torch.cat((angle.cos(), angle.sin()), dim=1)}


def by_portable(args: tuple[Any, ...], splits: int = 0, **options: Any) -> Result:
    window, extra, fusion = Source(*args[1:5]), Source(*args[8:12]), Fusion(**options)
    return portable.launch(
        args[0], window, extra, *args[5:8], args[12], gpu_of(CUDA), splits=splits, fusion=fusion,
        into=results_for(args[0], fusion),
    )  # fmt: skip


def _by_module(stem: str, args: tuple[Any, ...], splits: int, options: dict[str, Any]) -> Result:
    """The kernel of the module `stem`, which must take the call."""
    kernel = importlib.import_module(f"dsv4_compile.kernels.{stem}")
    window, extra, fusion = Source(*args[1:5]), Source(*args[8:12]), Fusion(**options)
    assert kernel.hopper_refuses(args[0], window, extra, args[5], args[7], fusion) == ""
    result: Result = kernel.launch_hopper(
        args[0], window, extra, args[6], args[7], gpu_of(CUDA), splits, fusion, results_for(args[0], fusion)
    )
    return result


def by_hopper(args: tuple[Any, ...], splits: int = 0, **options: Any) -> Result:
    return _by_module("attention.sparse_mla_decode_sm90", args, splits, options)


def by_few(args: tuple[Any, ...], splits: int = 0, **options: Any) -> Result:
    return _by_module("attention.sparse_mla_decode_sm90_few_heads", args, splits, options)


def by_small(args: tuple[Any, ...], splits: int = 0, **options: Any) -> Result:
    """However many tokens there are."""
    small = importlib.import_module("dsv4_compile.kernels.attention.sparse_mla_decode_sm90_few_tokens")
    chosen = small.shape_of(*args[0].shape[:2], args[2].shape[1] + args[9].shape[1]) or small.ONCE[1]
    with mock.patch.object(small, "shape_of", lambda *_: chosen):
        return _by_module("attention.sparse_mla_decode_sm90_few_tokens", args, splits, options)


MADE_FOR_HOPPER = {"hopper": by_hopper, "few": by_few, "small": by_small}
KERNELS: dict[str, Callable[..., Result]] = {"portable": by_portable, **(MADE_FOR_HOPPER if IS_HOPPER else {})}
FOR_MANY = [name for name in KERNELS if name != "small"]
"""Those whose results do not depend on the batch, however large."""
FEW_HEADS = 32


def heads_of(kernel: str, heads: int) -> int:
    """`heads`, 64 or 128, or as many as a shard has for the kernel that takes few."""
    return heads // 4 if kernel == "few" else heads


def kernels_for(heads: int) -> list[Callable[..., Result]]:
    """All kernels of this GPU that take so many heads."""
    refused = ("hopper", "small") if heads <= FEW_HEADS else ("few",)
    return [call for name, call in KERNELS.items() if name not in refused]


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
    """`turned`: of the outputs' columns, those that were rotated back."""
    assert_close(got[0], want[0], tolerance, label="out", turned=turned)
    assert_close(got[1], want[1], lse, label="lse")


@pytest.fixture(autouse=True)
def garbage() -> Iterator[None]:
    """New outputs and workspaces are made of NaN."""
    with torch.no_grad():
        made = torch.full((1 << 28,), 0xFF, dtype=torch.uint8, device=CUDA)
        del made
        yield
