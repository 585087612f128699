"""The interpreter converts and multiplies as hardware does, so that a kernel's bytes can be compared on a CPU."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_compile.testing import assert_bitwise

pytestmark = pytest.mark.interpreted
TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
}


@triton.jit
def convert_kernel(out, x, N: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr, RAW: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(SOURCE, bitcast=True).to(TARGET).to(RAW, bitcast=True))


@triton.jit
def dot_kernel(out, a, b, N: tl.constexpr):
    i = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + i, tl.dot(tl.load(a + i), tl.load(b + i)))


@triton.jit
def arithmetic_kernel(out, smaller, a, b, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(out + i, x * y - x)
    tl.store(smaller + i, x < y)


@triton.jit
def _compose(a, b, x, y):
    return a * x, b * x + y


@triton.jit
def reduce_kernel(out, a, b, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, KEEP: tl.constexpr):
    i = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x, y = tl.reduce((tl.load(a + i), tl.load(b + i)), AXIS, _compose, KEEP)
    if KEEP:
        x, y = tl.reshape(x, (M * N // i.shape[AXIS],)), tl.reshape(y, (M * N // i.shape[AXIS],))
    o = tl.arange(0, M * N // i.shape[AXIS])
    tl.store(out + o, x)
    tl.store(out + M * N // i.shape[AXIS] + o, y)


@triton.jit
def operators_kernel(whole, real, logical, a, b, x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    m, n, u, v = tl.load(a + i), tl.load(b + i), tl.load(x + i), tl.load(y + i)
    tl.store(whole + i, ((7 - m) * n - 3 + (m & n) // 2) % 5 + (m | 9 ^ n) + ((m << 2) >> 1) + n.to(tl.int64))
    tl.store(real + i, (u + v) * 0.5 - v / u + (1 - u) * m)
    wide = tl.where((m[:, None] < n[None, :]) & (u[:, None] >= 0.25), u[:, None], 2.0)
    both = tl.where(wide < 0.5, 1.0, 2.0) + tl.where(m < n, 1.0, 2.0)
    column, lower = x + i[:, None], (i < N // 2)[:, None]
    both += tl.load(column, mask=(i < N // 2)[None, :], other=0.0) + tl.load(column, mask=lower, other=0.0)
    tl.store(logical + i[:, None] * N + i, tl.where(wide != v[None, :], both, m.to(tl.float32)[:, None]))


def convert(x: Tensor, target: torch.dtype) -> Tensor:
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    out = torch.empty(x.shape, dtype=raw[target.itemsize])
    kinds = {torch.uint8: tl.uint8, torch.int16: tl.int16, torch.int32: tl.int32}
    source = x.view(raw[x.element_size()])
    convert_kernel[(1,)](out, source, x.numel(), TYPES[x.dtype], TYPES[target], kinds[out.dtype])
    return out.view(target)


@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16])
def test_every_e4m3_code_widens_to_its_value(target: torch.dtype) -> None:
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    assert_bitwise(convert(codes, target), codes.to(target))


def test_every_bfloat16_widens_to_its_value() -> None:
    codes = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    assert_bitwise(convert(codes, torch.float32), codes.float())


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_float32_rounds_to_nearest_even(target: torch.dtype) -> None:
    codes = torch.arange(0x7F if target is torch.float8_e4m3fn else 1 << 14)
    exact = codes.to(torch.uint8 if target.itemsize == 1 else torch.int16).view(target).float()
    midpoints = (exact[:-1] + exact[1:]) / 2
    near = torch.cat((exact[1:], midpoints, midpoints * (1 + 2.0**-20), midpoints * (1 - 2.0**-20)))
    x = torch.cat((near, -near))
    x = x[: 1 << (x.numel().bit_length() - 1)]
    assert_bitwise(convert(x, target), x.to(target))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_matrices_of_every_dtype_multiply(dtype: torch.dtype) -> None:
    a, b = torch.randint(-9, 9, (2, 16, 16)).to(dtype)
    out = torch.empty(16, 16)
    dot_kernel[(1,)](out, a, b, 16)
    assert_bitwise(out, a.float() @ b.float())


def test_bfloat16_adds_multiplies_and_compares() -> None:
    a, b = torch.randn(2, 256).bfloat16()
    out, smaller = torch.empty_like(a), torch.empty(256, dtype=torch.bool)
    arithmetic_kernel[(1,)](out, smaller, a, b, 256)
    assert_bitwise(out, a * b - a)
    assert_bitwise(smaller, a < b)


def test_operators_give_the_same_when_they_are_called_again_for_other_values() -> None:
    """Patches of the interpreter learn from the first call what an operator is for its operands' types."""
    for size in (8, 8, 16):
        m, n = torch.randint(1, 100, (2, size), dtype=torch.int32)
        u, v = torch.rand(2, size)
        integers, real, logical = torch.empty(size, dtype=torch.int64), torch.empty(size), torch.empty(size, size)
        operators_kernel[(1,)](integers, real, logical, m, n, u, v, size)
        inner = (7 - m) * n - 3 + (m & n) // 2
        assert_bitwise(integers, (inner.fmod(5) + (m | 9 ^ n) + ((m << 2) >> 1) + n).long())
        assert_bitwise(real, (u + v) * 0.5 - v / u + (1 - u) * m)
        wide = torch.where((m[:, None] < n) & (u[:, None] >= 0.25), u[:, None], 2.0)
        both = torch.where(wide < 0.5, 1.0, 2.0) + torch.where(m < n, 1.0, 2.0)
        lower = torch.arange(size) < size // 2
        both += u[:, None] * lower + (u * lower)[:, None]
        assert_bitwise(logical, torch.where(wide != v, both, m[:, None].float()))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("keep", [False, True])
def test_a_reduction_by_a_function_combines_elements_in_order(axis: int, keep: bool) -> None:
    # Maps x -> a * x + b of small integers: their composition is exact and associative, but not commutative.
    a, b = torch.randint(-2, 3, (2, 4, 8)).float()
    out = torch.empty(2, a.numel() // a.shape[axis])
    reduce_kernel[(1,)](out, a, b, *a.shape, axis, keep)
    x, y = a.unbind(axis)[0], b.unbind(axis)[0]
    for factor, summand in zip(a.unbind(axis)[1:], b.unbind(axis)[1:], strict=True):
        x, y = x * factor, y * factor + summand
    assert_bitwise(out + 0, torch.stack((x, y)) + 0)
