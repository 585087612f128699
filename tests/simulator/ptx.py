"""Arithmetic PTX on the CPU: the inline assembly of our kernels, instruction by instruction, on torch tensors.

Words are int32 tensors and halves int16 tensors, as bits. An unknown instruction raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BITS = {torch.int16: 16, torch.int32: 32, torch.int64: 64}
Registers = dict[str, Tensor]


def unsigned(x: Tensor) -> Tensor:
    """Return the bits of int16 or int32 as int64."""
    return x.long() & ((1 << BITS[x.dtype]) - 1)


def word(x: Tensor) -> Tensor:
    """Return the low bits of int64 as int32."""
    low = x & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low).int()


def _halves(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16).unflatten(-1, (-1, 2))


def _float32(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.float32)


def _permute_bytes(a: Tensor, b: Tensor, selectors: Tensor) -> Tensor:
    """Execute prmt: select bytes of `a` and `b`, or their sign bits repeated, by four digits of 4 bits."""
    both = [unsigned(x) >> shift & 0xFF for x in (a, b) for shift in (0, 8, 16, 24)]
    result = torch.zeros_like(both[0])
    for position in range(4):
        digit = int(selectors) >> 4 * position & 0xF
        byte = both[digit & 7]
        result = result | (torch.where(byte >= 0x80, 0xFF, 0) if digit & 8 else byte) << 8 * position
    return word(result)


def _multiply_pairs(a: Tensor, b: Tensor) -> Tensor:
    """Execute mul.rn.bf16x2: products of bfloat16 are exact in float32, and rounded once."""
    product = _halves(a).view(torch.bfloat16).float() * _halves(b).view(torch.bfloat16).float()
    return product.bfloat16().view(torch.int16).flatten(-2).view(torch.int32)


def _larger_halves(a: Tensor, b: Tensor) -> Tensor:
    """Execute max.u16x2."""
    a, b = torch.broadcast_tensors(a, b)
    larger = torch.maximum(unsigned(_halves(a)), unsigned(_halves(b)))
    return word(larger[..., 1] << 16 | larger[..., 0])


def _e4m3_pair(high: Tensor, low: Tensor) -> Tensor:
    """Execute cvt.rn.satfinite.e4m3x2.f32: the first source is the upper byte."""
    values = torch.stack([_float32(low), _float32(high)], -1).clamp(-448.0, 448.0)
    return values.to(torch.float8_e4m3fn).view(torch.int16).squeeze(-1)


INSTRUCTIONS: dict[str, Callable[..., Tensor]] = {
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: word(unsigned(a) << unsigned(b)),
    "shr.u32": lambda a, b: word(unsigned(a) >> unsigned(b)),
    "prmt.b32": _permute_bytes,
    "mul.rn.bf16x2": _multiply_pairs,
    "max.u16x2": _larger_halves,
    "cvt.rn.satfinite.e4m3x2.f32": _e4m3_pair,
    "mov.b32": lambda a: a,
}


def _value(name: str, registers: Registers) -> Tensor:
    if name.startswith("{"):
        low, high = (unsigned(_value(half, registers)) for half in re.findall(r"\$?\w+", name))
        return word(high << 16 | low)
    if re.fullmatch(r"0x[0-9a-fA-F]+|\d+", name):
        return word(torch.tensor(int(name, 0)))
    return registers[name]


def run(text: str, registers: Registers) -> None:
    """Execute `text` on `registers`; those of its constraints are named `$0` and so on."""
    for line in text.strip().strip("{}").split(";"):
        words = line.split(None, 1)
        if not words or words[0] == ".reg":
            continue
        if words[0] not in INSTRUCTIONS:
            raise NotImplementedError(f"{words[0]} is not simulated")
        target, *sources = re.findall(r"\{[^}]*\}|[^,\s]+", words[1])
        registers[target] = INSTRUCTIONS[words[0]](*(_value(source, registers) for source in sources))


def elementwise(text: str, constraints: str, args: list[Tensor], dtypes: list[Any], pack: int) -> list[Tensor]:
    """Execute PTX on the elements of `args`, `pack` neighbours of the last dim at once.

    Registers are numbered as the compiler does: results first, then each argument, `pack` elements each. Two elements
    of 16 bits are in one register.
    """
    args = list(torch.broadcast_tensors(*args))
    wide = [max(1, pack * BITS[dtype] // 32) if BITS[dtype] < 64 else pack for dtype in dtypes]
    registers: Registers = {}
    number = sum(wide)
    for arg in args:
        assert BITS[arg.dtype] >= 32, "an argument of 16 bits is not simulated"
        for lane in range(pack):
            registers[f"${number}"] = arg if pack == 1 else arg.unflatten(-1, (-1, pack))[..., lane]
            number += 1
    assert len(constraints.split(",")) == number
    run(text, registers)
    results, number = [], 0
    for dtype, count in zip(dtypes, wide, strict=True):
        parts = [registers[f"${number + i}"] for i in range(count)]
        number += count
        joined = torch.stack(parts, -1).flatten(-2) if count > 1 else parts[0]
        results.append(joined.contiguous().view(dtype) if BITS[dtype] < 32 else joined)
    return results
