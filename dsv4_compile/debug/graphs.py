"""What a captured graph holds: calls, inputs with their dynamic dims, dsv4 ops and how caches enter them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .breaks import innermost, with_source
from .rows import CacheHazard, Graph, GraphInput, OpDecision, Place

_MODULE_STATE = re.compile(r"_parameters_|_buffers_")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)')
_VIEWS = frozenset(
    {
        "view",
        "reshape",
        "flatten",
        "unflatten",
        "squeeze",
        "unsqueeze",
        "narrow",
        "select",
        "as_strided",
        "t",
        "getitem",
    }
)
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


def describe(gm: GraphModule, index: int, compile_id: str) -> Graph:
    """`gm` as a row of the report. Parameters and buffers of modules are counted, other inputs listed."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    arguments = [node for node in placeholders if not _MODULE_STATE.search(str(node.target))]
    return Graph(
        index=index,
        compile_id=compile_id,
        place=next((place_of(node) for node in gm.graph.nodes if node.meta.get("stack_trace")), Place()),
        ops=dict(Counter(_name(node, gm) for node in gm.graph.nodes if node.op.startswith("call_")).most_common()),
        inputs=[_input(node) for node in arguments],
        parameters=len(placeholders) - len(arguments),
    )


def dsv4_calls(gm: GraphModule, reason: str) -> list[OpDecision]:
    """The dsv4 ops of `gm`, one row a call, undecided for `reason`."""
    return [
        OpDecision(op._schema.name.removeprefix("dsv4::"), "undecided", reason, where=[str(place_of(node))])
        for node, op in _op_calls(gm)
        if op.namespace == "dsv4"
    ]


def hazards(gm: GraphModule, index: int) -> list[CacheHazard]:
    """Cache arguments of ops, other than torch's own, that reach the graph with a dynamic dim."""
    found: dict[tuple[str, str], CacheHazard] = {}
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
                found.setdefault((entry.name, name), CacheHazard(index, entry.name, entry.shape, name, place_of(node)))
    return list(found.values())


def input_names(gm: GraphModule) -> list[str]:
    """Names of all inputs in order, as the report spells them."""
    return [_readable(str(node.target)) for node in gm.graph.nodes if node.op == "placeholder"]


def place_of(node: Node) -> Place:
    """The line of the user's code that `node` comes from."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return with_source(innermost([Place(file, int(line), function) for file, line, function in frames]))


def short_dtype(dtype: torch.dtype) -> str:
    """`bf16` for torch.bfloat16; other types by torch's name."""
    return _SHORT_DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def _op_calls(gm: GraphModule) -> Iterator[tuple[Node, Any]]:
    """Calls of registered ops: the node and the overload, for code that called an overload packet too."""
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        op = getattr(node.target, "default", node.target)
        if hasattr(op, "_schema") and hasattr(op, "namespace"):
            yield node, op


def _arguments(node: Node, op: Any) -> Iterator[tuple[Any, Any]]:
    """Declared argument and the value that `node` passes for it."""
    for position, declared in enumerate(op._schema.arguments):
        if position < len(node.args):
            yield declared, node.args[position]
        elif declared.name in node.kwargs:
            yield declared, node.kwargs[declared.name]


def _graph_input(value: Any) -> Node | None:
    """The input that `value` is, or is a view of."""
    for _ in range(_VIEWS_FOLLOWED):
        if not isinstance(value, Node):
            return None
        if value.op == "placeholder":
            return value
        name = value.target if isinstance(value.target, str) else getattr(value.target, "__name__", "")
        if name not in _VIEWS or not value.args:
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
    """A number as it is; a symbol with the value it stood for when the graph was captured."""
    hint = getattr(getattr(size, "node", None), "hint", None)
    return f"{size}={hint}" if _is_symbol(size) and hint is not None else str(size)


def _is_symbol(size: Any) -> bool:
    """Whether a size is not a fixed number. torch leaves some fixed ones as symbols that have got a value."""
    return isinstance(size, torch.SymInt) and not str(size).isdigit()


def _readable(target: str) -> str:
    """`L_self_modules_q_parameters_weight_` as `self.q.weight`, `L_x_` as `x`."""
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
