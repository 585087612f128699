"""Strips of a product of few tokens on Hopper that arrive together, and memory that the compiler knows nothing of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.kernels.linear.test_grouped_matmul import e4m3

from dsv4_compile.kernels.hopper import cluster_mailbox as cluster_hopper
from dsv4_compile.kernels.linear import gemm_sm90_small as grouped_matmul_hopper
from dsv4_compile.testing import assert_bitwise, fake_triton
from tests.simulator.products import GPU, launches, product, simulated_products


@pytest.fixture(scope="module")
def hopper() -> Iterator[Any]:
    with simulated_products() as found:
        yield found


def test_memory_is_asked_for_that_the_compiler_does_not_know_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """47.5 KiB of a kernel and an inbox of more than 0.5 are more than a kernel may have without."""
    monkeypatch.setattr(grouped_matmul_hopper, "choose_cut", lambda *_: grouped_matmul_hopper.Cut(64, 4, 3, 8, True))
    x, scale = torch.empty(8, 1, 5120, dtype=torch.float8_e4m3fn), torch.empty(8, 1, 40)
    weight, weight_scale = torch.empty(256, 5120, dtype=x.dtype), torch.empty(2, 40)
    with fake_triton.compiled_for(fake_triton.HOPPER) as compiled:
        grouped_matmul_hopper.launch_hopper(x, scale, weight, weight_scale, torch.empty(8, 256), False, GPU)
    (kernel,) = compiled
    used = kernel.packed_metadata[2]
    inbox = fake_triton.resources(kernel)["SHARED"] - grouped_matmul_hopper.RESERVED_BYTES
    assert used <= cluster_hopper.UNASKED_BYTES < used + inbox
    assert kernel.metadata.shared > cluster_hopper.UNASKED_BYTES


@pytest.mark.parametrize(("each", "turn", "wide"), [(1, 1, 1), (3, 3, 2), (4, 4, 2), (5, 3, 2), (7, 4, 2), (8, 4, 2)])
def test_turns_are_as_full_as_may_be(each: int, turn: int, wide: int) -> None:
    """Of as many sums as there are registers for."""
    small, large = grouped_matmul_hopper.Cut(64, 4, 2, 1), grouped_matmul_hopper.Cut(128, 4, 2, 1)
    assert grouped_matmul_hopper.strips_of_a_turn(small, 8, each) == turn
    assert grouped_matmul_hopper.strips_of_a_turn(large, 64, each) == wide


@pytest.mark.parametrize(("rows", "size", "turn"), [(1024, 512, 4), (1024, 16384, 1), (32768, 512, 1)])
def test_programs_alone_on_their_processor_with_all_strips_there_take_turns(rows: int, size: int, turn: int) -> None:
    x, scale = torch.empty(64, 1, size, dtype=torch.float8_e4m3fn), torch.empty(64, 1, size // 128)
    weight, weight_scale = torch.empty(rows, size, dtype=x.dtype), torch.empty(rows // 128, size // 128)
    with launches(grouped_matmul_hopper) as found:
        grouped_matmul_hopper.launch_hopper(x, scale, weight, weight_scale, torch.empty(64, rows), False, GPU)
    assert found[0]["TURN"] == turn


@pytest.mark.parametrize("strips", range(1, 9))
def test_strips_of_a_turn_that_is_not_full_count_once(
    hopper: Any, strips: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is in them: an infinite scale times nothing would be no number."""
    weight, scale = e4m3(64, 128 * strips), torch.full((1, strips), 2.0)
    values, x_scale = e4m3(8, 128 * strips), torch.ones(8, 1, strips)
    x_scale[3, 0, -1] = scale[0, 0] = torch.inf
    cut = (64, 4, 2, 1)
    got = [product(hopper, values[:, None], x_scale, weight, scale, torch.float32, cut=cut)]
    monkeypatch.setattr(hopper, "MOST_STRIPS_OF_A_TURN", 1)
    got.append(product(hopper, values[:, None], x_scale, weight, scale, torch.float32, cut=cut))
    assert_bitwise(*got)
