"""Captured graphs and the code that Inductor generates for them: ops, inputs, kernels, and copies of caches.

Kernels are counted in the generated source. Copies of caches are found in Inductor's buffers, which have exact sizes;
only those that the source allocates count.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .places import Place, innermost, with_source
from .rows import CacheCopy, CacheHazard, Graph, GraphInput, Kernel, MissedReinplace, OpDecision

_MODULE_STATE = re.compile(r"_parameters_|_buffers_")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)')
_VIEWS = re.compile(r"view|reshape|flatten|unflatten|squeeze|unsqueeze|narrow|select|as_strided|t|getitem")
_VIEWS_FOLLOWED = 32
_SHORT_DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "bool",
}

SMALLEST_CACHE = 16 * 1024
"""Fewest bytes of a mutated input that counts as a cache."""

_COPYING = {"load", "to_dtype_bitcast"}
"""Inductor operations of a buffer that only copies its input."""

_KINDS = {"cpp_pybinding": "cpp"}
_DEFINITION = re.compile(r"^(\w+) = async_compile\.(\w+)\(", re.MULTILINE)
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
_EXTERN = re.compile(r"\b(extern_kernels\.\w+|(?:torch\.ops|aten|prims|inductor_ops)\.[\w.]+|dsv4_(?:ON_CPU\.)?\w+)\(")
_ON_CPU = re.compile(r"^dsv4_(?:ON_CPU\.)?")
_NOT_KERNELS = re.compile(r"\.(?:_?reinterpret_tensor|_alloc_from_pool|accumulate_grad_)\b")


def describe(gm: GraphModule, index: int, compile_id: str) -> Graph:
    """Return the row of `gm`. Parameters and buffers of modules are counted, other inputs listed."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    arguments = [node for node in placeholders if not _MODULE_STATE.search(str(node.target))]
    return Graph(
        index=index,
        compile_id=compile_id,
        place=next((_place_of(node) for node in gm.graph.nodes if node.meta.get("stack_trace")), Place()),
        ops=dict(Counter(_name(node, gm) for node in gm.graph.nodes if node.op.startswith("call_")).most_common()),
        inputs=[_input(node) for node in arguments],
        parameters=len(placeholders) - len(arguments),
    )


def dsv4_calls(gm: GraphModule, reason: str) -> list[OpDecision]:
    """Return one row for each call of a dsv4 op in `gm`, undecided for `reason`."""
    return [
        OpDecision(op._schema.name.removeprefix("dsv4::"), "undecided", reason, where=[str(_place_of(node))])
        for node, op in _op_calls(gm)
        if op.namespace == "dsv4"
    ]


def hazards(gm: GraphModule, index: int) -> list[CacheHazard]:
    """Return the cache arguments with a dynamic dim, of all ops that are not torch's own."""
    rows: dict[tuple[str, str], CacheHazard] = {}
    for node, op in _op_calls(gm):
        if op.namespace in ("aten", "prims", "prim"):
            continue
        for declared, value in _arguments(node, op):
            is_cache = "cache" in declared.name and "cos_sin" not in declared.name
            mutated = declared.alias_info is not None and declared.alias_info.is_write
            source = _graph_input(value) if is_cache or mutated else None
            if source is None:
                continue
            entry = _input(source)
            if entry.dynamic:
                name = op._schema.name.replace("::", ".")
                rows.setdefault((entry.name, name), CacheHazard(index, entry.name, entry.shape, name, _place_of(node)))
    return list(rows.values())


def input_names(gm: GraphModule) -> list[str]:
    """Return the names of all inputs in order, as the report spells them."""
    return [_readable(str(node.target)) for node in gm.graph.nodes if node.op == "placeholder"]


def _place_of(node: Node) -> Place:
    """Return the line of the user's code that `node` comes from."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return with_source(innermost([Place(file, int(line), function) for file, line, function in frames]))


def read_kernels(code: str, graph: int) -> list[Kernel]:
    """Return the kernels of one graph's generated code with their number of launches."""
    _, _, body = _COMMENT.sub("", code).partition("def call(")
    body = body.partition("def benchmark_compiled_module")[0].partition("def get_args")[0]
    kernels = []
    for name, kind in _DEFINITION.findall(code):
        calls = len(re.findall(rf"\b{name}(?:\.run)?\(", body))
        kernels.append(Kernel(graph, _KINDS.get(kind, kind), name, calls))
    externs = [name for name in _EXTERN.findall(body) if not _NOT_KERNELS.search(name)]
    for name in dict.fromkeys(externs):
        shown = _ON_CPU.sub("dsv4.", name.removeprefix("torch.ops."))
        kernels.append(Kernel(graph, "extern", shown, externs.count(name)))
    return kernels


def launches_in(code: str) -> Callable[[str], str]:
    """Return a function that gives the kernel or op which a line of `code` launches, or ""."""
    names = "|".join(name for name, _ in _DEFINITION.findall(code))
    launch = re.compile(rf"\b({names or '(?!)'})(?:\.run)?\(")

    def launched(line: str) -> str:
        called = [match[1] for match in (launch.search(line), *_EXTERN.finditer(line)) if match]
        return next((name for name in called if not _NOT_KERNELS.search(name)), "")

    return launched


