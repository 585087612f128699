"""A tensor as an argument of a Triton function."""

from __future__ import annotations

from typing import Any, NamedTuple


class Strided(NamedTuple):
    """Pointer and strides of a tensor, or of several; a pointer of None is that of no tensor."""

    p: Any
    strides: Any
