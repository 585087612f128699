"""Function of a backend's name, for steps that this package compiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._compat import lookup_backend
from ..errors import check, error
from ..ops.common.define import OPS
from ..options import Options
from ..sizes import shown


def compiler_of(backend: Any, options: Any) -> tuple[Any, dict[str, Any] | None]:
    """Return the function of a backend's name, None without one, and its options. Raises E301 for unknown ones."""
    fix = 'pass "dsv4", the name of a backend that torch.compile knows, or None'
    check(options is None or isinstance(options, Mapping), "E301", got=f"options={shown(options)}", fix="pass a dict")
    if backend is None:
        check(not options, "E301", got=f"options={shown(options)} without a backend", fix='add backend="dsv4"')
        return None, None
    check(isinstance(backend, str) or callable(backend), "E301", got=f"backend={shown(backend)}", fix=fix)
    try:
        compiler = lookup_backend(backend)
    except Exception as fault:
        raise error("E301", got=f"backend={shown(backend)}", why=str(fault).splitlines()[0], fix=fix) from fault
    if backend == "dsv4":
        Options.parse(None, options, ops=OPS)
    return compiler, None if options is None else dict(options)
