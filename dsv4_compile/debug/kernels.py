"""What Inductor generated: kernels and their launches, and temporaries that copy a whole cache.

Kernels are counted in the generated source, which says what runs. Copies are found in Inductor's own buffers, whose
sizes are exact, and only those that the source really allocates count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from torch.fx import Node

from .graphs import place_of, short_dtype
from .rows import CacheCopy, Kernel, MissedReinplace, Place

SMALLEST_CACHE = 16 * 1024
"""Bytes from which on a mutated input counts as a cache."""

_COPYING = {"load", "to_dtype_bitcast"}
"""Operations of a buffer that changes nothing."""

_KINDS = {"cpp_pybinding": "cpp"}
_DEFINITION = re.compile(r"^(\w+) = async_compile\.(\w+)\(", re.MULTILINE)
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
_EXTERN = re.compile(r"\b(extern_kernels\.\w+|(?:torch\.ops|aten|prims|inductor_ops)\.[\w.]+)\(")
_NOT_KERNELS = re.compile(r"\.(?:_?reinterpret_tensor|_alloc_from_pool|accumulate_grad_)\b")


def read_kernels(code: str, graph: int) -> list[Kernel]:
    """Kernels of one graph's generated code and how often each is launched."""
    _, _, body = _COMMENT.sub("", code).partition("def call(")
    body = body.partition("def benchmark_compiled_module")[0].partition("def get_args")[0]
    found = []
    for name, kind in _DEFINITION.findall(code):
        calls = len(re.findall(rf"\b{name}(?:\.run)?\(", body))
        found.append(Kernel(graph, _KINDS.get(kind, kind), name, calls))
    externs = [name for name in _EXTERN.findall(body) if not _NOT_KERNELS.search(name)]
    for name in dict.fromkeys(externs):
        found.append(Kernel(graph, "extern", name.removeprefix("torch.ops."), externs.count(name)))
    return found


def read_copies(lowered: Any, code: str, graph: int, names: list[str]) -> list[CacheCopy]:
    """Temporaries of `lowered` (Inductor's graph) as large as a mutated input and of its type.

    `names` are the inputs as Dynamo knows them; they serve where Inductor has the same number of inputs.
    """
    inputs = list(lowered.graph_inputs)
    readable = dict(zip(inputs, names, strict=True)) if len(inputs) == len(names) else {}
    found = []
    for name in lowered.mutated_inputs:
        cache = lowered.graph_inputs[name]
        size = _bytes(cache)
        if size is None or size < SMALLEST_CACHE:
            continue
        for buffer in _allocated(lowered.buffers, code):
            if _bytes(buffer) != size or not _only_copies(buffer, name, lowered.buffers):
                continue
            origin = _origin(buffer)
            found.append(
                CacheCopy(
                    graph=graph,
                    argument=readable.get(name, name),
                    shape=[str(dim) for dim in cache.get_size()],
                    dtype=short_dtype(cache.get_dtype()),
                    bytes=size,
                    place=place_of(origin) if origin else Place(),
                    origin=str(origin.target) if origin else "",
                )
            )
    return found


def read_missed(graph: int) -> MissedReinplace | None:
    """Mutations of the graph just compiled that Inductor did not make in place."""
    from .._compat import ReinplaceCounters

    tensors = ReinplaceCounters.get_total_missed()
    return MissedReinplace(graph, tensors, ReinplaceCounters.get_total_missed_bytes()) if tensors else None


def _allocated(buffers: Iterable[Any], code: str) -> list[Any]:
    """Buffers with memory of their own. One that only names a mutation, or was fused away, has none."""
    return [buffer for buffer in buffers if re.search(rf"^\s*{buffer.get_name()} = ", code, re.MULTILINE)]


def _only_copies(buffer: Any, source: str, buffers: Iterable[Any]) -> bool:
    """Whether `buffer` holds what the input `source` holds, read as it is or through an alias no kernel computes."""
    count = getattr(getattr(buffer, "data", None), "inner_fn_opcount", None)
    if count is None:
        return False
    operations = count()
    aliases = {b.get_name() for b in buffers if not hasattr(getattr(b, "data", None), "inner_fn_opcount")}
    return operations.used_ops <= _COPYING and bool(set(operations.read_buffers) & {source, *aliases})


def _bytes(value: Any) -> int | None:
    """Size in bytes, None when it is not static or the input is not a tensor."""
    try:
        dims = [int(dim) for dim in value.get_size()]
    except (AttributeError, TypeError, NotImplementedError):
        return None
    return math.prod(dims) * int(value.get_dtype().itemsize)


def _origin(buffer: Any) -> Node | None:
    """The graph node that `buffer` was made for: the one named last, index arithmetic comes before it."""
    nodes = [node for node in buffer.get_origins() if isinstance(node, Node) and node.meta.get("stack_trace")]
    writes = [node for node in nodes if re.search(r"index_put|copy|clone|scatter|functionalized", str(node.target))]
    return next(iter(writes or nodes), None)
