"""Descriptions of kernels for Triton's hooks of builds, where a constant of a kernel is an object of its own."""

from __future__ import annotations

import functools
import json
from typing import Any


@functools.cache
def describe_any_kernel() -> None:
    """Let Triton describe kernels whose constants are no JSON, such as a dataclass.

    It describes a kernel as JSON once anybody sets a hook of its builds, as vLLM does, and the launch of a kernel with
    another constant would raise TypeError. Such constants are described by their `repr`.
    """
    from triton.runtime import jit

    describe = jit.serialize_specialization_data

    @functools.wraps(describe)
    def described(name: str, signature: Any, constants: dict[Any, Any], *rest: Any, **options: Any) -> str:
        try:
            return str(describe(name, signature, constants, *rest, **options))
        except TypeError:
            texts = {path: value if _is_json(value) else repr(value) for path, value in constants.items()}
            return str(describe(name, signature, texts, *rest, **options))

    jit.serialize_specialization_data = described


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True
