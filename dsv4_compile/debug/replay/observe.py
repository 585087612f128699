"""Observe what a call launches: each op and each line of generated code, with the line of the model it comes from.

Ops are seen by a dispatch mode, lines of generated code by Python's trace function. While a CUDA graph is captured,
`new_nodes` tells the nodes that appeared since its last call; they belong to the ops that ran in between.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ..._compat import OpOverload, pytree
from ...runtime.captures import TransparentMode
from ...runtime.drafting import current_stage
from ...selection import call_costs
from ...selection.costs import Cost
from ..graphs import short_dtype
from ..places import Place
from .rows import BY_EXPRESSION, BY_TENSORS
from .sources import GeneratedLine, Source, Sources, innermost_module, module_path, op_name, place_and_caller

_OUTERMOST = str(Path(__file__).with_name("captures.py"))
"""File that calls what is captured; stacks end there."""
_GENERATED = ("call", "partition_")
"""Beginnings of the names of generated functions that launch."""
_TOUCHES_PART = ("index", "embedding", "gather", "scatter", "select", "slice", "take", "cat")
"""Words in names of ops that may read or write a part of a tensor alone."""
_ALLOCATES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_")
"""Ops that put no work on the device."""
_GEMMS = ("mm", "addmm", "bmm", "baddbmm", "linear")


@dataclass(slots=True)
class Launch:
    """An op call, or a line of generated code, that puts work on the device.

    `handles` are the new nodes of a graph under capture; `seconds` is host time, which is its own on a CPU. `options`
    are the arguments of an op outside aten that are not their defaults: a fused call of it may compute more. `stage` is
    that of a step with drafts.
    """

    source: Source
    kernel: str
    shapes: list[str] = field(default_factory=list)
    cost: Cost | None = None
    basis: str = ""
    stream: int = 0
    handles: list[int] = field(default_factory=list)
    seconds: float = 0.0
    generated: bool = False
    refined: bool = False
    result: Any = None
    options: frozenset[str] = frozenset()
    stage: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Kernel and op, to find the same launch in a second run."""
        return self.kernel, self.source.op


Watcher = Callable[[Launch, Source, Mapping[str, Tensor]], None]
"""Takes a launch, the origin of the tensors that it wrote, and these by name: results and arguments, or buffers."""


