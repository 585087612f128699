"""The warm-up of a process, after which `dsv4.strict="after_warmup"` turns late work into E430.

Warm-up ends with the first `warming_up` block or `DecodeRunner.warm_up` that ends after a graph was compiled with that
option. A further block suspends the rule. torch.compiler.reset() starts warm-up anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_lock = threading.Lock()


class _Warmup:
    """State of the process: open blocks, whether a graph asks for the rule, whether warm-up has ended."""

    blocks = 0
    strict = False
    ended = False
    at_end: Callable[[], None] | None = None


_state = _Warmup()


@contextmanager
def warming_up() -> Iterator[None]:
    """Compile, capture and build kernels inside the block; warm-up ends with it.

    model = torch.compile(model, backend="dsv4", options={"dsv4.strict": "after_warmup"})
    with dsv4_compile.runtime.warming_up():
        for tokens in (1, 2, 4, 8):
            model(*batch(tokens))
    """
    with suspended():
        yield
    if _state.strict and not _state.blocks:
        _state.ended = True
        if _state.at_end is not None:
            _state.at_end()


@contextmanager
def suspended() -> Iterator[None]:
    """Allow late work inside the block, of any thread, for tools that compile again."""
    with _lock:
        _state.blocks += 1
    try:
        yield
    finally:
        with _lock:
            _state.blocks -= 1


def ask_for_strict(at_end: Callable[[], None]) -> None:
    """Let warm-up end with the next block, and call `at_end` then."""
    _state.strict, _state.at_end = True, at_end


def is_late() -> bool:
    """Return whether warm-up has ended and no block is open."""
    return _state.ended and not _state.blocks


def begin_anew() -> None:
    """Start warm-up anew: all that was compiled has been dropped."""
    _state.strict = _state.ended = False
