"""Nodes that are no dsv4 ops, with `dsv4.batch_invariant`: GEMMs, sums and all-reduces replaced, others checked.

Results of copies, comparisons and integers are exact. Arithmetic of single elements is rounded the same way wherever
an element lies, as long as code generation contracts nothing and keeps roundings between ops. A GEMM becomes
`dsv4_invariant::mm`; a sum over a row is a GEMM with a column of ones; an all-reduce gathers the parts of all ranks and
adds them in the order of the ranks. Any other node with a float result raises E303.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from .._compat import functional_collectives, resolve_group
from ..errors import fail
from ..lowering.linear import invariant_mm
from ..ops.common.invariance import TOKENS
from ..selection.decisions import Dependence
from .nodes import FUNCTIONALIZED, display_name, public_op, where

aten = torch.ops.aten
_cast = torch.ops.prims.convert_element_type.default
# fmt: off
_MOVES = frozenset((
    "_to_copy", "abs", "alias", "amax", "amin", "arange", "as_strided", "broadcast_tensors", "cat", "clamp",
    "clamp_max", "clamp_min", "clone", "constant_pad_nd", "contiguous", "copy", "copy_", "detach", "diagonal",
    "embedding", "empty", "empty_like", "empty_strided", "expand", "fill", "flip", "full", "full_like", "gather",
    "getitem", "index", "index_select", "lift_fresh_copy", "masked_fill", "max", "maximum", "min", "minimum",
    "narrow", "neg", "new_empty", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "permute", "relu",
    "repeat", "reshape", "roll", "scalar_tensor", "select", "select_scatter", "slice", "slice_scatter", "split",
    "split_with_sizes", "squeeze", "stack", "t", "transpose", "unbind", "unfold", "unsqueeze", "unsqueeze_copy",
    "view", "where", "zeros", "zeros_like", "_unsafe_view", "_unsafe_index", "convert_element_type", "iota",
    "all_gather_into_tensor", "wait_tensor", "broadcast",
))
# fmt: on
_ARITHMETIC = frozenset(["add", "div", "mul", "pow", "reciprocal", "rsqrt", "sqrt", "square", "sub", "true_divide"])
_SCATTERS = frozenset(("index_put", "index_put_", "scatter"))
"""Copies, unless they add."""
_HALVES = (torch.bfloat16, torch.float16)


def make_invariant(graph: Graph, level: str) -> None:
    """Replace GEMMs, sums and all-reduces of `graph`, and raise E303 for nodes that depend on other rows."""
    for node in list(graph.nodes):
        replace = _REPLACED.get(node.target) if node.op == "call_function" else None
        if replace is not None and _is_float(node):
            with graph.inserting_before(node), node.meta["val"].fake_mode:
                replace(graph, node, level)
    for node in graph.nodes:
        if node.op == "call_function" and _is_float(node):
            why = _why_dependent(node)
            if why:
                _refuse(node, why)


def dependent_nodes(graph: Graph) -> Iterator[Dependence]:
    """Yield the nodes that are no dsv4 ops and may give a row other bits in a call of another size."""
    for node in graph.nodes:
        if node.op == "call_function" and public_op(node) is None and not _is_ours(node) and _is_float(node):
            why = "a library or Inductor sums by sizes" if node.target in _REPLACED else _why_dependent(node)
            if why:
                fate = "replaced with dsv4.batch_invariant" if node.target in _REPLACED else "E303 with the option"
                yield Dependence(display_name(node), f"{why}; {fate}", where(node))


def _is_ours(node: Any) -> bool:
    """Return whether a node calls a twin of a dsv4 op, which `lowering.invariant.dependence` speaks for."""
    called = node.args[0] if node.target in FUNCTIONALIZED else node.target
    return str(getattr(called, "namespace", "")).startswith("dsv4_")


def _refuse(node: Any, why: str) -> None:
    location = f" at {where(node)}" if where(node) else ""
    fail(
        "E303",
        got=f"{display_name(node)}{location}",
        why=why,
        fix="convert the whole model with attention_only=False, leave the op out, or compile without "
        "dsv4.batch_invariant",
    )


def _is_float(node: Node) -> bool:
    values = node.meta.get("val")
    tensors = values if isinstance(values, (tuple, list)) else [values]
    return any(isinstance(x, torch.Tensor) and x.dtype.is_floating_point for x in tensors)


def _name(node: Node) -> str:
    """Return the name of the function that a node calls, without library and overload."""
    schema = getattr(node.target, "_schema", None)
    name = str(schema.name if schema is not None else getattr(node.target, "__name__", node.target))
    return name.rpartition("::")[2]


def _why_dependent(node: Any) -> str:
    """Return why results of a node may depend on other rows, "" if they do not."""
    target, name = node.target, _name(node)
    namespace = getattr(target, "namespace", "")
    called = node.args[0] if target in FUNCTIONALIZED else target
    if public_op(node) is not None or str(getattr(called, "namespace", "")).startswith("dsv4_invariant"):
        return ""
    if namespace == "dsv4_metadata" or name in _MOVES:
        return ""
    if name in _SCATTERS:
        adds = (*node.args[3:4], node.kwargs.get("accumulate", False), node.kwargs.get("reduce"))
        return "rows of equal index are added in any order" if any(adds) else ""
    if name in _ARITHMETIC:
        return _arithmetic(node, name)
    return "it sums or rounds in an order that the compiler chooses by sizes"


def _arithmetic(node: Any, name: str) -> str:
    exponent = node.args[1] if name == "pow" else 2
    if exponent not in (0.5, 1, 2):
        return f"a power of {exponent} is computed in another way at the end of a row"
    operands = [operand for operand in node.args if isinstance(operand, Node)]
    sources = [_source(operand) for operand in operands]
    value = node.meta["val"]
    if value.device.type != "cpu" and name in ("add", "sub") and any(_name(source) == "mul" for source in sources):
        return "a multiplication and an addition may become one rounding, in one graph and not in the next"
    if value.dtype in _HALVES and any(_name(s) in _ARITHMETIC and s.meta["val"].dtype in _HALVES for s in sources):
        return f"the rounding to {value.dtype} before it may be left out, in one graph and not in the next"
    return ""


def _source(node: Any) -> Node:
    """Return the node that computes what `node` moves."""
    while node.op == "call_function" and _name(node) in _MOVES and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _call(graph: Graph, function: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert a call and its fake value."""
    node = graph.call_function(function, args, kwargs)
    values, named = torch.fx.map_arg((args, kwargs), lambda operand: operand.meta["val"])
    node.meta["val"] = function(*values, **named)
    return node


