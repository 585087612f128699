"""Origins of generated code: ops, source lines and modules of each launch in Inductor's Python.

Before each launch Inductor writes the nodes of its graph that it computes: by a number that torch keeps their names
under, or else by the names that they had when Dynamo traced them. Lines and modules are in the graph's nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...selection.costs import Cost
from ...selection.decisions import Decisions
from ..graphs import launches_in
from ..places import Place, innermost, is_installed, is_ours_or_torch, with_source

_HANDLE = re.compile(r"# \[Provenance debug handles\] (\S+:\d+)")
_NAMES = re.compile(r"Source Nodes: \[([^\]]*)\], Original ATen: \[([^\]]*)\]")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)')
_FUNCTION = re.compile(r"^\s*def (?:call|partition_\d+)\(")
_TENSOR = re.compile(r"\b((?:buf|arg|primals_)\d+(?:_\d+)?)\b")
_ROOT = re.compile(r"^L\[[^\]]*\]\.?")


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of one launch: op, all ops fused with it, the line that called it, all lines, and the module.

    `caller` is the next line outwards in a different file, where `place` is in a helper that many lines call. `cost` is
    the sum over dsv4 ops that became part of a generated kernel.
    """

    op: str
    ops: tuple[str, ...] = ()
    place: Place = field(default_factory=Place)
    where: tuple[Place, ...] = ()
    module: str = ""
    cost: Cost | None = None
    caller: Place = field(default_factory=Place)


@dataclass(frozen=True, slots=True)
class GeneratedLine:
    """A line of generated code that launches something: its function, the names of its tensors, and its origin.

    `results` has the origin of each tensor that is the whole result of an op, by name.
    """

    kernel: str
    tensors: tuple[str, ...]
    source: Source
    results: Mapping[str, Source] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Origin:
    """One node of Inductor's graph."""

    op: str
    place: Place
    module: str
    traced: str
    caller: Place = field(default_factory=Place)


@dataclass(slots=True)
class Sources:
    """Launching lines by file of generated code, of everything that compiled while `record` was called."""

    decided: Decisions
    _seen: int = 0
    _codes: dict[str, dict[int, GeneratedLine]] = field(default_factory=dict)
    _files: dict[str, dict[int, GeneratedLine] | None] = field(default_factory=dict)

    def record(self, code: str) -> None:
        """Read the code that Inductor has generated; its graph is the one that is being lowered."""
        from ..._compat import V, kernel_origins

        graph = V.graph.module.graph if hasattr(V.graph, "module") else V.graph.graph
        origins = {node.name: _origin(node) for node in graph.nodes if node.op == "call_function"}
        costs = {d.node: d.cost for d in self.decided[self._seen :] if d.cost is not None and d.impl == "ir"}
        self._seen = len(self.decided)
        lines = dict(_lines(code, origins, kernel_origins(), costs))
        results = {
            buffer.get_name(): _source("", [node.name], (), origins, {})
            for buffer in V.graph.buffers
            if (node := getattr(buffer, "get_origin_node", lambda: None)()) is not None
            and node.name in origins
            and _is_result(node)
        }
        for number, line in lines.items():
            # The first launch that has a buffer writes it.
            line_results = {name: results.pop(name) for name in line.tensors if name in results}
            lines[number] = replace(line, results=line_results)
        self._codes[code] = lines

    def lines_of(self, file: str) -> dict[int, GeneratedLine] | None:
        """Return the launching lines of a file by number, None if it was not recorded."""
        if file not in self._files:
            path = Path(file)
            self._files[file] = self._codes.get(path.read_text(encoding="utf-8")) if path.is_file() else None
        return self._files[file]


@contextmanager
def traced_origins() -> Iterator[None]:
    """Let Inductor note which nodes of its graph each kernel is made of, inside the block."""
    from ..._compat import inductor_config

    name = "trace.provenance_tracking_level"
    known = hasattr(inductor_config.trace, name.split(".")[1])
    with inductor_config.patch({name: 2} if known else {}):
        yield


def _lines(
    code: str, origins: dict[str, _Origin], handles: dict[str, list[str]], costs: dict[str, Cost]
) -> Iterator[tuple[int, GeneratedLine]]:
    """Yield number and content of each line that launches a kernel or calls an op."""
    launched = launches_in(code)
    nodes: list[str] = []
    fallback: list[str] = []
    inside = False
    for number, line in enumerate(code.splitlines(), 1):
        if _FUNCTION.match(line):
            inside = True
        elif line and not line[0].isspace():
            inside = False
        if not inside:
            continue
        handle, names = _HANDLE.search(line), _NAMES.search(line)
        if handle:
            nodes = handles.get(handle[1]) or nodes
        elif names:
            traced = set(names[1].split(", "))
            nodes = [name for name, origin in origins.items() if origin.traced in traced]
            fallback = [name for name in names[2].split(", ") if name]
        if handle or names or line.lstrip().startswith("#"):
            continue
        kernel = launched(line)
        if kernel:
            tensors = tuple(dict.fromkeys(_TENSOR.findall(line)))
            yield number, GeneratedLine(kernel, tensors, _source(kernel, nodes, fallback, origins, costs))
            nodes, fallback = [], []


