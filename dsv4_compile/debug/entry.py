"""The two entry points: `explain` for calls of a model or function, and `explain_script` for a script."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import re
import runpy
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..columns import terminal_width
from ..errors import check
from .places import Place, is_torch
from .report import Report, assemble, backend_decisions, failure_of
from .state import fresh_compiler
from .watch import Events, Watch, resolve, watching

CallArguments = tuple[Sequence[Any], Mapping[str, Any]]
OK, TOO_MANY_BREAKS, SCRIPT_FAILED = 0, 1, 2
"""Exit status of `explain_script`."""


def explain(
    model_or_fn: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    calls: Sequence[CallArguments] | None = None,
    dump: str | Path | None = None,
    backend: str | Callable[..., Any] = "dsv4",
    dynamic: bool | None = None,
    **kwargs: Any,
) -> Report:
    """Compile and call `model_or_fn`, and report graphs, breaks, recompiles, dsv4 ops, kernels and cache copies.

        report = dsv4_compile.explain(model, ids, calls=[((next_ids,), {}), ((more_ids,), {})])
        print(report)
        assert report.ok

    The calls really run: caches are written and a stateful model advances. Run them under the grad mode used for
    serving. Afterwards compiled code, compiler settings and random state are as before: the model is not compiled, and
    other functions stay compiled. A function that was compiled before is compiled again at its next call.

    Args:
        model_or_fn: a module or function. One that torch.compile returned is explained as if it had not been compiled.
        args: the first call's arguments.
        options: options of the backend, `{"dsv4.impl": "eager"}` for example.
        calls: further calls, `(args, kwargs)` each; without `args` and `kwargs` these are all calls. To find
            recompiles, pass two calls with, for example, different numbers of tokens.
        dump: a folder for the captured graphs, the generated code, the report and, if depyf is installed, the
            decompiled bytecode of Dynamo (the calls run once more).
        backend: name of a backend, or a backend. "eager" is fast and reports only breaks and recompiles.
        dynamic: as in torch.compile.
        kwargs: the first call's keyword arguments. One named like a parameter here goes into `calls`.

    Returns:
        The report. If a call raises, `report.failure` has the exception, and the rest what was found before it.

    Raises:
        DSV4Error: E201 for something that cannot be called or calls that are not `(args, kwargs)` pairs.
    """
    check(
        callable(model_or_fn), "E201", got=type(model_or_fn).__name__, rule="explain(model_or_fn, ...) takes a callable"
    )
    requested = _requested_calls(args, kwargs, calls)
    extra = {"options": dict(options)} if options else {}
    with uncompiled(model_or_fn) as target:

        def run(backend: Callable[..., Any]) -> None:
            compiled = torch.compile(target, backend=backend, dynamic=dynamic)
            for positional, named in requested:
                compiled(*positional, **named)

        started = time.monotonic()
        failure = None
        with fresh_compiler(), watching(keep_sources=dump is not None) as watch:
            try:
                run(watch.backend(backend, **extra))
            except Exception as error:
                failure = failure_of(error)
        _see_through_decorators(watch.events, target)
        report = assemble(
            watch,
            target=target_name(target),
            backend=target_name(backend),
            seconds=time.monotonic() - started,
            calls=len(requested),
            failure=failure,
        )
        report.decisions[:0] = backend_decisions(target)
        if dump is not None:
            _dump(Path(dump), report, watch, lambda: run(partial(resolve(backend), **extra)))
    return report


def _requested_calls(
    args: Sequence[Any], kwargs: Mapping[str, Any], calls: Sequence[CallArguments] | None
) -> list[CallArguments]:
    requested: list[CallArguments] = [] if calls and not args and not kwargs else [(args, kwargs)]
    for position, call in enumerate(calls or ()):
        pair = isinstance(call, (tuple, list)) and len(call) == 2
        check(
            pair and isinstance(call[0], (tuple, list)) and isinstance(call[1], Mapping),
            "E201",
            got=f"calls[{position}] of type {type(call).__name__}",
            rule="each of calls is (args, kwargs), a tuple and a dict",
            fix="write calls=[((x,), {}), ((y,), {})]",
        )
        requested.append((tuple(call[0]), dict(call[1])))
    return requested


@contextmanager
def uncompiled(model_or_fn: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield the callable that torch.compile was applied to; `module.compile()` is undone inside the block."""
    target: Any = getattr(model_or_fn, "_torchdynamo_orig_callable", model_or_fn)
    target = getattr(target, "_orig_mod", target)
    compiled = getattr(target, "_compiled_call_impl", None)
    if compiled is None:
        yield target
        return
    target._compiled_call_impl = None
    try:
        yield target
    finally:
        target._compiled_call_impl = compiled


def _see_through_decorators(events: Events, target: Callable[..., Any]) -> None:
    """Replace a wrapper by the function it wraps, where torch reports a wrapper of a decorator or of torch."""
    outer: Any = getattr(target, "forward", target)
    inner = inspect.unwrap(outer)
    wrapper, code = getattr(outer, "__code__", None), getattr(inner, "__code__", None)
    if code is None or wrapper is None:
        return
    root = next(iter(events.functions), "").split("/")[0]
    for compile_id, at in events.functions.items():
        is_wrapper = (at.file, at.line) == (wrapper.co_filename, wrapper.co_firstlineno) or is_torch(at.file)
        if compile_id.split("/")[0] == root and is_wrapper:
            events.functions[compile_id] = Place(code.co_filename, code.co_firstlineno, inner.__name__)