class Observer(TransparentMode):
    """Dispatch mode that collects `launches` in the order they run.

    Args:
        sources: origins of generated code.
        names: paths of modules by id, to name the module that calls an op.
        new_nodes: see the module; None on a CPU.
        ignored: a file with ops that are not those of the call: that of the stand-in, while it records.
        watch: called after each launch with the tensors that it wrote, see `Watcher`.
    """

    def __init__(
        self,
        sources: Sources,
        names: Mapping[int, str],
        new_nodes: Callable[[], list[int]] | None = None,
        ignored: str = "",
        watch: Watcher | None = None,
    ) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self._sources, self._names, self._new_nodes, self._watch = sources, names, new_nodes, watch
        self._ignored = ignored
        self._watching = False
        self._owner: Launch | None = None
        self._line: tuple[Launch, GeneratedLine] | None = None
        self._since = 0.0
        self._streams: dict[int, int] = {}

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe what runs in the block."""
        before = sys.gettrace()
        self._switch(None)
        with self:
            sys.settrace(self._trace)
            try:
                yield
            finally:
                sys.settrace(before)
                self._switch(None)

    def observed(self) -> list[Launch]:
        """Return the launches that put work on the device, lines that only called an observed op left out."""
        if self._new_nodes is not None:
            return [launch for launch in self.launches if launch.handles]
        return [launch for launch in self.launches if not (launch.generated and launch.refined)]

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` as a launch, unless it makes a view."""
        kwargs = kwargs or {}
        if self._watching or not _launches(func):
            return func(*args, **kwargs)
        outer = self._owner
        if self._line is None:
            source = self._source_of_caller(func)
            if source.place.file == self._ignored:
                return func(*args, **kwargs)
        else:
            self._line[0].refined = True
            source = self._line[1].source
            if not source.op.startswith("dsv4") or op_name(func).startswith("dsv4"):
                source = replace(source, op=op_name(func), cost=None)
        launch = self._begin(Launch(source, op_name(func), options=_options(func, args, kwargs)))
        out = func(*args, **kwargs)
        self._switch(outer)
        _describe(launch, func, args, kwargs, out)
        if self._watch is not None:
            self._watch(launch, source, _written(func, args, kwargs, out))
        return out

    def _begin(self, launch: Launch) -> Launch:
        if self._new_nodes is not None:
            stream = torch.cuda.current_stream().cuda_stream
            launch.stream = self._streams.setdefault(stream, len(self._streams))
        launch.stage = current_stage.get()
        self.launches.append(launch)
        self._switch(launch)
        return launch

    def _switch(self, launch: Launch | None) -> None:
        """Give time and nodes since the last switch to their owner; `launch` owns what comes next."""
        now = time.perf_counter()
        new_handles = self._new_nodes() if self._new_nodes is not None else []
        if new_handles and self._owner is None:
            self._owner = Launch(Source("unknown"), "unknown")
            self.launches.append(self._owner)
        if self._owner is not None:
            self._owner.seconds += now - self._since
            self._owner.handles += new_handles
        self._owner, self._since = launch, time.perf_counter()

    def _source_of_caller(self, func: OpOverload) -> Source:
        """Return op, line and module of the Python code that called `func`."""
        frames: list[Place] = []
        modules: list[str] = []
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename != _OUTERMOST:
            code = frame.f_code
            frames.append(Place(code.co_filename, frame.f_lineno, code.co_name))
            method_owner = frame.f_locals.get("self") if "self" in code.co_varnames else None
            if isinstance(method_owner, nn.Module) and id(method_owner) in self._names:
                modules.append(self._names[id(method_owner)])
            frame = frame.f_back
        location, caller = place_and_caller([line for line in frames[::-1] if not _is_op_code(line.file)])
        return Source(op_name(func), (op_name(func),), location, (location,), innermost_module(modules), caller=caller)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        """Trace function that looks into generated code alone."""
        if not frame.f_code.co_name.startswith(_GENERATED):
            return None
        lines = self._sources.lines_of(frame.f_code.co_filename)
        return self._line_tracer(lines) if lines is not None else None

    def _line_tracer(self, lines: Mapping[int, GeneratedLine]) -> Callable[..., Any]:
        outer = self._source_of_caller(torch.ops.aten.mm.default).module

        def trace(frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
            self._end_line(frame)
            generated = lines.get(frame.f_lineno) if event == "line" else None
            if generated is not None:
                self._begin_line(frame, generated, outer)
            return trace

        return trace

    def _begin_line(self, frame: FrameType, line: GeneratedLine, outer: str) -> None:
        origin = line.source
        source = _inside(outer, origin)
        launch = Launch(source, line.kernel, generated=True)
        values = [frame.f_locals.get(name) for name in line.tensors]
        tensors = [tensor for tensor in values if isinstance(tensor, Tensor)]
        launch.shapes = [shape_text(tensor) for tensor in tensors]
        if origin.cost is not None:
            launch.cost, launch.basis = origin.cost, BY_EXPRESSION
        elif not any(word in op for op in origin.ops for word in _TOUCHES_PART) and not origin.op.startswith("dsv4"):
            launch.cost, launch.basis = Cost(_bytes(tensors), 0), BY_TENSORS
        results = {name: _inside(outer, result) for name, result in line.results.items()}
        self._line = launch, GeneratedLine(line.kernel, line.tensors, source, results)
        self._begin(launch)

    def _end_line(self, frame: FrameType) -> None:
        if self._line is None:
            return
        (launch, line), self._line = self._line, None
        self._switch(None)
        if self._watch is not None and not launch.refined:
            self._watching = True  # what the watcher calls is no launch
            for name, source in line.results.items():
                tensor = frame.f_locals.get(name)
                if isinstance(tensor, Tensor):
                    self._watch(launch, source, {name: tensor})
            self._watching = False


def _inside(outer: str, source: Source) -> Source:
    """Return `source` with the path of its module from the outermost one; `outer` is that of the compiled module."""
    return replace(source, module=".".join(path for path in (outer, source.module) if path))


@functools.cache
def _is_op_code(file: str) -> bool:
    """Return whether a file belongs to the definitions of ops, which are between an op and the code that calls it."""
    return Path(file).is_relative_to(Path(ops.__file__).parent)


def module_names(tree: Any) -> dict[int, str]:
    """Return the paths of all modules of a module, or of an object that has some, by id."""
    roots = [tree] if isinstance(tree, nn.Module) else [v for v in vars(tree).values() if isinstance(v, nn.Module)]
    names: dict[int, str] = {}
    for root in roots:
        for name, module in root.named_modules(remove_duplicate=False):
            names.setdefault(id(module), module_path(name))
    return names


def all_module_names() -> dict[int, str]:
    """Return the paths of all modules of this process by id, from the outermost module of each."""
    modules = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    names: dict[int, str] = {}
    for module in modules:
        if id(module) not in inner:
            names |= module_names(module)
    return names


def shape_text(tensor: Tensor) -> str:
    """Return dtype and shape of a tensor: `bf16[8, 4096]`."""
    return f"{short_dtype(tensor.dtype)}{list(tensor.shape)}"


def _launches(func: OpOverload) -> bool:
    """Return whether `func` puts work on the device; views and allocations do not."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    if any(alias is not None and not alias.is_write for alias in aliases) or func.namespace in ("prim", "profiler"):
        return False
    return op_name(func).partition(".")[2] not in _ALLOCATES


def _named(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    declared = func._schema.arguments
    defaults = {a.name: a.default_value for a in declared if a.has_default_value()}
    return defaults | dict(zip((a.name for a in declared), args, strict=False)) | dict(kwargs)


def _options(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> frozenset[str]:
    """Return the arguments of an op outside aten that are not their defaults."""
    if func.namespace == "aten":
        return frozenset()
    named = _named(func, args, kwargs)
    optional = ((a.name, a.default_value) for a in func._schema.arguments if a.has_default_value())
    return frozenset(name for name, value in optional if isinstance(named[name], Tensor) or named[name] != value)


def _written(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> dict[str, Tensor]:
    """Return the tensors that a call returned or wrote, by name."""
    named = _named(func, args, kwargs)
    leaves = {f"result {i}": leaf for i, leaf in enumerate(pytree.tree_leaves(out))}
    written = {a.name: named.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write}
    lists = {f"{n} {i}": x for n, value in written.items() if isinstance(value, list) for i, x in enumerate(value)}
    return {name: value for name, value in (leaves | written | lists).items() if isinstance(value, Tensor)}


def _describe(launch: Launch, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """Fill in shapes and cost of an op call from its arguments."""
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    launch.shapes = [shape_text(tensor) for tensor in inputs]
    namespace, _, name = op_name(func).partition(".")
    if namespace == "dsv4":
        launch.cost = call_costs.of(name, _named(func, args, kwargs))
        launch.basis = BY_EXPRESSION if launch.cost is not None else ""
    elif not any(word in name for word in _TOUCHES_PART):
        results = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        flops = 0
        if name in _GEMMS and len(inputs) > 1 and results:
            inner = inputs[1 if name in ("addmm", "baddbmm") else 0].shape[-1]
            flops = 2 * results[0].numel() * inner
        launch.cost, launch.basis = Cost(_bytes([*inputs, *results]), flops), BY_TENSORS


def _bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of tensors; those with the same first element count once."""
    sizes = {(tensor.data_ptr(), tensor.numel()): tensor.numel() * tensor.itemsize for tensor in tensors}
    return sum(sizes.values())
