"""Search of Triton's IR for inline assembly with an effect that several threads execute on one element.

A tensor of fewer elements than its layout covers is held by several threads, and each of them executes inline assembly
on it. A key that is counted twice gives a boundary with more keys than fit, which are stored past the end of the row.
"""

from __future__ import annotations

import re

COUNTING = ("red.shared.add", "atom.shared.add", "ld.shared.v4.b32 {$0, $1, $2, $3}, [$8]")
"""Instructions of histogram.py that count a number, put it on the list, or read and clear it."""


def held_by_several(ttgir: str) -> list[str]:
    """Return the counting instructions of a kernel with elements that more than one thread holds."""
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<(.*)>", ttgir, re.MULTILINE))
    found = []
    for line in ttgir.splitlines():
        if "elementwise_inline_asm" in line and any(text in line for text in COUNTING):
            shape, name = re.findall(r"tensor<([\dx]+)xi32, (#\w+)>", line)[-1]
            parts = re.findall(r"(?:sizePerThread|threadsPerWarp|warpsPerCTA) = \[([\d, ]+)\]", layouts[name])
            covered = [int(a) * int(b) * int(c) for a, b, c in zip(*(p.split(", ") for p in parts), strict=True)]
            if any(n > int(size) for n, size in zip(covered, shape.split("x"), strict=True)):
                found.append(line.strip())
    return found
