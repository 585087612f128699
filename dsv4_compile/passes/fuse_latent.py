"""Preprocessing quantises its latents for wq_b, and the indexer's: it has their rows where it norms them.

A product of quantised operands has no quantisation in front, or none within.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.fx import Graph, Node

from ..decisions import record
from ..ops import preprocess_insert_quant
from ..ops._define import OPS
from .merging import Apart, Merger
from .nodes import OpNode, called, read, value_of, walk
from .rewrite import erase, insert, item, replace

FIRST, SECOND, INTO, PRODUCT = "preprocess_insert", "fp8_linear", "preprocess_insert_quant", "fp8_grouped_einsum"


def run(graph: Graph, merger: Merger) -> None:
    """Let every preprocess_insert whose latents are quantised by fp8_linear quantise them itself."""
    for first in walk(graph, FIRST):
        users = [user for result in first.results(0) for user in result.users]
        seconds = [call for call in map(read, users) if call is not None and call.name == SECOND]
        if any(second["quantize_input"] for second in seconds):
            merge = partial(_merge, graph, merger, first, seconds, users)
            record(merger.attempt((FIRST, *(SECOND for _ in seconds)), INTO, first.node, merge))


def _merge(graph: Graph, merger: Merger, first: OpNode, seconds: list[OpNode], users: list[Node]) -> None:
    """Put what quantises, and products of what is quantised, in the place of all, or raise `Apart`."""
    _check(first, seconds, users)
    given = dict(first.arguments)
    quantised = preprocess_insert_quant.fake(value_of(first["qr"]))
    weights = [{"b": second["weight"], "b_scale": second["weight_scale"]} for second in seconds]
    then = [(OPS[PRODUCT], {"a": quantised[0], "a_scale": quantised[1], **weight}) for weight in weights]
    merger.check_wanted(OPS[INTO], given, [first, *seconds], first.node, then)
    owners = {cache.base: first.versions(name) for name, cache in first.caches().items()}
    with graph.inserting_before(first.node):
        merged = insert(graph, OPS[INTO], given, quantised, first.node)
        operands = {"a": item(graph, merged.node, 0), "a_scale": item(graph, merged.node, 1)}
        for index, base in enumerate(dict.fromkeys(cache.base for cache in merged.caches().values())):
            if owners[base]:
                replace(owners[base], item(graph, merged.node, len(quantised) + index))
    for second, weight in zip(seconds, weights, strict=True):
        result = second.node.meta["val"]
        with graph.inserting_before(second.node):
            product = insert(graph, OPS[PRODUCT], {**operands, **weight}, result.unsqueeze(1), second.node)
            flat = graph.call_function(torch.ops.aten.squeeze.dim, (product.node, 1))
        flat.meta["val"] = result
        second.node.replace_all_uses_with(flat)
        graph.erase_node(second.node)
    erase(graph, first)


def _check(first: OpNode, seconds: list[OpNode], users: list[Node]) -> None:
    """Raise `Apart` where somebody would be left without a value, or with one of another dtype."""
    nodes = [second.node for second in seconds]
    others = [user for user in users if user not in nodes]
    if others:
        raise Apart(f"the result of {FIRST} is used elsewhere too, by {called(others[0])}")
    for second in seconds:
        if not second["quantize_input"]:
            raise Apart(f"one {SECOND} takes it as it is")
        if second["beside"] is not None:
            raise Apart(f"{SECOND} has another layer beside it, whose input is not quantised")
        if value_of(second.node).dtype is not torch.bfloat16:
            raise Apart(f"{PRODUCT} gives bfloat16, {SECOND} {value_of(second.node).dtype}")
