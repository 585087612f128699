"""Whether an instruction with an effect is executed once for each element: what Triton's IR says of who holds it.

A tensor of fewer elements than the layout covers is held by several threads, and each of them executes an inline
assembly on it. What is then counted twice gives a boundary that has more keys than fit, and they are stored behind
their row.
"""

from __future__ import annotations

import re

COUNTING = ("red.shared.add", "atom.shared.add", "ld.shared.v4.b32 {$0, $1, $2, $3}, [$8]")
"""Of shared_counts.py: a number is counted, put on the list, or taken and cleared."""


def held_by_several(ttgir: str) -> list[str]:
    """The counting instructions of a kernel whose elements more than one thread holds."""
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
