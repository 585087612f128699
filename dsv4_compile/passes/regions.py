"""Split a traced graph at its repeated layers, so that layers of one kind are compiled once.

A region holds the nodes of one layer, told by the module they were traced in; the first one what comes before the
layers, the last one also what comes after. A kind is all regions that do the same to inputs of the same shapes,
strides and dtypes; weights and caches are inputs of a region like any others.

Inputs that the graph writes are written inside the region that computes their last version, and later regions read
them from there. A graph is not split if that would change the values read.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .._compat import pytree, storage_identity
from .nodes import VIEWS, display_name

ALIGNMENT = 16
"""Bytes that Inductor may assume an input to be aligned to, by the offset of its example."""
_INDEX = re.compile(r"(?:\.|\[')(\d+)(?=\.|'\]|$)")
_OF_THE_LAYER_BEFORE = ("mhc_pre", "mhc_head")
"""Ops that are fused with the end of the layer before, see `fuse_streams`."""


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a graph, as a separate graph.

    Attributes:
        graph: takes `inputs` and returns the values of `outputs`.
        inputs, outputs: nodes of the whole graph.
        key: equal for regions of one kind.
    """

    graph: Graph
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    key: str


class NotSplit(Exception):
    """Says why a graph cannot be compiled in regions."""


def split(gm: GraphModule, static: frozenset[int] = frozenset()) -> list[Region]:
    """Return the regions of `gm` in the order of execution.

    Args:
        gm: functional graph of AOTAutograd, with fake values in `meta["val"]`.
        static: positions of the inputs with an address that never changes.

    Raises NotSplit for a graph without repeated modules, or one with writes that do not belong to one layer each.
    """
    layers = _layers(gm.graph)
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    region_of = _assign(gm.graph, layers)
    written = _written(gm.graph, region_of)
    static_inputs = {node for i, node in enumerate(placeholders) if i in static}
    last = max(region_of.values())
    members: list[list[Node]] = [[] for _ in range(last + 1)]
    for node, region in region_of.items():
        members[region].append(node)
    returned = set(gm.graph.output_node().all_input_nodes)
    return [_region(nodes, region_of, written, returned, static_inputs) for nodes in members if nodes]


def kinds(regions: Sequence[Region]) -> Counter[str]:
    """Return how many regions there are of each kind."""
    return Counter(region.key for region in regions)


def _layers(graph: Graph) -> Mapping[Node, int]:
    """Return the index of the layer of each node that was traced in one, for the list of modules with most nodes."""
    paths = {node: _containers(node) for node in graph.nodes}
    sizes = Counter(container for containers in paths.values() for container in containers)
    indices: dict[str, set[int]] = {}
    for containers in paths.values():
        for container, index in containers.items():
            indices.setdefault(container, set()).add(index)
    repeated = [container for container in sizes if len(indices[container]) > 1]
    if not repeated:
        raise NotSplit("no list of modules was traced")
    outer = max(repeated, key=lambda container: sizes[container])
    return {node: containers[outer] for node, containers in paths.items() if outer in containers}


def _containers(node: Node) -> dict[str, int]:
    """Return the lists of modules that `node` was traced in, by path, with the index of its module in each."""
    indices: dict[str, int] = {}
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        for match in _INDEX.finditer(path):
            indices[path[: match.start()]] = int(match.group(1))
    return indices


def _assign(graph: Graph, layers: Mapping[Node, int]) -> dict[Node, int]:
    """Return the region of each node that computes or writes, 0 for nodes before the first layer."""
    order = {index: position + 1 for position, index in enumerate(sorted(set(layers.values())))}
    region_of: dict[Node, int] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        after = max(
            (region_of[input_node] for input_node in node.all_input_nodes if input_node in region_of), default=0
        )
        region = order[layers[node]] if node in layers else after
        view = node.target in VIEWS and all(input_node in region_of for input_node in node.all_input_nodes)
        # A tuple cannot leave a region, and a view that a layer starts with may lead to the op.
        if node.target is operator.getitem or view or display_name(node) in _OF_THE_LAYER_BEFORE:
            region = after
        if region < after:
            raise NotSplit(f"{node.name} of layer {region - 1} depends on layer {after - 1}")
        region_of[node] = region
    return region_of


