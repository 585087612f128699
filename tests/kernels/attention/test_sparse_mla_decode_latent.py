"""The latent decode kernel, interpreted with every access checked, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.attention import sparse_mla_decode_triton as kernel
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher, refusal
from dsv4_compile.testing import assert_close, hostile_indices, padded, random_cache, strided
from dsv4_compile.testing.samples import op_samples
from tests.kernels.gpus import GPUS, shared_out
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
OP = "sparse_mla_decode_latent"
REFERENCE = REFERENCES[OP]


def compare(*args: Any, splits: int = 0) -> None:
    with checked(mutated=("p_out", "p_lse")):
        out, lse = launcher(OP)(*args, splits=splits)
    want_out, want_lse = REFERENCE(*args)
    assert out.stride() == want_out.stride()
    assert_close(lse, want_lse, "lse")
    assert_close(out, want_out, "attention_float32" if out.dtype is torch.float32 else "attention_bfloat16")


def case(
    tokens: int = 3, heads: int = 3, width: int = 60, dim: int = 40, value_dim: int = 24, dtype: Any = torch.float32
) -> list[Any]:
    """Return arguments with a fifth of all slots invalid, and NaN in all memory that is not selected."""
    pages = random_cache("plain", 3, 32, live=60, head_dim=dim, dtype=dtype)
    slots = pages.slots[torch.randint(60, (tokens, width))].int()
    slots = torch.where(torch.rand(tokens, width) < 0.2, hostile_indices((tokens, width), 96, fraction=1.0), slots)
    lens = torch.randint(width + 3, (tokens,), dtype=torch.int32)
    return [torch.randn(tokens, heads, dim).to(dtype), pages.cache, slots, lens, 32, 0.2, value_dim]


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize(("tokens", "heads", "width"), [(3, 3, 60), (1, 17, 5), (2, 1, 0), (0, 3, 9)])
def test_every_size_and_number_of_splits(tokens: int, heads: int, width: int, splits: int) -> None:
    compare(*case(tokens, heads, width), splits=splits)


@interpreted
def test_real_dims_in_float32() -> None:
    compare(*case(1, 2, 40, 576, 512))


@interpreted
@pytest.mark.parametrize("value_dim", [8, 33, 40])
def test_any_number_of_leading_dims_is_the_value(value_dim: int) -> None:
    compare(*case(value_dim=value_dim))


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
def test_any_strides(spread: Callable[[Tensor], Tensor]) -> None:
    q, cache, slots, lens, *rest = case()
    compare(spread(q), strided(torch.nan_to_num(cache)), spread(slots.long()), spread(lens.long()), *rest)


@interpreted
def test_rows_with_nothing_to_attend_are_zero() -> None:
    args = case()
    args[3] = torch.tensor([0, -4, 2**31 - 1], dtype=torch.int32)
    args[2] = torch.full_like(args[2], -1)
    compare(*args, splits=2)


@interpreted
def test_samples() -> None:
    compare(*op_samples(OP)[0])


def test_unsupported_dims_say_why() -> None:
    why_unsupported = refusal(OP)
    assert why_unsupported is not None
    assert "512 dims" in why_unsupported(*case(1, 1, 4, 1100, 520))
    assert why_unsupported(*case()) == ""


@pytest.mark.parametrize(
    ("target", "heads"), [(target, heads) for target, counts in shared_out((16, 128)).items() for heads in counts]
)
def test_it_compiles_ahead_of_time_with_the_tiles_of_the_gpu(target: str, heads: int) -> None:
    gpu, kibibytes = GPUS[target]
    args = case(2, heads, 128, 576, 512, torch.bfloat16)
    seen = mock.patch.object(kernel, "gpu_of", lambda device: gpu)
    with seen, compiled_for(target) as compiled:
        launcher(OP)(*args, splits=2)
    assert len(compiled) == 2
    assert all(binary.metadata.shared <= kibibytes * 1024 and binary.assembled for binary in compiled)
