"""Fuse preprocessing with the quantization of its latents, which every fp8_linear that reads them would repeat.

The preprocessing kernel holds whole rows of the latents where it normalizes them; wq_b and the indexer's wq_b then run
as GEMMs on e4m3 activations.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.fx import Graph, Node

from ..ops.common.define import OPS
from ..ops.preprocess.preprocess_insert import fake_quantized
from ..selection.decisions import record
from . import prequantized_gemm
from .fusion import Fuser, NotFusable
from .nodes import OpNode, calls_of, display_name, read, value_of
from .rewrite import erase, insert, item, replace_uses

FIRST, INTO = "preprocess_insert", "preprocess_insert_quant"
SECOND, GEMM = prequantized_gemm.LINEAR, prequantized_gemm.GEMM


def run(graph: Graph, fuser: Fuser) -> None:
    """Fuse every preprocess_insert with the quantization of its latents by fp8_linear."""
    for first in calls_of(graph, FIRST):
        users = [user for result in first.results(0) for user in result.users]
        seconds = [call for call in map(read, users) if call is not None and call.name == SECOND]
        if any(second["quantize_input"] for second in seconds):
            fuse = partial(_fuse, graph, fuser, first, seconds, users)
            record(fuser.attempt((FIRST, *(SECOND for _ in seconds)), INTO, first.node, fuse))


def _fuse(graph: Graph, fuser: Fuser, first: OpNode, seconds: list[OpNode], users: list[Node]) -> None:
    """Replace the calls by preprocessing that quantizes and GEMMs on its result, or raise `NotFusable`."""
    _check(first, seconds, users)
    arguments = dict(first.arguments)
    quantized = fake_quantized(value_of(first["qr"]))
    gemms = [(OPS[GEMM], prequantized_gemm.arguments(second, *quantized)) for second in seconds]
    fuser.check_wanted(OPS[INTO], arguments, [first, *seconds], first.node, gemms)
    owners = {cache.base: first.new_versions(name) for name, cache in first.caches().items()}
    with graph.inserting_before(first.node):
        fused = insert(graph, OPS[INTO], arguments, quantized, first.node)
        operands = item(graph, fused.node, 0), item(graph, fused.node, 1)
        for index, base in enumerate(dict.fromkeys(cache.base for cache in fused.caches().values())):
            if owners[base]:
                replace_uses(owners[base], item(graph, fused.node, len(quantized) + index))
    for second in seconds:
        prequantized_gemm.replace_linear(graph, second, *operands)
    erase(graph, first)


def _check(first: OpNode, seconds: list[OpNode], users: list[Node]) -> None:
    """Raise `NotFusable` if fusion would remove a value that has other users, or change a dtype."""
    nodes = [second.node for second in seconds]
    others = [user for user in users if user not in nodes]
    if others:
        raise NotFusable(f"the result of {FIRST} is also used by {display_name(others[0])}")
    for second in seconds:
        if not second["quantize_input"]:
            raise NotFusable(f"one {SECOND} does not quantize its input")
        prequantized_gemm.check_no_second_layer(second)
        if value_of(second.node).dtype is not torch.bfloat16:
            raise NotFusable(f"{GEMM} returns bfloat16, {SECOND} {value_of(second.node).dtype}")
