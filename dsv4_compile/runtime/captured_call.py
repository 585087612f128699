"""State of one shape of a compiled graph: what it was called with, and its capture."""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass, field

from torch import Tensor

from .addresses import HeldTensors, TensorRecord
from .aliasing import GraphOutputs
from .captures import Capture

WAITS = 2
"""Calls of a shape before its capture."""
NEVER = sys.maxsize
"""Calls before a capture that alone holds more bytes than all may."""
_PATIENCE = 4
"""How many times more calls there are before a capture that has been evicted."""


@dataclass(eq=False)  # without slots, which would take weak references
class CapturedCall:
    """One shape of the copied inputs with one set of in-place tensors, which it does not keep alive.

    `others` are the in-place tensors, by their place among them, that are not in `compared`. `waits` are the calls
    before a capture, and grow with each eviction, so that shapes that evict each other run compiled more and more.
    """

    records: tuple[TensorRecord, ...]
    where: str
    ids: tuple[int, ...] = ()
    addresses: list[int] = field(default_factory=list)
    compared: tuple[HeldTensors, ...] | None = None
    others: tuple[int, ...] = ()
    references: tuple[weakref.ref[Tensor], ...] = ()
    calls: int = 0
    copies: tuple[Tensor, ...] = ()
    capture: Capture | None = None
    outputs: GraphOutputs | None = None
    checked: bool = False
    waits: int = WAITS
    output_bytes: int = 0
    input_bytes: int = 0
    replayed: int = 0

    def evict(self) -> None:
        """Free the capture; the shape runs compiled until it has been called often enough."""
        self.capture, self.outputs, self.copies, self.checked = None, None, (), False
        self.calls, self.waits = 0, self.waits * _PATIENCE