def read_copies(lowered: Any, code: str, graph: int, names: list[str]) -> list[CacheCopy]:
    """Return the temporaries of `lowered` (Inductor's graph) that copy a whole mutated input.

    `names` are Dynamo's names of the inputs, used if Inductor has the same number of inputs.
    """
    inputs = list(lowered.graph_inputs)
    readable = dict(zip(inputs, names, strict=True)) if len(inputs) == len(names) else {}
    copies = []
    for name in lowered.mutated_inputs:
        cache = lowered.graph_inputs[name]
        size = _bytes(cache)
        if size is None or size < SMALLEST_CACHE:
            continue
        for buffer in _allocated(lowered.buffers, code):
            if _bytes(buffer) != size or not _only_copies(buffer, name, lowered.buffers):
                continue
            origin = _origin(buffer)
            copies.append(
                CacheCopy(
                    graph=graph,
                    argument=readable.get(name, name),
                    shape=[str(dim) for dim in cache.get_size()],
                    dtype=short_dtype(cache.get_dtype()),
                    bytes=size,
                    place=_place_of(origin) if origin else Place(),
                    origin=str(origin.target) if origin else "",
                )
            )
    return copies


def read_missed(graph: int) -> MissedReinplace | None:
    """Return the mutations of the graph just compiled that Inductor did not make in place."""
    from .._compat import ReinplaceCounters

    tensors = ReinplaceCounters.get_total_missed()
    return MissedReinplace(graph, tensors, ReinplaceCounters.get_total_missed_bytes()) if tensors else None


def _op_calls(gm: GraphModule) -> Iterator[tuple[Node, Any]]:
    """Yield node and overload of each call of a registered op; a called packet counts as its default overload."""
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        op = getattr(node.target, "default", node.target)
        if hasattr(op, "_schema") and hasattr(op, "namespace"):
            yield node, op


def _arguments(node: Node, op: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each declared argument with the value that `node` passes for it."""
    for position, declared in enumerate(op._schema.arguments):
        if position < len(node.args):
            yield declared, node.args[position]
        elif declared.name in node.kwargs:
            yield declared, node.kwargs[declared.name]


def _graph_input(value: Any) -> Node | None:
    """Return the graph input that `value` is, or is a view of."""
    for _ in range(_VIEWS_FOLLOWED):
        if not isinstance(value, Node):
            return None
        if value.op == "placeholder":
            return value
        name = value.target if isinstance(value.target, str) else getattr(value.target, "__name__", "")
        if not _VIEWS.fullmatch(name) or not value.args:
            return None
        value = value.args[0]
    return None


def _input(node: Node) -> GraphInput:
    value = node.meta.get("example_value")
    name = _readable(str(node.target))
    if not isinstance(value, torch.Tensor):
        return GraphInput(name, [], _dim(value) if value is not None else "", _is_symbol(value))
    dynamic = any(_is_symbol(size) for size in value.shape)
    return GraphInput(name, [_dim(size) for size in value.shape], short_dtype(value.dtype), dynamic)


def _dim(size: Any) -> str:
    """Return a number as it is, a symbol with its value during capture: `s0=4`."""
    hint = getattr(getattr(size, "node", None), "hint", None)
    return f"{size}={hint}" if _is_symbol(size) and hint is not None else str(size)


def _is_symbol(size: Any) -> bool:
    """Return whether a size is dynamic. torch leaves some fixed sizes as symbols that print as a number."""
    return isinstance(size, torch.SymInt) and not str(size).isdigit()


def _readable(target: str) -> str:
    """Return `self.q.weight` for `L_self_modules_q_parameters_weight_`, and `x` for `L_x_`."""
    name = target.removeprefix("L_").strip("_")
    name = re.sub(r"_?modules_", ".", name)
    name = re.sub(r"_(?:parameters|buffers)_", ".", name)
    return name.strip("._") or target


def _name(node: Node, gm: GraphModule) -> str:
    if node.op == "call_method":
        return f"Tensor.{node.target}"
    if node.op == "call_module":
        return type(gm.get_submodule(str(node.target))).__name__
    op = getattr(node.target, "default", node.target)
    if hasattr(op, "_schema"):
        return str(op._schema.name).replace("::", ".")
    return str(getattr(node.target, "__name__", node.target))


def short_dtype(dtype: torch.dtype) -> str:
    """Return `bf16` for torch.bfloat16; other types by torch's name."""
    return _SHORT_DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def _allocated(buffers: Iterable[Any], code: str) -> list[Any]:
    """Return the buffers that the code allocates. One that only names a mutation, or was fused, is not allocated."""
    return [buffer for buffer in buffers if re.search(rf"^\s*{buffer.get_name()} = ", code, re.MULTILINE)]


def _only_copies(buffer: Any, source: str, buffers: Iterable[Any]) -> bool:
    """Return whether `buffer` is a copy of the input `source`, read directly or through an alias."""
    count = getattr(getattr(buffer, "data", None), "inner_fn_opcount", None)
    if count is None:
        return False
    operations = count()
    aliases = {b.get_name() for b in buffers if not hasattr(getattr(b, "data", None), "inner_fn_opcount")}
    return operations.used_ops <= _COPYING and bool(set(operations.read_buffers) & {source, *aliases})


def _bytes(value: Any) -> int | None:
    """Return the size in bytes, None if it is not static or the input is not a tensor."""
    try:
        dims = [int(dim) for dim in value.get_size()]
    except (AttributeError, TypeError, NotImplementedError):
        return None
    return math.prod(dims) * int(value.get_dtype().itemsize)


def _origin(buffer: Any) -> Node | None:
    """Return the graph node that `buffer` was made for, a write before any other."""
    nodes = [node for node in buffer.get_origins() if isinstance(node, Node) and node.meta.get("stack_trace")]
    writes = [node for node in nodes if re.search(r"index_put|copy|clone|scatter|functionalized", str(node.target))]
    return next(iter(writes or nodes), None)
