"""`explain_replay`: capture a call or the step of a runner, replay it, and report what one replay contains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat import forget_compiled, pytree, traced_functions
from ...errors import check
from ...runtime import DecodeRunner
from ...runtime.backends import graphs_for
from ..breaks import collect
from ..entry import run_script, target_name, uncompiled
from ..report import Report
from ..state import fresh_compiler
from ..watch import Watch, watching
from .assemble import assemble
from .captures import ObservedCapture, observed_captures
from .observe import all_module_names, module_names
from .report import ReplayReport
from .sources import Sources, traced_origins
from .times import host_us, stream_us

_REPLAYS = 6
"""Replays of a capture: one that settles caches and clocks, and five that are measured."""


def explain_replay(
    model_or_runner: Callable[..., Any] | DecodeRunner,
    *args: Any,
    backend: str | Callable[..., Any] | None = "dsv4",
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    graphs: str = "auto",
    **kwargs: Any,
) -> ReplayReport:
    """Capture a call as a CUDA graph, replay it, and report every node: op, source line, cost, time, dependencies.

        report = dsv4_compile.explain_replay(layer, hidden, metadata, cache)
        report = dsv4_compile.explain_replay(runner, 8)  # the step of 8 tokens that its buffers hold
        print(report)
        report.save("replay.html")

    The calls really run: caches are written, at the same places in every replay. Afterwards compiled code, compiler
    settings and random state are as before, except that functions which the model had compiled compile again at their
    next call. Nothing is observed after that: later captures and replays cost what they did.

    Args:
        model_or_runner: a module, function or `DecodeRunner`. One that torch.compile returned is compiled again, here,
            so that source lines are known.
        args, kwargs: arguments of the call; of a runner the number of tokens (None = its smallest bucket).
        backend: compiles a model, None to capture it as it is. The step of a runner keeps its torch.compile.
        options: options of the backend.
        dynamic: as in torch.compile.
        graphs: "auto" for CUDA graphs, "standin" for the CPU stand-in: nodes are op calls and generated functions with
            the times of this CPU.

    Raises:
        DSV4Error: E201 for an object that cannot be called, E420 without a GPU or its driver, E422 or E423 for a call
            that cannot be captured.
    """
    check(
        isinstance(model_or_runner, DecodeRunner) or callable(model_or_runner),
        "E201",
        got=type(model_or_runner).__name__,
        rule="explain_replay(model_or_runner, ...) takes a callable or a DecodeRunner",
    )
    with ExitStack() as stack:
        if isinstance(model_or_runner, DecodeRunner):
            runner = model_or_runner
            step, call, what = runner.captured_call(*args, **kwargs)
            tree, name, shown = getattr(step, "_orig_mod", step), type(runner).__name__, "of the step"
            pool = graphs_for(runner.graphs.device, runner.graphs.kind)
        else:
            tree = stack.enter_context(uncompiled(model_or_runner))
            name, shown = target_name(tree), "none" if backend is None else target_name(backend)
            pool = graphs_for(device_of(tree, args, kwargs), graphs, 'explain_replay(graphs="standin")')
            call, what = partial(tree, *args, **kwargs), f"a call of {name}"
        watch, sources = stack.enter_context(observed_compiler())
        if not isinstance(model_or_runner, DecodeRunner) and backend is not None:
            chosen = watch.backend(backend, **({"options": dict(options)} if options else {}))
            call = partial(torch.compile(tree, backend=chosen, dynamic=dynamic), *args, **kwargs)
        call = torch.no_grad()(call)
        for _ in range(2):  # at the second call torch.compile may compile for all sizes
            pool.warm_up(call)
        with observed_captures(sources, partial(module_names, tree)) as captured:
            capture = pool.capture(call, what)
        # Before the profiler, which slows the host for the rest of the process.
        replay_us = (stream_us if pool.kind == "cuda" else host_us)(captured[0].capture.replay)
        for _ in range(_REPLAYS):
            capture.replay()
        about: dict[str, Any] = {"target": name, "backend": shown, **_counts(watch)}
        return assemble(captured[0], ReplayReport, replay_us, **about)


@contextmanager
def observed_compiler() -> Iterator[tuple[Watch, Sources]]:
    """Compile everything anew inside the block, and record where the generated code comes from."""
    with fresh_compiler(), watching() as watch, traced_origins():
        for code in traced_functions():
            forget_compiled(code)
        sources = Sources(watch.decided)
        watch.observers.append(sources.record)
        yield watch, sources


def _counts(watch: Watch) -> dict[str, int]:
    """Return the numbers of graph breaks and recompiles."""
    events = watch.events
    return {"breaks": len(collect(events.breaks, events.limits)), "recompiles": len(events.recompiles)}


def device_of(tree: Any, args: Any, kwargs: Any) -> torch.device:
    """Return the device of the first tensor on a GPU among arguments and parameters, or the CPU.

    A function without any may hold tensors itself, which are taken to be on the current GPU where there is one.
    """
    held = [*tree.parameters(), *tree.buffers()] if isinstance(tree, nn.Module) else []
    tensors = [leaf for leaf in (*pytree.tree_leaves((args, kwargs)), *held) if isinstance(leaf, Tensor)]
    if not tensors and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), torch.device("cpu"))


def replay_of_script(path: str | Path) -> tuple[ReplayReport | None, Report]:
    """Run the script at `path`, and report the capture that it replays most, None if it captures nothing.

    The script really runs. Its first replays are measured as it makes them; none is added. The second report is that
    of `explain_script`.
    """
    captures: list[ObservedCapture] = []
    watches: list[Watch] = []

    @contextmanager
    def around(watch: Watch) -> Iterator[None]:
        sources = Sources(watch.decided)
        watch.observers.append(sources.record)
        watches.append(watch)
        with traced_origins(), observed_captures(sources, all_module_names) as captured:
            yield
        captures.extend(captured)

    report = run_script(path, around)
    if not captures:
        return None, report
    most = max(captures, key=lambda seen: seen.replays)
    about: dict[str, Any] = {"target": Path(path).name, "backend": report.backend, **_counts(watches[0])}
    replay = assemble(most, ReplayReport, captures=len(captures), **about)
    if len(captures) > 1:
        replay.notes.append(f"{len(captures)} captures; this one was replayed {most.replays} times, the most.")
    return replay, report
