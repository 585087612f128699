"""Calls of Python functions that generated code for a CPU makes itself, without torch's dispatcher.

For a small model the dispatcher, autograd and the checks of an op take as long as the op. A graph needs none of them:
it has no gradients, its inputs were checked when it was traced, and guards keep what was checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .._compat import OpOverload, V, fallback_handler, ir, make_fallback, pytree, register_lowering


@dataclass(frozen=True, slots=True)
class Function:
    """A function that generated code imports: a module's variable, and an expression that uses it as `{}`."""

    module: str
    variable: str
    expression: str = "{}"


_functions: dict[OpOverload, Function] = {}


class CallOnCpu(ir.FallbackKernel):  # type: ignore[misc, name-defined]
    """A call of an op, which Python code replaces by a call of the op's function."""

    def codegen(self, wrapper: Any) -> None:
        """Write the call, after the import that it needs."""
        if not (V.graph.cpp_wrapper or V.graph.fx_wrapper):
            function = _functions[self.op_overload]
            name = f"dsv4_{function.variable}"
            wrapper.add_import_once(f"from {function.module} import {function.variable} as {name}")
            self.python_kernel_name = function.expression.format(name)
        super().codegen(wrapper)


def call_on_cpu(op: OpOverload, function: Function) -> None:
    """Lower `op` to a call of itself, or with tensors on a CPU of `function`, which takes the same arguments."""
    _functions[op] = function
    make_fallback(op)
    elsewhere = fallback_handler(op)

    def lower(*args: Any, **kwargs: Any) -> Any:
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, ir.IRNode))
        if first.get_device().type != "cpu":
            return elsewhere(*args, **kwargs)
        results = CallOnCpu.create(op, *args, **kwargs)
        # torch 2.11 has no wrap_for_lowering.
        return pytree.tree_map(lambda node: ir.TensorBox.create(node) if isinstance(node, ir.IRNode) else node, results)

    register_lowering(op, type_promotion_kind=None)(lower)
