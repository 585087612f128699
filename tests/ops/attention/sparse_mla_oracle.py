"""An independent oracle of sparse attention: one key at a time, read byte by byte, in float64. No code is shared."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor


def _e4m3(byte: int) -> float:
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = [_e4m3(byte) for byte in range(256)]


def bfloat16(value: float) -> float:
    """Round to the nearest bfloat16, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def key(cache: Tensor, fmt: str, block_size: int, slot: int, kv_scale: float = 1.0) -> Tensor:
    """Return the vector stored at `slot`, float64 `[D]`."""
    block, offset = divmod(slot, block_size)
    if fmt == "plain":
        return cache[block, offset].double()
    if fmt == "fp8":
        values = [bfloat16(E4M3[byte] * kv_scale) for byte in cache[block, offset].tolist()]
        return torch.tensor(values, dtype=torch.float64)
    page = cache[block].flatten().tolist()
    data, scales = page[offset * 576 :][:576], page[block_size * 576 + offset * 8 :][:8]
    nope = [E4M3[byte] * 2.0 ** (scales[i // 64] - 127) for i, byte in enumerate(data[:448])]
    rope = [
        struct.unpack("<f", bytes([0, 0, low, high]))[0] for low, high in zip(data[448::2], data[449::2], strict=True)
    ]
    return torch.tensor(nope + rope, dtype=torch.float64)


def selected(cache: Tensor, fmt: str, block_size: int, indices: Tensor, length: int, kv_scale: float) -> list[Tensor]:
    """Return the keys of one row of indices, in order."""
    capacity = cache.shape[0] * block_size
    return [
        key(cache, fmt, block_size, slot, kv_scale)
        for column, slot in enumerate(indices.tolist())
        if column < length and 0 <= slot < capacity
    ]


def attend(q: Tensor, keys: list[list[Tensor]], scale: float, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return out `[T, H, D]`, largest score `[T, H]` and lse `[T, H]` in float64 for the keys of each token."""
    tokens, heads, _ = q.shape
    out = torch.zeros(q.shape, dtype=torch.float64)
    top = torch.full((tokens, heads), -math.inf, dtype=torch.float64)
    lse = torch.full((tokens, heads), math.inf, dtype=torch.float64)
    for t in range(tokens):
        for h in range(heads):
            if not keys[t]:
                continue
            scores = [scale * float(q[t, h].double() @ k) for k in keys[t]]
            top[t, h] = m = max(scores)
            lse[t, h] = m + math.log(sum(math.exp(s - m) for s in scores))
            floor = max(m, float(sink[h])) if sink is not None else m
            if floor == math.inf:
                continue
            weights = [math.exp(s - floor) for s in scores]
            total = sum(weights) + (math.exp(float(sink[h]) - floor) if sink is not None else 0.0)
            for weight, k in zip(weights, keys[t], strict=True):
                out[t, h] += weight / total * k
    return out, top, lse
