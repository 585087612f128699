"""Temporary Inductor patches: a C++ name for UE8M0, short texts of ops, no headers for loaded graphs, copies kept."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .identities import keeping_copies


@contextmanager
def lent_to_inductor() -> Iterator[None]:
    """Let Inductor name UE8M0 scales in C++, and write the arguments of an op in short; hold `compile_lock`.

    torch lacks the name up to 2.13. Inductor writes arguments into errors, and torch up to 2.11 for each op of other
    libraries. The text of nested IR that is not realized yet doubles with each step and can take hours. For graphs from
    its cache torch precompiles the headers of C++ that is compiled already, ten seconds on a new machine. `identities`
    has the copies that Inductor would drop.
    """
    from .._compat import DTYPE_TO_CPP, OperatorIssue, codecache, joint_graph, output_code

    missing = torch.float8_e8m0fnu not in DTYPE_TO_CPP
    if missing:
        DTYPE_TO_CPP[torch.float8_e8m0fnu] = "at::Float8_e8m0fnu"
    written = OperatorIssue.__dict__["operator_str"]
    OperatorIssue.operator_str = staticmethod(operator_text)
    graph, precompile = output_code.CompiledFxGraph, codecache._precompile_header
    load = graph.after_deserialization

    def load_without_headers(self: Any, constants: Any) -> Any:
        codecache._precompile_header = lambda *_, **__: None  # C++ that is missing is compiled without
        try:
            return load(self, constants)
        finally:
            codecache._precompile_header = precompile

    graph.after_deserialization = load_without_headers
    remove_no_ops = joint_graph.remove_no_ops
    joint_graph.remove_no_ops = keeping_copies(remove_no_ops)
    try:
        yield
    finally:
        joint_graph.remove_no_ops = remove_no_ops
        graph.after_deserialization = load
        OperatorIssue.operator_str = written
        if missing:
            del DTYPE_TO_CPP[torch.float8_e8m0fnu]


def operator_text(target: Any, args: Any, kwargs: Any) -> str:
    """Return a line for an op, and one for each of its arguments: IR by its class, dtype and size."""
    named = [*((f"args[{i}]", arg) for i, arg in enumerate(args)), *(kwargs or {}).items()]
    return "\n".join([f"  target: {target}", *(f"  {name}: {_text(arg)}" for name, arg in named)])


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if not hasattr(value, "get_size"):
        return reprlib.repr(value)
    try:
        return f"{type(value).__name__} {value.get_dtype()} {list(value.get_size())}"
    except (AttributeError, NotImplementedError):  # IR of an op with several results
        return type(value).__name__
