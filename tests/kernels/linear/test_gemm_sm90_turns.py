"""MMAs issued together in a GEMM of few tokens on sm_90, and shared memory that the compiler does not know of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dsv4_compile.kernels.hopper.cluster_mailbox import DEFAULT_SHARED_BYTES
from dsv4_compile.kernels.linear import gemm_sm90_small
from dsv4_compile.kernels.linear.gemm import Operands
from dsv4_compile.kernels.linear.gemm_sm90_operands import CTA_RESERVED_BYTES
from dsv4_compile.kernels.linear.gemm_sm90_small import SmallTiling, mmas_ahead
from dsv4_compile.testing import assert_bitwise
from tests.kernels.linear.test_gemm import e4m3
from tests.simulator.products import GPU, launches, product, simulated_products
from tests.tools.compiled_facts import compiled_for


@pytest.fixture(scope="module")
def hopper() -> Iterator[Any]:
    with simulated_products() as products:
        yield products


def test_memory_is_asked_for_that_the_compiler_does_not_know_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """47.5 KiB of a kernel and a mailbox of more than 0.5 are more than a kernel may have without."""
    monkeypatch.setattr(gemm_sm90_small, "choose_tiling", lambda *_: SmallTiling(64, 4, 3, 8, True))
    x, scale = torch.empty(8, 1, 5120, dtype=torch.float8_e4m3fn), torch.empty(8, 1, 40)
    weight, weight_scale = torch.empty(256, 5120, dtype=x.dtype), torch.empty(2, 40)
    with compiled_for("sm_90") as compiled:
        gemm_sm90_small.launch(Operands(x, scale, weight, weight_scale), torch.empty(8, 256), False, GPU)
    (kernel,) = compiled
    used = kernel.packed_metadata[2]
    mailbox = kernel.resources()["SHARED"] - CTA_RESERVED_BYTES
    assert used <= DEFAULT_SHARED_BYTES < used + mailbox
    assert kernel.metadata.shared > DEFAULT_SHARED_BYTES


@pytest.mark.parametrize(
    ("k_blocks", "mmas", "wide"), [(1, 1, 1), (3, 3, 2), (4, 4, 2), (5, 3, 2), (7, 4, 2), (8, 4, 2)]
)
def test_mmas_are_spread_evenly(k_blocks: int, mmas: int, wide: int) -> None:
    """MMAs have as many sums in flight as there are registers for."""
    small, large = SmallTiling(64, 4, 2, 1), SmallTiling(128, 4, 2, 1)
    assert mmas_ahead(small, 8, k_blocks) == mmas
    assert mmas_ahead(large, 64, k_blocks) == wide


@pytest.mark.parametrize(("rows", "size", "mmas"), [(1024, 512, 4), (1024, 16384, 1), (32768, 512, 1)])
def test_ctas_alone_on_their_sm_with_all_k_blocks_in_the_ring_issue_mmas_ahead(rows: int, size: int, mmas: int) -> None:
    x, scale = torch.empty(64, 1, size, dtype=torch.float8_e4m3fn), torch.empty(64, 1, size // 128)
    weight, weight_scale = torch.empty(rows, size, dtype=x.dtype), torch.empty(rows // 128, size // 128)
    with launches(gemm_sm90_small) as calls:
        gemm_sm90_small.launch(Operands(x, scale, weight, weight_scale), torch.empty(64, rows), False, GPU)
    assert calls[0]["config"].mmas == mmas


@pytest.mark.parametrize("k_blocks", range(1, 9))
def test_k_blocks_of_a_turn_that_is_not_full_count_once(
    hopper: Any, k_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is in them: an infinite scale times nothing would be no number."""
    weight, scale = e4m3(64, 128 * k_blocks), torch.full((1, k_blocks), 2.0)
    values, x_scale = e4m3(8, 128 * k_blocks), torch.ones(8, 1, k_blocks)
    x_scale[3, 0, -1] = scale[0, 0] = torch.inf
    tiling = (64, 4, 2, 1)
    got = [product(hopper, values[:, None], x_scale, weight, scale, torch.float32, tiling=tiling)]
    monkeypatch.setattr(hopper, "MAX_MMAS", 1)
    got.append(product(hopper, values[:, None], x_scale, weight, scale, torch.float32, tiling=tiling))
    assert_bitwise(*got)