def _source(
    kernel: str, names: Sequence[str], fallback: Sequence[str], origins: dict[str, _Origin], costs: dict[str, Cost]
) -> Source:
    listed = set(names)
    line_origins = [origin for name, origin in origins.items() if name in listed]
    if not line_origins:
        ops = tuple(fallback) or (kernel,)
        return Source(ops[-1], ops)
    main = next((origin for origin in line_origins if origin.op.startswith("dsv4")), line_origins[-1])
    if not main.place.file:
        main = next((origin for origin in line_origins if origin.place.file), main)
    known = [cost for name, cost in costs.items() if name in listed]
    return Source(
        op=main.op,
        ops=tuple(dict.fromkeys(origin.op for origin in line_origins)),
        place=main.place,
        where=tuple(dict.fromkeys(origin.place for origin in line_origins if origin.place.file)),
        module=main.module or next((origin.module for origin in line_origins if origin.module), ""),
        cost=Cost(sum(c.bytes for c in known), sum(c.flops for c in known), known[0].operands) if known else None,
        caller=main.caller,
    )


def _origin(node: Any) -> _Origin:
    frames = [Place(f, int(n), name) for f, n, name in _FRAME.findall(node.meta.get("stack_trace") or "")]
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    traced = node.meta.get("from_node") or ()
    location, caller = place_and_caller(frames)
    return _Origin(
        op=op_name(_target(node)),
        place=location,
        module=module_path(str(modules[-1][0])) if modules else "",
        traced=traced[0].name if traced else "",
        caller=caller,
    )


def _is_result(node: Any) -> bool:
    """Return whether this node is the last of its op of the model."""
    op, traced = node.meta.get("original_aten"), node.meta.get("from_node") or ()
    name = traced[0].name if traced else ""

    def same(other: Any) -> bool:
        from_node = other.meta.get("from_node") or ()
        return bool(other.meta.get("original_aten") is op and from_node and from_node[0].name == name)

    return not any(same(user) for user in node.users)


def place_and_caller(frames: Sequence[Place]) -> tuple[Place, Place]:
    """Return the innermost line outside libraries of a stack (outermost call first), and its caller in other files."""
    if not frames:
        return Place(), Place()
    inner = innermost(list(frames))
    outer = [frame for frame in frames[: frames.index(inner)] if frame.file != inner.file]
    caller = innermost(outer) if outer else Place()
    known = caller.file and not is_ours_or_torch(caller.file) and not is_installed(caller.file)
    return with_source(inner), with_source(caller) if known else Place()


def _target(node: Any) -> Any:
    """Return the op of a node: of a functionalized one the op that it stands for, of a decomposed one the original."""
    called = next((argument for argument in node.args[:1] if hasattr(argument, "_schema")), None)
    return called or node.meta.get("original_aten") or node.target


def op_name(op: Any) -> str:
    """Return "aten.mm" or "dsv4.fp8_linear" for an overload, and the name of any other function."""
    schema = getattr(op, "_schema", None)
    if schema is None:
        return str(getattr(op, "__name__", op))
    namespace, _, name = str(schema.name).partition("::")
    # Ops of the namespaces dsv4_ir and dsv4_eager are those of dsv4 with an implementation chosen.
    return f"{'dsv4' if namespace.startswith('dsv4') else namespace}.{name}"


def module_path(name: str) -> str:
    """Return "layers.3.attn" for a name that Dynamo gives to a module: `L['self'].layers[3].attn`."""
    words = re.findall(r"\w+", _ROOT.sub("", name))
    return ".".join(word for word in words if word not in ("_modules", "_orig_mod"))


def layer_of(module: str) -> str:
    """Return a module's path up to the first number, or "" if it has none: "model.layers.3" of its attention."""
    parts = module.split(".")
    first = next((i for i, name in enumerate(parts) if name.isdigit()), None)
    return "" if first is None else ".".join(parts[: first + 1])


def innermost_module(modules: Iterable[str]) -> str:
    """Return the longest of nested modules' paths, or ""."""
    return max(modules, key=len, default="")
