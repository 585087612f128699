"""Tools to test attention code: comparisons, hostile inputs, and a complete check of a custom op.

Shipped with the package so that your own models and kernels can be held to the same rules.
"""

from __future__ import annotations

from .batch_invariant import InvarianceReport, check_batch_invariant
from .cached import assert_cached
from .compare import TOLERANCES, Tolerance, assert_bitwise, assert_close
from .generate import RandomCache, hostile_indices, hostile_values, padded, poison_, random_cache, strided
from .opcheck import check_op, refuse_synchronization
from .poison import poisoned_empty

__all__ = [
    "TOLERANCES",
    "InvarianceReport",
    "RandomCache",
    "Tolerance",
    "assert_bitwise",
    "assert_cached",
    "assert_close",
    "check_batch_invariant",
    "check_op",
    "hostile_indices",
    "hostile_values",
    "padded",
    "poison_",
    "poisoned_empty",
    "random_cache",
    "refuse_synchronization",
    "strided",
]