def _replace(graph: Graph, node: Any, new: Node) -> None:
    for key in ("stack_trace", "from_node"):
        if key in node.meta:
            new.meta[key] = node.meta[key]
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _mm(graph: Graph, x: Any, weight: Any, level: str) -> Node:
    return _call(graph, invariant_mm.op(x.meta["val"].device), x, weight, level)


def _replace_mm(graph: Graph, node: Any, level: str) -> None:
    x, weight = node.args[:2]
    out_dtype = node.args[2] if len(node.args) > 2 else node.kwargs.get("out_dtype")
    if out_dtype is not None and out_dtype != x.meta["val"].dtype:
        x, weight = (_call(graph, _cast, a, out_dtype) for a in (x, weight))
    _replace(graph, node, _mm(graph, x, weight, level))


def _replace_addmm(graph: Graph, node: Any, level: str) -> None:
    bias, x, weight = node.args
    if node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1:
        _refuse(node, "alpha and beta other than 1 are not supported")
    _replace(graph, node, _call(graph, aten.add.Tensor, _mm(graph, x, weight, level), bias))


def _replace_bmm(graph: Graph, node: Any, level: str) -> None:
    x, weight = node.args[:2]
    if len(node.args) > 2 or node.kwargs:
        _refuse(node, "its result has another dtype than its operands")
    count, matrix = x.meta["val"].shape[0], _expanded_matrix(weight)
    if matrix is not None:  # a linear layer of rows that do not lie next to each other
        sizes = [_size(graph, x, 0), _size(graph, x, 1), _size(graph, matrix, 1)]
        rows = _call(graph, aten.reshape.default, x, [-1, _size(graph, x, 2)])
        product = _mm(graph, rows, matrix, level)
        _replace(graph, node, _call(graph, aten.reshape.default, product, sizes))
        return
    if not isinstance(count, int):
        _refuse(node, "a GEMM for each token has a size of its own")
    parts = [
        _mm(graph, _call(graph, aten.select.int, x, 0, i), _call(graph, aten.select.int, weight, 0, i), level)
        for i in range(count)
    ]
    lifted = [_call(graph, aten.unsqueeze.default, product, 0) for product in parts]
    _replace(graph, node, _call(graph, aten.cat.default, lifted, 0))