def _written(graph: Graph, region_of: Mapping[Node, int]) -> dict[Node, Node]:
    """Return the placeholder that each last version of an input is copied into.

    Raises NotSplit if a region other than the one that writes an input reads it, by itself or as a view.
    """
    written: dict[Node, Node] = {}
    storages: dict[int, Any] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target is not torch.ops.aten.copy_.default:
            continue
        target: Any = node.args[0]
        value: Any = node.args[1]
        if target.op != "placeholder":
            raise NotSplit(f"{node.name} writes into {target.name}, which is not an input")
        if value in region_of:
            written[value] = target
        storages[storage_identity(target.meta["val"])] = node
    for node in (*region_of, *graph.find_nodes(op="placeholder")):
        value = node.meta.get("val")
        write = storages.get(storage_identity(value)) if isinstance(value, torch.Tensor) else None
        if write is None or node is write:
            continue
        others = [user for user in node.users if user in region_of and region_of[user] != region_of[write]]
        if others or any(user.op == "output" for user in node.users):
            raise NotSplit(f"{write.args[0].name}, which {write.name} writes, is read elsewhere as {node.name}")
    return written


def _region(
    nodes: Sequence[Node],
    region_of: Mapping[Node, int],
    written: Mapping[Node, Node],
    returned: set[Node],
    static: set[Node],
) -> Region:
    """Return the region of `nodes`."""
    region = region_of[nodes[0]]
    sizes = _sizes_first(nodes, region, region_of)
    graph, copies, inputs = Graph(), dict[Node, Node](), list[Node]()

    def outside(node: Node) -> Node:
        """Return the copy of a value from a different region: a written input's own memory has its last version."""
        source = written.get(node, node)
        if source not in copies:
            inputs.append(source)
            copies[source] = graph.placeholder(f"in_{len(inputs)}")
            copies[source].meta = dict(source.meta)
        return copies[source]

    def copied(node: Node) -> Node:
        inside = region_of.get(node) == region or node in sizes
        return copies[node] if inside and node in copies else outside(node)

    # Integer inputs of the whole graph give Inductor the sizes of all others.
    for node in nodes[0].graph.find_nodes(op="placeholder"):
        if _is_size(node):
            outside(node)
    # Placeholders come before all other nodes of a graph.
    for node in (*sizes, *nodes):
        for source in node.all_input_nodes:
            if region_of.get(source) != region and source not in sizes:
                outside(source)
    for node in (*sizes, *nodes):
        copies[node] = graph.node_copy(node, copied)
    outputs = [node for node in nodes if _crosses(node, region, region_of, returned, written)]
    result = graph.output(tuple(copies[node] for node in outputs))
    result.meta["user_visible_output_idxs"] = list(range(len(outputs)))
    return Region(graph, tuple(inputs), tuple(outputs), _key(graph, [node in static for node in inputs]))


def _sizes_first(nodes: Sequence[Node], own: int, region_of: Mapping[Node, int]) -> list[Node]:
    """Return the integer arithmetic of other regions that `nodes` need, in order: it is done again in each region."""
    needed: set[Node] = set()
    pending = [source for node in nodes for source in node.all_input_nodes]
    while pending:
        node = pending.pop()
        if region_of.get(node, own) != own and node not in needed and _is_size(node):
            needed.add(node)
            pending += node.all_input_nodes
    return [node for node in region_of if node in needed]


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, int))


def _crosses(
    node: Node, own: int, region_of: Mapping[Node, int], returned: set[Node], written: Mapping[Node, Node]
) -> bool:
    """Return whether a value of region `own` is needed outside, other than as an input that it writes."""
    if node in returned:
        return True
    later = any(region_of.get(user, own) != own for user in node.users)
    return later and node not in written and not _is_size(node)


def _key(graph: Graph, static: Sequence[bool]) -> str:
    """Return a text that is equal for graphs that compile to the same code."""
    numbers = {node: i for i, node in enumerate(graph.nodes)}
    lines = [str(list(static))]
    for node in graph.nodes:
        arguments = pytree.tree_map(lambda leaf: f"%{numbers[leaf]}" if isinstance(leaf, Node) else leaf, _call(node))
        values = [_described(value) for value in pytree.tree_leaves(node.meta.get("val"))]
        # A constant that the graph holds may differ in its value, which no text tells.
        target = f"{node.target} of {id(graph)}" if node.op == "get_attr" else str(node.target)
        lines.append(f"{node.op} {'' if node.op == 'placeholder' else target} {arguments} {values}")
    return "\n".join(lines)


def _call(node: Node) -> Any:
    """Return arguments with nodes as leaves."""
    return [list(node.args), dict(node.kwargs)] if node.op != "placeholder" else []


def _described(value: Any) -> str:
    """Return what generated code may depend on of a fake value."""
    if not isinstance(value, torch.Tensor):
        return str(value)
    offset = value.storage_offset()
    aligned = isinstance(offset, int) and offset * value.element_size() % ALIGNMENT == 0
    return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device} {aligned} {value.requires_grad}"
