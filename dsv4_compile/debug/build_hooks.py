"""Descriptions of kernels for Triton's hooks of builds, where a constant of a kernel is an object of its own."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def describe_any_kernel() -> None:
    """Let Triton call hooks for kernels whose constants are no JSON, as a dataclass of Gluon's.

    It describes a kernel as JSON for its hooks, and the launch of such a kernel would raise TypeError once there is
    one. Hooks of other code get an empty description of these kernels.
    """
    from triton.runtime import jit

    describe = jit.serialize_specialization_data

    @functools.wraps(describe)
    def described(*args: Any, **kwargs: Any) -> str:
        try:
            return describe(*args, **kwargs)
        except TypeError:
            return "{}"

    jit.serialize_specialization_data = described
