"""Watch a compilation: a backend that looks at every graph before the real one compiles it, and torch's own account."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from .. import progress
from ..selection import decisions
from . import graphs, kernels
from .events import Events, listen
from .rows import CacheCopy, CacheHazard, Graph, Kernel, MissedReinplace, OpDecision

Backend = Callable[..., Any]


@dataclass(slots=True)
class Watch:
    """What was seen. With `keep_sources`, `captured` and `generated` hold the sources of each graph, by its index."""

    events: Events
    stage: progress.Stage
    keep_sources: bool = False
    graphs: list[Graph] = field(default_factory=list)
    undecided: list[OpDecision] = field(default_factory=list)
    decided: decisions.Decisions = field(default_factory=decisions.Decisions)
    hazards: list[CacheHazard] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    copies: list[CacheCopy] = field(default_factory=list)
    missed: list[MissedReinplace] = field(default_factory=list)
    captured: dict[int, str] = field(default_factory=dict)
    generated: dict[int, str] = field(default_factory=dict)
    _names: list[str] = field(default_factory=list)

    def backend(self, backend: str | Backend, **fixed: Any) -> Backend:
        """A backend that records each graph and hands it on to `backend`, with `fixed` arguments added."""
        name = backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__)
        compiler = resolve(backend)

        def watched(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
            from .._compat import RestartAnalysis

            seen: list[list[Any]] = [self.graphs, self.hazards, self.undecided, self.decided, self.decided.fusions]
            counts = [len(found) for found in seen]
            self._look(gm, name)
            try:
                return compiler(gm, example_inputs, **{**kwargs, **fixed})
            except RestartAnalysis:
                # The graph is traced again, with a float of the module as a constant: it was never a graph.
                for found, count in zip(seen, counts, strict=True):
                    del found[count:]
                raise

        return watched

    def _look(self, gm: GraphModule, backend: str) -> None:
        from .._compat import current_compile_id

        index = len(self.graphs) + 1
        self.stage.note(f"graph {index}")
        self._names = graphs.input_names(gm)
        self.graphs.append(graphs.describe(gm, index, current_compile_id()))
        self.hazards += graphs.hazards(gm, index)
        self.undecided += graphs.dsv4_calls(gm, f"backend {backend!r} runs the op as it is registered")
        if self.keep_sources:
            self.captured[index] = gm.print_readable(print_output=False)

    def look_at_code(self, code: str) -> None:
        """Take in the source that Inductor has generated for the graph at hand."""
        from .._compat import V

        index = len(self.graphs)
        if self.keep_sources:
            self.generated[index] = self.generated.get(index, "") + code
        self.kernels += kernels.read_kernels(code, index)
        self.copies += kernels.read_copies(V.graph, code, index, self._names)
        missed = kernels.read_missed(index)
        if missed:
            self.missed.append(missed)


@contextmanager
def watching(*, keep_sources: bool = False) -> Iterator[Watch]:
    """Watch everything that compiles inside the block."""
    from .._compat import GraphLowering

    with listen() as events, decisions.collect() as decided, progress.stage("compile") as stage:
        watch = Watch(events, stage, keep_sources, decided=decided)
        before = GraphLowering.save_output_code

        def save(code: str) -> None:
            watch.look_at_code(code)
            if before is not None:
                before(code)

        GraphLowering.save_output_code = staticmethod(save)
        try:
            yield watch
        finally:
            GraphLowering.save_output_code = staticmethod(before) if before is not None else None


def resolve(backend: str | Backend) -> Backend:
    """The function that compiles for `backend`; it takes `mode` and `options` where the backend has them."""
    if callable(backend):
        return backend
    if backend == "dsv4":
        from ..backend import dsv4

        return dsv4
    if backend == "inductor":
        return _inductor
    from .._compat import lookup_backend

    return lookup_backend(backend)  # type: ignore[no-any-return]


def _inductor(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Inductor with the arguments that torch.compile passes to other backends."""
    from .._compat import compile_fx, list_mode_options

    settings = dict(list_mode_options().get(mode, {})) if mode else {}
    settings |= {key.replace("-", "_"): value for key, value in (options or {}).items()}
    return compile_fx(gm, example_inputs, config_patches=settings)
