"""`dsv4 explain script.py`: run a script and report on everything that it compiles."""

from __future__ import annotations

import contextlib
import functools
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..errors import check
from .assemble import assemble, failure_of
from .observe import Watch, watching
from .report import Report
from .state import fresh_compiler

OK, TOO_MANY_BREAKS, SCRIPT_FAILED = 0, 1, 2
"""Exit status of `explain_script`."""


def explain_script(path: str | Path, json: bool = False, max_breaks: int | None = None) -> int:
    """Run the script at `path` as `python path` would, report what it compiles on stdout, return an exit status.

    The script really runs: explain only scripts that you would run yourself. Each torch.compile keeps its backend;
    fullgraph=True is dropped, so that every break is found instead of the first.

    Args:
        path: a Python file.
        json: print the report as JSON. What the script prints goes to stderr then.
        max_breaks: the number of graph breaks to accept, any by default.

    Returns:
        0, or 1 for more breaks than accepted, or 2 when the script raised.

    Raises:
        DSV4Error: E201 when there is no such file.
    """
    path = Path(path)
    rule, fix = "explain takes an existing Python script", "pass the path of a script, from the current folder"
    check(path.is_file(), "E201", got=f"no file {str(path)!r}", rule=rule, fix=fix)
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        report = report_on_script(path)
    sys.stdout.write((report.to_json() if json else report.text()) + "\n")
    if report.failure is not None:
        return SCRIPT_FAILED
    return TOO_MANY_BREAKS if max_breaks is not None and len(report.breaks) > max_breaks else OK


def report_on_script(path: Path) -> Report:
    """Run the script at `path` and report on it."""
    started = time.monotonic()
    failure = None
    with fresh_compiler(), watching() as watch, _observed_compile(watch) as backends, _as_main(path):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as error:
            failure = failure_of(error) if error.code not in (None, 0) else None
        except Exception as error:
            failure = failure_of(error)
    report = assemble(
        watch,
        target=path.name,
        backend=", ".join(dict.fromkeys(backends)) or "none",
        seconds=time.monotonic() - started,
        failure=failure,
    )
    uses = "one use" if len(backends) == 1 else f"{len(backends)} uses"
    report.notes.append(f"{path.name} was run, with {uses} of torch.compile observed.")
    return report


@contextlib.contextmanager
def _observed_compile(watch: Watch) -> Iterator[list[str]]:
    """torch.compile with every backend watched. Yields the names of the backends in use."""
    original = torch.compile
    backends: list[str] = []

    @functools.wraps(original)
    def observed(model: Any = None, **arguments: Any) -> Any:
        if model is None:
            return functools.partial(observed, **arguments)
        return original(model, **_watched(arguments, watch, backends))

    torch.compile = observed  # type: ignore[assignment]
    try:
        yield backends
    finally:
        torch.compile = original


def _watched(arguments: dict[str, Any], watch: Watch, backends: list[str]) -> dict[str, Any]:
    """Arguments of torch.compile with the backend watched; Inductor then takes mode and options as others do."""
    backend: str | Callable[..., Any] = arguments.get("backend", "inductor")
    backends.append(backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__))
    if arguments.get("disable"):
        return arguments
    fixed = {key: arguments[key] for key in ("mode", "options") if arguments.get(key) is not None}
    kept = {key: value for key, value in arguments.items() if key not in ("mode", "options")}
    return {**kept, "backend": watch.backend(backend, **fixed), "fullgraph": False}


@contextlib.contextmanager
def _as_main(path: Path) -> Iterator[None]:
    """sys.argv and sys.path as Python sets them for a script."""
    argv, places = list(sys.argv), list(sys.path)
    sys.argv[:] = [str(path)]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    finally:
        sys.argv[:] = argv
        sys.path[:] = places
