"""`explain`: call a model or function through torch.compile and report what became of it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..errors import check
from . import dump as dumping
from .assemble import assemble, chosen_backends, failure_of
from .events import Events, is_torch
from .observe import resolve, watching
from .report import Report
from .rows import Place
from .state import fresh_compiler

Call = tuple[Sequence[Any], Mapping[str, Any]]


def explain(
    model_or_fn: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    calls: Sequence[Call] | None = None,
    dump: str | Path | None = None,
    backend: str | Callable[..., Any] = "dsv4",
    dynamic: bool | None = None,
    **kwargs: Any,
) -> Report:
    """Compile and call `model_or_fn`, and report graphs, breaks, recompiles, dsv4 ops, kernels and cache copies.

        report = dsv4_compile.explain(model, ids, calls=[((next_ids,), {}), ((more_ids,), {})])
        print(report)
        assert report.ok

    The calls really run, so caches are written and a model that keeps state moves on; run them under the grad mode
    that you mean to serve with. Compiled code, compiler settings and random state are as before afterwards: the model
    is not left compiled, and what else the process has compiled stays. A function that had been compiled before is
    compiled again at its next call.

    Args:
        model_or_fn: a module or function. One that torch.compile returned is looked at as if it had not been compiled.
        args: the first call's arguments.
        options: options of the backend, `{"dsv4.impl": "eager"}` for example.
        calls: further calls, `(args, kwargs)` each; with no `args` and `kwargs` these are all. Recompiles need two
            calls that differ in what they should be allowed to differ in.
        dump: a folder for the captured graphs, the generated code, the report and, where depyf is installed, the
            decompiled bytecode of Dynamo. The calls run once more for the last.
        backend: "dsv4", another backend's name, or a backend. "eager" is quick and reports breaks and recompiles alone.
        dynamic: as in torch.compile.
        kwargs: the first call's keyword arguments. One named like a parameter here goes into `calls`.

    Returns:
        The report. When a call raises, `report.failure` says what, and the rest what was found until then.

    Raises:
        DSV4Error: E201 for something that cannot be called or calls that are not `(args, kwargs)` pairs.
    """
    check(
        callable(model_or_fn), "E201", got=type(model_or_fn).__name__, rule="explain(model_or_fn, ...) takes a callable"
    )
    planned = _plan(args, kwargs, calls)
    extra = {"options": dict(options)} if options else {}
    with _uncompiled(model_or_fn) as target:

        def run(backend: Callable[..., Any]) -> None:
            compiled = torch.compile(target, backend=backend, dynamic=dynamic)
            for positional, named in planned:
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
            target=_name(target),
            backend=_name(backend),
            seconds=time.monotonic() - started,
            calls=len(planned),
            failure=failure,
        )
        report.decisions[:0] = chosen_backends(target)
        if dump is not None:
            dumping.write(Path(dump), report, watch, lambda: run(partial(resolve(backend), **extra)))
    return report


def _plan(args: Sequence[Any], kwargs: Mapping[str, Any], calls: Sequence[Call] | None) -> list[Call]:
    planned: list[Call] = [] if calls and not args and not kwargs else [(args, kwargs)]
    for position, call in enumerate(calls or ()):
        pair = isinstance(call, (tuple, list)) and len(call) == 2
        check(
            pair and isinstance(call[0], (tuple, list)) and isinstance(call[1], Mapping),
            "E201",
            got=f"calls[{position}] of type {type(call).__name__}",
            rule="each of calls is (args, kwargs), a tuple and a dict",
            fix="write calls=[((x,), {}), ((y,), {})]",
        )
        planned.append((tuple(call[0]), dict(call[1])))
    return planned


@contextmanager
def _uncompiled(model_or_fn: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """What torch.compile was applied to; `module.compile()` is undone inside the block."""
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
    """Name the function that was called where torch names a wrapper around it, a decorator's or one of its own."""
    outer: Any = getattr(target, "forward", target)
    inner = inspect.unwrap(outer)
    wrapper, code = getattr(outer, "__code__", None), getattr(inner, "__code__", None)
    if code is None or wrapper is None:
        return
    root = next(iter(events.functions), "").split("/")[0]
    for compile_id, place in events.functions.items():
        is_wrapper = (place.file, place.line) == (wrapper.co_filename, wrapper.co_firstlineno) or is_torch(place.file)
        if compile_id.split("/")[0] == root and is_wrapper:
            events.functions[compile_id] = Place(code.co_filename, code.co_firstlineno, inner.__name__)


def _name(thing: Any) -> str:
    if isinstance(thing, str):
        return thing
    return str(getattr(thing, "__qualname__", type(thing).__qualname__))