def _expanded_matrix(node: Any) -> Any:
    """Return the matrix `[K, N]` that a batch of matrices repeats, None if it has different ones."""
    shape = node.meta["val"].shape
    while _name(node) in ("view", "reshape", "_unsafe_view") and node.args[0].meta["val"].shape == shape:
        node = node.args[0]
    source = node.args[0] if _name(node) == "expand" else None
    return source if source is not None and source.meta["val"].dim() == 2 else None


def _size(graph: Graph, x: Any, dim: int) -> Any:
    known = x.meta["val"].shape[dim]
    return known if isinstance(known, int) else _call(graph, aten.sym_size.int, x, dim)


def _replace_sum(graph: Graph, node: Any, level: str) -> None:
    """Replace a sum or a mean by a GEMM with a column of ones."""
    x, dims = node.args[0], list(node.args[1] or ()) if len(node.args) > 1 else []
    keep = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    value = x.meta["val"]
    dims = sorted(dim % value.dim() for dim in dims) or list(range(value.dim()))
    rest = [dim for dim in range(value.dim()) if dim not in dims]
    if not rest:
        _refuse(node, "it sums over all elements")

    length = _size(graph, x, dims[0])
    for dim in dims[1:]:
        more = _size(graph, x, dim)
        both = isinstance(length, int) and isinstance(more, int)
        length = length * more if both else _call(graph, operator.mul, length, more)
    wide = _call(graph, _cast, x, torch.float32)
    flat = _call(graph, aten.reshape.default, _call(graph, aten.permute.default, wide, [*rest, *dims]), [-1, length])
    ones = _call(graph, aten.full.default, [length, 1], 1.0, dtype=torch.float32, device=value.device)
    # At any level: the product has several rows for each token, and "step" counts rows.
    total = _mm(graph, flat, ones, TOKENS)
    if node.target is aten.mean.dim:
        total = _call(graph, aten.div.Tensor, total, length)
    shape = [1 if dim in dims else _size(graph, x, dim) for dim in range(value.dim()) if keep or dim not in dims]
    shaped = _call(graph, aten.reshape.default, total, shape)
    _replace(graph, node, _call(graph, _cast, shaped, node.meta["val"].dtype))


def _replace_all_reduce(graph: Graph, node: Any, level: str) -> None:
    """Gather the parts of all ranks, and add them in the order of the ranks, in float32."""
    x, operation, group = node.args
    if operation != "sum":
        return
    collectives = functional_collectives
    size, value = resolve_group(group).size(), x.meta["val"]
    flat = _call(graph, aten.unsqueeze.default, x, 0)
    gathered = _call(graph, collectives.all_gather_into_tensor.default, flat, size, group)
    parts = _call(graph, collectives.wait_tensor.default, gathered)
    total = _call(graph, _cast, _call(graph, aten.select.int, parts, 0, 0), torch.float32)
    for rank in range(1, size):
        summand = _call(graph, _cast, _call(graph, aten.select.int, parts, 0, rank), torch.float32)
        total = _call(graph, aten.add.Tensor, total, summand)
    for waited in [user for user in node.users if user.target is collectives.wait_tensor.default]:
        waited.replace_all_uses_with(node)
        graph.erase_node(waited)
    _replace(graph, node, _call(graph, _cast, total, value.dtype))


_REPLACED: dict[Any, Callable[[Graph, Any, str], None]] = {
    aten.mm.default: _replace_mm,
    aten.mm.dtype: _replace_mm,
    aten.addmm.default: _replace_addmm,
    aten.bmm.default: _replace_bmm,
    aten.sum.dim_IntList: _replace_sum,
    aten.mean.dim: _replace_sum,
    functional_collectives.all_reduce.default: _replace_all_reduce,
}
