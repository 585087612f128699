"""`dsv4.strict="after_warmup"`: E430, with its cause, for compilations and builds of a compiled function after warm-up.

Causes are read from torch's structured log, as `compile_log` reads them, from the end of warm-up on. The backend asks
`check_compile` before each compilation, and wraps what it compiled by `watched`, so that builds of Triton kernels in
functions without the option stay allowed. Captures are checked where they are made, see `runtime.compiled`.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from ..errors import fail, is_installed
from ..kernels.host.build_hooks import describe_any_kernel
from ..runtime.structured_log import TRACE
from ..runtime.warmup import ask_for_strict, is_late
from .serving import CompileTrace

_running: ContextVar[bool] = ContextVar("dsv4_strict", default=False)
_UNKNOWN = ("a function", "it had not run in warm-up")


class _Causes(CompileTrace):
    """Keeps name and cause of the compilation that began last."""

    latest = _UNKNOWN

    def started(self, compile_id: str, what: str, cause: str) -> None:
        """Keep both."""
        self.latest = what, cause


_causes = _Causes()


def check_compile() -> None:
    """Raise E430, with function and failed guard, if warm-up has ended."""
    ask_for_strict(_watch)
    if is_late():
        what, cause = _causes.latest
        fail("E430", got=f"compile {what}", why=cause)


def watched(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return `compiled` with calls that raise E430 for a build of a Triton kernel after warm-up."""

    def run(*args: Any) -> Any:
        token = _running.set(True)
        try:
            return compiled(*args)
        finally:
            _running.reset(token)

    return run


def _watch() -> None:
    """Read causes from now on, and look at each build of a kernel."""
    log = logging.getLogger(TRACE)
    if _causes not in log.handlers:
        log.addHandler(_causes)
    if sys.modules.get("triton") or (torch.cuda.is_available() and is_installed("triton")):
        _watch_kernels()


@functools.cache
def _watch_kernels() -> None:
    from triton import knobs

    before = knobs.runtime.jit_cache_hook

    def check(*args: Any, **given: Any) -> Any:
        if _running.get() and is_late():
            fail("E430", got=f"kernel {given.get('repr', '?')}", why="Triton had not built it for such arguments")
        return before(*args, **given) if before is not None else None

    describe_any_kernel()
    knobs.runtime.jit_cache_hook = check
