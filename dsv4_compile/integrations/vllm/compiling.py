"""Compilation inside vLLM: the backend "dsv4", Inductor with this package's pass, and the report of the first call."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ...backend import dsv4
from ...debug.report import assemble
from ...debug.watch import Watch, watching
from ...lowering import registry
from ...ops.common.define import OPS
from ...options import Options
from ...passes import ChooseImplementations
from . import _compat
from .registration import BACKEND, EXPLAINED, WITH_OPTIONS, Registered

_watch: ContextVar[Watch] = ContextVar("watch")


def prepare(vllm_config: Any, module: Any) -> None:
    """Make what vLLM compiles of `module` traceable. Give Inductor this package's pass, if vLLM compiles with it.

    Backend "dsv4" brings its passes along.
    """
    if _compat.eager(vllm_config):
        return
    _compat.make_traceable(module)
    if _compat.backend_name(vllm_config) == "inductor":
        _compat.add_graph_pass(vllm_config, graph_pass(torch.device(_compat.device_type())))


def how(model: Any) -> str:
    """Return how a model of vLLM runs, for its log."""
    if model.do_not_compile:
        return "eager"
    name = _compat.backend_name(model)
    return f"compiled by backend {BACKEND if name in (EXPLAINED, WITH_OPTIONS) else name!r}"


def graph_pass(device: torch.device) -> Any:
    """Return `ChooseImplementations` as one of vLLM's passes, which run after Inductor's own."""
    registry.load()
    chooses = ChooseImplementations(Options.parse(None, {}, ops=OPS), (), (device,))

    class Choose(_compat.InductorPass):  # type: ignore[misc]
        """Fuses dsv4 ops and chooses an implementation for each."""

        def __call__(self, graph: torch.fx.Graph) -> None:
            chooses(graph)

        def uuid(self) -> Any:
            return chooses.uuid()

    return Choose()


def options() -> dict[str, Any]:
    """Return the options of backend "dsv4" that this process was registered with."""
    level = Registered.settings.batch_invariant
    return {} if level == "off" else {"dsv4.batch_invariant": level}


def with_options(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compile a graph with backend "dsv4" and `options`: the backend of a batch-invariant model."""
    return dsv4(gm, example_inputs, **{**kwargs, "options": {**(kwargs.get("options") or {}), **options()}})


def explained(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compile a graph with backend "dsv4" for `explaining`: the backend of a model that gets a report."""
    merged = {**(kwargs.pop("options", None) or {}), **options()}
    return _watch.get().backend(BACKEND)(gm, example_inputs, **kwargs, **({"options": merged} if merged else {}))


@contextmanager
def explaining(model: Any) -> Iterator[None]:
    """Write the report of everything that is compiled inside the block, if it is wanted and `model` is not compiled."""
    if getattr(model, "compiled", True) or _compat.backend_name(model) != EXPLAINED:
        yield
        return
    started = time.monotonic()
    with watching() as watch:
        token = _watch.set(watch)
        try:
            yield
        finally:
            _watch.reset(token)
    seconds = time.monotonic() - started
    report = assemble(watch, target=type(model).__qualname__, backend=BACKEND, seconds=seconds, calls=1)
    if _compat.get_tp_group().rank_in_group == 0:  # ranks compile the same
        path = report.save(Registered.settings.explain)
        _compat.log("the report of the compilation is in %s", path)