def target_name(thing: Any) -> str:
    """Return how reports call a model, a function or a backend."""
    if isinstance(thing, str):
        return thing
    return str(getattr(thing, "__qualname__", type(thing).__qualname__))


def _dump(folder: Path, report: Report, watch: Watch, run: Callable[[], None]) -> None:
    """Write graphs, generated code, decompiled bytecode and the report to `folder`. Failures of depyf become notes."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, text in watch.captured.items():
        (folder / f"graph_{index}.py").write_text(text, encoding="utf-8")
    for index, text in watch.generated.items():
        (folder / f"graph_{index}_generated.py").write_text(text, encoding="utf-8")
    report.notes.append(f"Captured graphs and generated code are in {folder}.")
    report.notes.append(_decompile(folder / "depyf", run))
    report.save(folder / "report.txt")
    report.save(folder / "report.json")


def _decompile(folder: Path, run: Callable[[], None]) -> str:
    """Run the calls once more under depyf. Return a note for the report; nothing is raised or printed."""
    try:
        import depyf
    except ImportError:
        return "depyf is not installed, so Dynamo's bytecode is not decompiled: pip install 'dsv4-compile[debug]'."
    errors = io.StringIO()
    with warnings.catch_warnings(record=True), contextlib.redirect_stderr(errors), fresh_compiler():
        warnings.simplefilter("always")
        try:
            with depyf.prepare_debug(str(folder)):
                run()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            return f"depyf stopped at {reason}; what it wrote until then is in {folder}."
    files = sum(path.is_file() for path in folder.rglob("*"))
    failed = len(re.findall(r"^\S*DecompilationError", errors.getvalue(), re.MULTILINE))
    if failed:
        return (
            f"depyf wrote {files} files to {folder}; {failed} functions could not be decompiled, which is usual around "
            "a data-dependent branch."
        )
    return f"depyf wrote {files} files to {folder}."


def explain_script(
    path: str | Path, json: bool = False, max_breaks: int | None = None, html: str | Path | None = None
) -> int:
    """Run the script at `path` as `python path` does, report on stdout what it compiles, and return an exit status.

    The script really runs: explain only scripts that you would run yourself. Each torch.compile keeps its backend;
    fullgraph=True is dropped, so that every break is found instead of only the first.

    Args:
        path: a Python file.
        json: print the report as JSON; output of the script then goes to stderr.
        max_breaks: largest number of graph breaks for status 0; None accepts any number.
        html: a file to write the report to as well, as one page.

    Returns:
        0, or 1 for more breaks than accepted, or 2 if the script raised.

    Raises:
        DSV4Error: E201 if there is no such file.
    """
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        report = run_script(path)
    if html is not None:
        report.save(html)
    sys.stdout.write((report.to_json() if json else report.text(terminal_width())) + "\n")
    if report.failure is not None:
        return SCRIPT_FAILED
    return TOO_MANY_BREAKS if max_breaks is not None and len(report.breaks) > max_breaks else OK


def run_script(path: str | Path, around: Callable[[Watch], AbstractContextManager[Any]] | None = None) -> Report:
    """Run the script at `path` and return the report. E201 if there is no such file.

    Args:
        path: a Python file.
        around: a context to run it in, made with the watch that sees its compilations.
    """
    path = Path(path)
    rule, fix = "explain takes an existing Python script", "pass the path of a script, from the current folder"
    check(path.is_file(), "E201", got=f"no file {str(path)!r}", rule=rule, fix=fix)
    started = time.monotonic()
    failure = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(fresh_compiler())
        watch = stack.enter_context(watching())
        backends = stack.enter_context(_observed_compile(watch))
        stack.enter_context(_as_main(path))
        if around is not None:
            stack.enter_context(around(watch))
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


@contextmanager
def _observed_compile(watch: Watch) -> Iterator[list[str]]:
    """Watch the backend of every torch.compile inside the block. Yield the list of backends in use."""
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
    """Return the arguments of torch.compile with a watched backend, which also takes Inductor's mode and options."""
    backend: str | Callable[..., Any] = arguments.get("backend", "inductor")
    backends.append(backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__))
    if arguments.get("disable"):
        return arguments
    fixed = {key: arguments[key] for key in ("mode", "options") if arguments.get(key) is not None}
    others = {key: value for key, value in arguments.items() if key not in ("mode", "options")}
    return {**others, "backend": watch.backend(backend, **fixed), "fullgraph": False}


@contextmanager
def _as_main(path: Path) -> Iterator[None]:
    """Set sys.argv and sys.path inside the block as Python does for a script."""
    argv, places = list(sys.argv), list(sys.path)
    sys.argv[:] = [str(path)]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    finally:
        sys.argv[:] = argv
        sys.path[:] = places
