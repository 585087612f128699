"""MMA operands that Triton repeats along K, read from kernels compiled for Hopper."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.support.fake_triton import HOPPER, compiled_for


@triton.jit
def pairs_kernel(p_out, p_x, p_pairs, N: tl.constexpr, JOINED: tl.constexpr):
    o, o_n = tl.arange(0, 64), tl.arange(0, N)
    pairs = tl.load(p_pairs + o_n[:, None] * 32 + tl.arange(0, 32)[None, :])
    if JOINED:
        codes = tl.join(pairs & 0xF, pairs >> 4)
    else:
        codes = (pairs.to(tl.int32)[:, :, None] >> (4 * tl.arange(0, 2))[None, None, :]) & 0xF
    keys = tl.reshape(codes, (N, 64)).to(tl.float32).to(tl.bfloat16)
    x = tl.load(p_x + tl.arange(0, 16)[:, None] * N + o_n[None, :])
    tl.store(p_out + tl.arange(0, 16)[:, None] * 64 + o[None, :], tl.dot(x, keys))


def compile_pairs(n: int, joined: bool) -> None:
    out, x, pairs = torch.zeros(16, 64), torch.zeros(16, n).bfloat16(), torch.zeros(n, 32, dtype=torch.uint8)
    with compiled_for(HOPPER):
        pairs_kernel[(1,)](out, x, pairs, N=n, JOINED=joined, num_warps=4)


def test_sums_of_16_keys_that_were_joined_are_found() -> None:
    with pytest.raises(AssertionError, match=r"pairs_kernel multiplies operands that repeat along K.*kWidth = 8"):
        compile_pairs(16, True)


@pytest.mark.parametrize(("n", "joined"), [(32, True), (16, False)])
def test_more_keys_or_none_joined_pass(n: int, joined: bool) -> None:
    compile_pairs(n, joined)
