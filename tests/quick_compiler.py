"""Patches of torch's compiler that skip repeated work, a tenth of its time; the code that it generates is the same."""

from __future__ import annotations

import functools
import sys
from typing import Any

from dsv4_compile import _compat

COMPILER = "torch._inductor.compile_fx"
"""Module that imports all patched modules."""


def quicken_if_imported() -> None:
    """Apply all patches, for the rest of this process, if it has imported the compiler."""
    if COMPILER in sys.modules:
        _quicken()


@functools.cache
def _quicken() -> None:
    _set_up_rules_once()
    _compat.dynamo_guards.profile_guard_manager = lambda *_: 0.0  # flushes the CPU's caches after each graph
    _compat.symbolic_convert.get_funcname = lambda *_: None  # splits a file into tokens, for a line of the log
    _simplify_less()


def _set_up_rules_once() -> None:
    """Set up the rules for dtypes of results only when there are more, not for every operation that is written."""
    handler, rules = _compat.dtype_propagation.DtypePropagationOpsHandler, _compat.dtype_rules
    set_up, known = handler.__init__, [0]

    def set_up_once(self: Any) -> None:
        if len(rules) != known[0]:
            set_up(self)
            known[0] = len(rules)

    handler.__init__ = set_up_once


def _simplify_less() -> None:
    """Let SymPy simplify strides of vectorised loops only where expanding them does not give a number or a symbol."""
    module = _compat.sizevars
    if not hasattr(module, "stride_at"):  # torch before 2.13 has these functions elsewhere
        return
    simplify, stride_at = module.simplify_index_in_vec_range, module.stride_at
    divisions = _compat.FloorDiv, _compat.ModularIndexing

    def simplify_divisions(index: Any, var: Any, vec_length: int) -> Any:
        return simplify(index, var, vec_length) if index.has(*divisions) else index

    def expanded_stride_at(index: Any, var: Any) -> Any:
        if index.has(var) and not index.has(*divisions):
            stride = (index.xreplace({var: var + 1}) - index).expand()
            if stride.is_Number or stride.is_Symbol:
                return stride
        return stride_at(index, var)

    module.simplify_index_in_vec_range, module.stride_at = simplify_divisions, expanded_stride_at
