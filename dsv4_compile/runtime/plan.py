"""What a runner will hold, before anything is captured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import warn
from .graphs import Footprint

_TOLERANCE = 1.2
_SEGMENT = 2 << 20
"""What an allocator rounds a small pool up to."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Memory of a runner, in bytes.

    Attributes:
        persistent: what is captured by address and owned by the engine: inputs, metadata, caches, weights.
        footprints: what one step allocates, by bucket, measured in a run of it.
        graphs: what all captures together are predicted to hold.
    """

    persistent: int
    footprints: Mapping[int, Footprint]
    graphs: int

    def check(self, measured: int) -> None:
        """Warn (W602) when the captures hold more than was predicted, by a fifth and an allocator's segment."""
        if measured > self.graphs * _TOLERANCE + _SEGMENT:
            warn("W602", got=f"{measured:,} bytes in graphs, {self.graphs:,} predicted")

    def __str__(self) -> str:
        head = f"{'tokens':>8}{'peak bytes':>16}{'output bytes':>16}"
        rows = [f"{size:>8}{f.peak:>16,}{f.outputs:>16,}" for size, f in sorted(self.footprints.items())]
        return "\n".join([head, *rows, f"graphs {self.graphs:,} bytes, beside {self.persistent:,} at fixed addresses"])
