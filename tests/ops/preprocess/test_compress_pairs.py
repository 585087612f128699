"""`compress_pairs` against a token at a time, over rings, chunks and borders of steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.testing import assert_bitwise, check_op
from dsv4_compile.testing.samples import op_samples

EPS = 1e-20
compress = torch.ops.dsv4.compress_pairs


def sequence(tokens: int, dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    values, gates = torch.randn(2, tokens, dim)
    return values, gates, 1 + torch.randn(dim) / 8


def scalar(values: Tensor, gates: Tensor, weight: Tensor, position: int) -> Tensor:
    """The latent that ends at an odd position, in float64."""
    pair = slice(position - 1, position + 1)
    shares = gates[pair].double().exp() / gates[pair].double().exp().sum(0)
    pooled = (shares * values[pair].double()).sum(0)
    return pooled / (pooled.square().mean() + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("chunks", [[12], [1] * 12, [3, 1, 4, 4], [2, 5, 5], [7, 1, 1, 3]])
@pytest.mark.parametrize("ring", [2, 8])
def test_every_split_into_steps_pools_the_same_pairs(chunks: list[int], ring: int) -> None:
    values, gates, weight = sequence(12)
    state = torch.full((3, ring, 16), torch.nan)
    latents, start = [], 0
    for size in chunks:
        rows = slice(start, start + size)
        positions, requests = torch.arange(start, start + size), torch.full((size,), 1)
        latents.append(compress(values[rows], gates[rows], state, positions, requests, weight, EPS))
        start += size
    result = torch.cat(latents)
    assert result[0::2].abs().max() == 0, "no latent ends at an even position"
    for position in range(1, 12, 2):
        want = scalar(values, gates, weight, position)
        torch.testing.assert_close(result[position].double(), want, rtol=1e-4, atol=1e-5)
    assert state[[0, 2]].isnan().all(), "other requests' rows are not touched"


def test_requests_of_a_step_do_not_pool_with_each_other() -> None:
    """Rows of two requests alternate in length, with padding between; the even token of the second is in its ring."""
    values, gates, weight = sequence(7)
    state = torch.full((2, 8, 16), torch.nan)
    first = torch.cat((values[4], gates[4]))
    state[1, 2] = first
    positions, requests = torch.tensor([0, 1, -1, 3, 0]), torch.tensor([0, 0, -1, 1, 5])
    rows = [0, 1, 2, 5, 6]
    result = compress(values[rows], gates[rows], state, positions, requests, weight, EPS)
    torch.testing.assert_close(result[1].double(), scalar(values, gates, weight, 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result[3].double(), scalar(values[4:6], gates[4:6], weight, 1), rtol=1e-4, atol=1e-5)
    assert result[[0, 2, 4]].abs().max() == 0
    assert_bitwise(state[1, 2], first)


def test_equal_gates_pool_to_the_mean() -> None:
    values, gates, weight = sequence(2)
    result = compress(
        values, torch.zeros_like(gates), torch.zeros(1, 2, 16), torch.arange(2), torch.zeros(2).int(), weight, EPS
    )
    mean = values.double().mean(0)
    torch.testing.assert_close(
        result[1].double(), mean / mean.square().mean().sqrt() * weight.double(), rtol=1e-4, atol=1e-5
    )


def test_drafts_that_are_rejected_leave_no_trace() -> None:
    """Six positions are drafted, three of them are run again with other values: the pairs are those of the new ones."""
    values, gates, weight = sequence(10)
    wrong = torch.randn(6, 8)
    state, requests = torch.full((1, 8, 16), torch.nan), torch.zeros(10, dtype=torch.int32)
    positions = torch.arange(10)
    compress(values[:4], gates[:4], state, positions[:4], requests[:4], weight, EPS)
    tried = torch.cat((values[4:5], wrong[:5]))
    compress(tried, gates[4:10], state, positions[4:10], requests[:6], weight, EPS)
    result = compress(values[5:10], gates[5:10], state, positions[5:10], requests[:5], weight, EPS)
    for position in (5, 7, 9):
        want = scalar(values, gates, weight, position)
        torch.testing.assert_close(result[position - 5].double(), want, rtol=1e-4, atol=1e-5)


def test_pooled_values_are_rounded_before_the_norm() -> None:
    values, gates, weight = sequence(2)
    args = values, gates, torch.zeros(1, 2, 16), torch.arange(2), torch.zeros(2).int(), weight.bfloat16(), EPS
    pooled = (torch.softmax(gates, 0) * values).sum(0).bfloat16().float()
    want = pooled * torch.rsqrt(pooled.square().mean() + EPS) * weight.bfloat16().float()
    assert_bitwise(compress(*args)[1], want.bfloat16())


def test_op_keeps_its_promises() -> None:
    check_op(OPS["compress_pairs"], op_samples("compress_pairs")[1:])
    values, gates, state, positions, requests, *rest = op_samples("compress_pairs")[0]
    one = values[1:2], gates[1:2], state, positions[1:2], requests[1:2], *rest
    none = values, gates, state[:0], positions, requests, *rest
    check_op(OPS["compress_pairs"], [one, none], utilities=False)


def test_wrong_arguments_raise() -> None:
    args = list(op_samples("compress_pairs")[0])
    args[2] = args[2][..., 1:]
    with pytest.raises(InputError, match="values and gates"):
        compress(*args)
