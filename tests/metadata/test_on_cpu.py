"""Metadata as one op, as graphs on a CPU build it, against the definitions of its parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dsv4_compile.cpu import native
from dsv4_compile.metadata import BlockTables, build_metadata
from dsv4_compile.metadata.on_cpu import build_on_cpu
from dsv4_compile.metadata.types import metadata_of
from dsv4_compile.sources import groups_of
from dsv4_compile.testing import assert_bitwise


def tables(requests: int = 3) -> BlockTables:
    """Return tables of random pages; some do not exist."""
    columns = {
        "window": 5,
        "entries_4": 3,
        "states_4": 40,
        "keys_4": 3,
        "key_states_4": 41,
        "entries_128": 3,
        "states_128": 30,
    }
    return BlockTables.of({k: torch.randint(-1, 9, (requests, n), dtype=torch.int32) for k, n in columns.items()})


def arguments(tokens: int, ratios: tuple[int, ...]) -> dict[str, Any]:
    return {
        "positions": torch.randint(-1, 400, (tokens,)),
        "token_to_req": torch.randint(-1, 4, (tokens,)),
        "is_valid_token": torch.rand(tokens) < 0.8,
        "block_tables": tables(),
        "window": 32,
        "max_model_len": 300,
        "ratios": ratios,
    }


@pytest.fixture(params=["torch", "C++"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of the kernels that run the op."""
    monkeypatch.setattr(native, "_state", {} if request.param == "C++" else {"loaded": None})
    native.build()
    assert native.takes() == (request.param == "C++")
    return str(request.param)


@pytest.mark.parametrize("ratios", [(4, 128), (4,), (128,), ()])
@pytest.mark.parametrize("tokens", [0, 1, 4, 61])
def test_one_op_builds_what_its_parts_do(tokens: int, ratios: tuple[int, ...], kernels: str) -> None:
    call = arguments(tokens, ratios)
    want = build_metadata(**call)
    known = (call["token_to_req"] >= 0) & (call["token_to_req"] < 3)
    positions = torch.where(call["is_valid_token"] & known, call["positions"], -1)
    requests = torch.where(positions >= 0, call["token_to_req"], 0)
    groups = groups_of(ratios)
    held = [call["block_tables"].table(group) for group in groups]
    rows = build_on_cpu(positions, requests, groups, held, {"window": 32, "entries_128": 128})
    got = metadata_of(rows, call["block_tables"].of_ratios(ratios))
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize(("device", "calls"), [("cpu", 1), ("meta", 0)])
def test_a_graph_on_a_cpu_builds_metadata_with_one_call_and_others_by_its_parts(device: str, calls: int) -> None:
    targets: list[str] = []

    def look(gm: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(str(node.target) for node in gm.graph.nodes if node.op == "call_function")
        return gm

    call = pytree.tree_map_only(Tensor, lambda x: x.to(device), arguments(7, (4, 128)))
    got = torch.compile(build_metadata, backend=look, fullgraph=True)(**call)
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(build_metadata(**call)), strict=True):
        assert (a.device, a.dtype, a.shape) == (b.device, b.dtype, b.shape)
        if device == "cpu":
            assert_bitwise(a, b)
    assert len([target for target in targets if target.startswith("dsv4_metadata.build")]) == calls


def test_the_op_keeps_its_promises(kernels: str) -> None:
    block_tables = tables()
    call = (
        torch.tensor([3, -1, 127]),
        torch.tensor([0, 0, 2]),
        [block_tables.window, block_tables.sources[4].entries, block_tables.sources[128].entries],
    )
    groups = [1, 4, 128], [64, 64, 2], [0, 2], [16, 128], [4, 128]
    torch.library.opcheck(torch.ops.dsv4_metadata.build.default, (*call, *groups))
