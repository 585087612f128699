"""The CUDA driver's view of a graph under capture: its nodes, what each launches, and the edges between them.

Everything is asked while the stream captures, so the capture needs no settings. Functions of the driver have their
version in the name, from CUDA 12.3: edges of that version tell programmatic dependencies (PDL).
"""

from __future__ import annotations

import ctypes
import re
from ctypes import Structure, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_void_p
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import fail
from .rows import Edge

_LIBRARY = "libcuda.so.1"
_KINDS = {
    0: "kernel",
    1: "copy",
    2: "fill",
    3: "host",
    4: "graph",
    5: "empty",
    6: "wait for event",
    7: "record event",
    10: "allocation",
    11: "free",
    13: "conditional",
}
"""Values of CUgraphNodeType."""
_TIMED = ("kernel", "copy", "fill")
_PROGRAMMATIC = 1
"""CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC."""
_ACTIVE = 1
"""CU_STREAM_CAPTURE_STATUS_ACTIVE."""
_IMPLICIT = 906
"""CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: the current stream is the legacy one, which captures nothing."""
_STATIC_SHARED, _REGISTERS = 1, 4
"""CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES and _NUM_REGS."""


class _KernelParams(Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("kernel_params", c_void_p),
        ("extra", c_void_p),
        ("kern", c_void_p),
        ("context", c_void_p),
    )


class _CopySide(Structure):
    """One half of CUDA_MEMCPY3D."""

    _fields_ = (
        ("x_bytes", c_size_t),
        ("y", c_size_t),
        ("z", c_size_t),
        ("lod", c_size_t),
        ("memory_type", c_int),
        ("host", c_void_p),
        ("device", c_void_p),
        ("array", c_void_p),
        ("reserved", c_void_p),
        ("pitch", c_size_t),
        ("height", c_size_t),
    )


