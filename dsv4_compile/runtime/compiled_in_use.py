"""The compiled folder that this process started from: a graph that it lacks is a line in the log, or E502.

While torch traces a graph that the folder has, Python's garbage collector rests: it would walk every object of the
trace, and free next to nothing. torch's cache of fake results is off: to write an entry takes as long as to run the
fake of an op, and a trace that happens once reads few.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import fail
from .capture_status import without_collections

_log = logging.getLogger("dsv4_compile.runtime")


@dataclass(frozen=True, slots=True)
class InUse:
    """A folder whose files are in the caches; `required` if every graph must come from it."""

    folder: Path
    required: bool
    options: tuple[str, ...]


_in_use: list[InUse] = []
_options: dict[str, None] = {}
_pause = ExitStack()
"""Holds a block without collections while a graph is traced, by the thread that has torch's lock of compilations."""
_uncached = ExitStack()
"""Holds torch's setting of a cache of fake results until Dynamo's trace ends, by the same thread."""


def note_options(mode: str | None, options: Mapping[str, Any] | None) -> None:
    """Keep how a graph of this process was compiled."""
    _options.setdefault(_text(mode, options))


def options_so_far() -> list[str]:
    """Return the modes and options of graphs that were compiled so far, a line of JSON each."""
    return sorted(_options)


def use(folder: Path, *, required: bool, options: list[str]) -> None:
    """Expect graphs that are compiled from now on in the caches, and trace them as for the only time."""
    from .._compat import compile_callbacks

    stop()
    _in_use.append(InUse(folder, required, tuple(options)))
    compile_callbacks.register_end_callback(_end_pause)
    compile_callbacks.register_start_callback(_begin_pause)


def stop() -> None:
    """Expect nothing any more."""
    from .._compat import compile_callbacks

    _in_use.clear()
    for callbacks, callback in (
        (compile_callbacks.start_callbacks, _begin_pause),
        (compile_callbacks.end_callbacks, _end_pause),
    ):
        if callback in callbacks:  # torch.compiler.reset() drops them all
            callbacks.remove(callback)
    _end_pause()


def _begin_pause(*_: Any) -> None:
    from .._compat import dynamo_config

    _pause.enter_context(without_collections())
    _uncached.enter_context(dynamo_config.patch(fake_tensor_cache_enabled=False))


def _end_pause(*_: Any) -> None:
    _uncached.close()
    _pause.close()


def _end_trace() -> None:
    """Let AOTAutograd cache fake results: for a graph that the folder lacks, it calls equal ops again and again."""
    from .._compat import TracingContext, dynamo_config

    _uncached.close()
    context = TracingContext.try_get()
    if context is not None and context.fake_mode is not None:
        context.fake_mode.cache_enabled = dynamo_config.fake_tensor_cache_enabled


def watched(
    compile_graph: Callable[..., Any], mode: str | None, options: Mapping[str, Any] | None
) -> Callable[..., Any] | None:
    """Return `compile_graph` with a report, for a process that uses a compiled folder; else None.

    torch calls it for graphs alone that its cache does not have. It raises E502 where the folder is required.
    """
    if not _in_use:
        return None
    _end_trace()
    now, text = _in_use[-1], _text(mode, options)

    def compile_missing(gm: Any, example_inputs: Any, **arguments: Any) -> Any:
        others = "" if text in now.options else f"; it was built with {' or '.join(now.options)}"
        why = f"a graph compiled with {text} is not in it{others}"
        if now.required:
            fix = "build it with these options, sizes and batches, or load with compiled_required=False"
            fail("E502", got=str(now.folder), why=why, fix=fix)
        _log.warning("compiles, although %s is used: %s", now.folder, why)
        _end_pause()  # compiling takes long, and makes garbage
        return compile_graph(gm, example_inputs, **arguments)

    return compile_missing


def _text(mode: str | None, options: Mapping[str, Any] | None) -> str:
    values = {
        name: value if isinstance(value, (str, int, float)) else repr(value) for name, value in (options or {}).items()
    }
    return json.dumps({"mode": mode, "options": values}, sort_keys=True)
