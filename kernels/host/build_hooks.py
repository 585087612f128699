"""Preparations of Triton's builds: the ptxas that they run, and how hooks are told of constants."""

from __future__ import annotations

import functools
import json
from typing import Any

from ..._compat import compile_tasks


@functools.cache
def prepare_builds() -> None:
    """Fix what the builds of this process depend on, before the first of them, early or at a launch.

    Inductor has Triton run torch's own ptxas once it builds a kernel in this process, and Triton takes the version of
    the ptxas that it finds at its first build into the names of its cache, for good. So the process that fills the
    cache and the one that finds it filled would look for different names, and the second would build all kernels again.
    """
    compile_tasks._set_triton_ptxas_path()
    describe_any_kernel()


@functools.cache
def describe_any_kernel() -> None:
    """Let Triton describe kernels with constants that JSON lacks, such as a dataclass.

    Once a build hook is set, as vLLM does, Triton describes every kernel as JSON and raises TypeError for constants
    that JSON does not have. Such constants are described by their `repr`.
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