class _CopyParams(Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = (
        ("source", _CopySide),
        ("target", _CopySide),
        ("width_bytes", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
    )


class _FillParams(Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("target", c_void_p),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("element_bytes", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class _EdgeData(Structure):
    """CUgraphEdgeData."""

    _fields_ = (("from_port", c_ubyte), ("to_port", c_ubyte), ("type", c_ubyte), ("reserved", c_ubyte * 5))


@dataclass(slots=True)
class DriverNode:
    """One node as the driver describes it; `bytes` of copies and fills, written and, of copies, read."""

    handle: int
    kind: str
    name: str = ""
    grid: list[int] = field(default_factory=list)
    block: list[int] = field(default_factory=list)
    shared_bytes: int | None = None
    registers: int | None = None
    bytes: int | None = None
    after: list[Edge] = field(default_factory=list)
    function: int = 0

    @property
    def timed(self) -> bool:
        """Whether a profiler sees the node."""
        return self.kind in _TIMED


class CaptureReader:
    """Reads the graph that the current stream captures: `new_nodes` at any time, `read` once before the capture ends.

    Raises E420 where the driver or its functions are missing.
    """

    def __init__(self) -> None:
        if torch.version.hip is not None:
            fail("E420", got="a HIP graph", why="nodes are read through the CUDA driver", fix="use an NVIDIA GPU")
        try:
            self._driver: Any = ctypes.CDLL(_LIBRARY)
            for name in ("cuStreamGetCaptureInfo_v3", "cuGraphGetEdges_v2", "cuFuncGetName"):
                getattr(self._driver, name)
        except (OSError, AttributeError) as fault:
            fail("E420", got=str(fault), rule="the driver is of CUDA 12.3 or later", fix="update the driver")
        self._seen: dict[int, None] = {}  # in order of appearance
        self._count = 0
        self.nodes: list[DriverNode] = []

    def new_nodes(self) -> list[int]:
        """Return the handles of nodes that were not there at the last call; none while nothing is captured."""
        graph = self._graph()
        if graph is None:
            return []
        count = c_size_t()
        self._call("cuGraphGetNodes", graph, None, byref(count))
        if count.value == self._count:
            return []
        new_handles = [handle for handle in self._handles(graph, count.value) if handle not in self._seen]
        self._seen.update(dict.fromkeys(new_handles))
        self._count = count.value
        return new_handles

    def read(self) -> None:
        """Fill `nodes` with all nodes of the graph and their edges, in the order of their creation."""
        graph = self._graph()
        if graph is None:
            return
        self.new_nodes()
        self.nodes = [self._node(handle) for handle in self._seen]
        position = {node.handle: index for index, node in enumerate(self.nodes)}
        edges = c_size_t()
        self._call("cuGraphGetEdges_v2", graph, None, None, None, byref(edges))
        if not edges.value:
            return
        sources, targets = (c_void_p * edges.value)(), (c_void_p * edges.value)()
        data = (_EdgeData * edges.value)()
        self._call("cuGraphGetEdges_v2", graph, sources, targets, data, byref(edges))
        for source, target, edge_data in zip(sources, targets, data, strict=True):
            if source is not None and target is not None:
                edge = Edge(position[source], edge_data.type == _PROGRAMMATIC)
                self.nodes[position[target]].after.append(edge)

    def describe_functions(self) -> None:
        """Add names, registers and static shared memory of kernels, after the capture."""
        for node in self.nodes:
            if node.function:
                function = c_void_p(node.function)
                name = c_char_p()
                self._call("cuFuncGetName", byref(name), function)
                node.name = (name.value or b"").decode(errors="replace")
                node.registers = self._attribute(_REGISTERS, function)
                node.shared_bytes = (node.shared_bytes or 0) + self._attribute(_STATIC_SHARED, function)

    def _graph(self) -> c_void_p | None:
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        status, graph = c_int(), c_void_p()
        outputs = (stream, byref(status), None, byref(graph), None, None, None)
        self._call("cuStreamGetCaptureInfo_v3", *outputs, accepted=(_IMPLICIT,))
        return graph if status.value == _ACTIVE and graph.value else None

    def _handles(self, graph: c_void_p, count: int) -> list[int]:
        nodes, number = (c_void_p * count)(), c_size_t(count)
        self._call("cuGraphGetNodes", graph, nodes, byref(number))
        return [int(handle) for handle in nodes if handle is not None]

    def _node(self, handle: int) -> DriverNode:
        node, kind = c_void_p(handle), c_int()
        self._call("cuGraphNodeGetType", node, byref(kind))
        driver_node = DriverNode(handle, _KINDS.get(kind.value, f"type {kind.value}"))
        if driver_node.kind == "kernel":
            params = _KernelParams()
            self._call("cuGraphKernelNodeGetParams_v2", node, byref(params))
            driver_node.grid, driver_node.block = list(params.grid), list(params.block)
            driver_node.shared_bytes = params.shared
            function = c_void_p(params.func)
            if not params.func and params.kern:
                self._call("cuKernelGetFunction", byref(function), c_void_p(params.kern))
            driver_node.function = function.value or 0
        elif driver_node.kind == "copy":
            copy = _CopyParams()
            self._call("cuGraphMemcpyNodeGetParams", node, byref(copy))
            driver_node.bytes = 2 * copy.width_bytes * copy.height * copy.depth
            driver_node.name = "copy"
        elif driver_node.kind == "fill":
            fill = _FillParams()
            self._call("cuGraphMemsetNodeGetParams", node, byref(fill))
            driver_node.bytes = fill.element_bytes * fill.width * fill.height
            driver_node.name = "fill"
        return driver_node

    def _attribute(self, which: int, function: c_void_p) -> int:
        value = c_int()
        self._call("cuFuncGetAttribute", byref(value), c_int(which), function)
        return value.value

    def _call(self, name: str, *arguments: Any, accepted: tuple[int, ...] = ()) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status and status not in accepted:
            text = c_char_p()
            self._driver.cuGetErrorName(c_int(status), byref(text))
            got = f"{name}: {(text.value or b'').decode() or status}"
            fail("E420", got=got, why="the driver does not describe this graph", fix="update the driver")


def function_name(symbol: str) -> str:
    """Return the name of the function in a mangled C++ symbol, without namespaces and parameters; others as they are.

    `_ZN2at6native29vectorized_elementwise_kernelILi4EEEvi` is a `vectorized_elementwise_kernel`.
    """
    match = re.match(r"_Z(?:N[rVK]*)?(?=\d)", symbol)
    if not match:
        return symbol
    name, rest = "", symbol[match.end() :]
    while length := re.match(r"\d+", rest):
        start = length.end()
        name, rest = rest[start : start + int(length[0])], rest[start + int(length[0]) :]
        if symbol.startswith("_Z") and not symbol.startswith("_ZN"):
            break
    return name or symbol
