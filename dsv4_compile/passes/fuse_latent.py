"""Preprocessing quantises its latents for wq_b, and the indexer's: it has their rows where it norms them.

A product of quantised operands has no quantisation in front, or none within.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.fx import Graph, Node

from ..ops.common.define import OPS
from ..ops.preprocess import preprocess_insert as preprocess_insert_quant
from ..selection.decisions import record
from . import quantised_product
from .merging import Apart, Merger
from .nodes import OpNode, called, read, value_of, walk
from .rewrite import erase, insert, item, replace

FIRST, INTO = "preprocess_insert", "preprocess_insert_quant"
SECOND, PRODUCT = quantised_product.LINEAR, quantised_product.PRODUCT


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
    then = [(OPS[PRODUCT], quantised_product.arguments(second, *quantised)) for second in seconds]
    merger.check_wanted(OPS[INTO], given, [first, *seconds], first.node, then)
    owners = {cache.base: first.versions(name) for name, cache in first.caches().items()}
    with graph.inserting_before(first.node):
        merged = insert(graph, OPS[INTO], given, quantised, first.node)
        operands = item(graph, merged.node, 0), item(graph, merged.node, 1)
        for index, base in enumerate(dict.fromkeys(cache.base for cache in merged.caches().values())):
            if owners[base]:
                replace(owners[base], item(graph, merged.node, len(quantised) + index))
    for second in seconds:
        quantised_product.put(graph, second, *operands)
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
        quantised_product.check_alone(second)
        if value_of(second.node).dtype is not torch.bfloat16:
            raise Apart(f"{PRODUCT} gives bfloat16, {SECOND} {value_of(second.node).dtype}")
