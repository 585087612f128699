"""Lower an op by tracing its reference, as stock torch.compile would.

Inductor's C++ vectorises slices and concatenations, but no element that picks its partner by its own index, as the
rotation of our IR does. `dsv4 bench preprocess --only tokens=32 --only heads=64` on one thread of an x86-64 CPU, torch
2.13, in us: q_norm_rope 779 by our IR and 308 by this, inv_rope 1168 and 238, inv_rope_fp8_quant 6924 and 840. On
Triton ours is one kernel where this would be several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._compat import V, ir, make_fx, select_decomp_table
from .ir.common import HALVES, result, rounded

_CAST = torch.ops.prims.convert_element_type.default


def lower_from_reference(reference: Callable[..., Any], *args: Any) -> Any:
    """IR of `reference(*args)`, which must not mutate its arguments; these are IR tensors, or constants."""
    tensors = [arg for arg in args if isinstance(arg, ir.TensorBox)]

    def traced(*values: torch.Tensor) -> Any:
        rest = iter(values)
        return reference(*(next(rest) if isinstance(arg, ir.TensorBox) else arg for arg in args))

    with V.fake_mode, torch.no_grad():
        fakes = [ir.ir_node_to_tensor(tensor) for tensor in tensors]
        graph = make_fx(torch.func.functionalize(traced, remove="mutations"), select_decomp_table())(*fakes)
    graph.graph.eliminate_dead_code()
    return _lower_nodes(graph, [rounded(tensor) for tensor in tensors])


def _lower_nodes(graph: torch.fx.GraphModule, tensors: list[Any]) -> Any:
    env, waiting = V.graph.env, iter(tensors)
    output = graph.graph.output_node()
    results = output.args[0]
    # Inductor takes a node that an output reads for an output of the step, and asks whether it is dense: where a
    # stride is rounded up, that is a guard on the number of tokens.
    graph.graph.erase_node(output)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(waiting)
        elif node.op == "get_attr":
            # A scalar that the reference makes a tensor of.
            value = getattr(graph, node.target)
            env[node] = ir.Constant(value=value.item(), dtype=value.dtype, device=value.device)
        elif node.target is _CAST and node.args[1] in HALVES and env[node.args[0]].get_dtype() is torch.float32:
            wide = env[node.args[0]]
            env[node] = result(wide.make_loader(), node.args[1], wide.get_device(), wide.get_size())
        else:
            outer, V.graph.current_node = V.graph.current_node, node
            try:
                env[node] = V.graph.run_node(node)
            finally:
                V.graph.current_node = outer

    def exact(node: torch.fx.Node) -> Any:
        return ir.ExternKernel.require_exact_strides(env[node], node.meta["val"].stride())

    return torch.fx.map_arg(results, exact)
