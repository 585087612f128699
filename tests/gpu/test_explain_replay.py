"""`explain_replay` of CUDA graphs: nodes, lines, launches, edges and times as the driver and the profiler tell them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dsv4_compile
from dsv4_compile.debug import ReplayReport
from dsv4_compile.selection import proven
from tests.gpu.soak import SETUPS
from tests.runtime.engine import REQUESTS, make_runner, make_world

CUDA = torch.device("cuda")


class Branches(nn.Module):
    """Two GEMMs on two streams, joined by an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Linear(1024, 1024, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
        self.side = torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            right = self.right(x)
        left = self.left(x)
        torch.cuda.current_stream().wait_stream(self.side)
        return left + right


@pytest.fixture(scope="module", params=["flash bfloat16", "flash fp8"])
def step(request: pytest.FixtureRequest) -> ReplayReport:
    """The report of a step of three attention layers, compiled one by one."""
    with proven.trust():
        world = make_world(setup=SETUPS[request.param])
        compiled = torch.compile(world.stack, fullgraph=True, dynamic=True, backend="dsv4")
        runner = make_runner(world, step=compiled)
        world.load([1] * REQUESTS, [300] * REQUESTS)
        return dsv4_compile.explain_replay(runner, REQUESTS)


def test_every_node_has_an_op_a_line_and_a_time(step: ReplayReport) -> None:
    assert step.graphs == "cuda"
    assert step.nodes
    assert not [note for note in step.notes if "profiles fit" in note or "no generated line" in note], step.notes
    for node in step.nodes:
        assert node.op != "unknown" and node.place.file and node.place.line, node
        assert node.us is not None, node
        if node.kind == "kernel":
            assert node.name and node.grid and node.block and node.registers, node


def test_times_of_nodes_add_up_to_the_replay(step: ReplayReport) -> None:
    assert step.us is not None and step.replay_us is not None
    print(f"\n{step.us:.1f} us by node, {step.replay_us:.1f} us by events")
    assert step.us == pytest.approx(step.replay_us, rel=0.05, abs=3.0)


def test_layers_and_parts_are_told_apart(step: ReplayReport) -> None:
    layers = {total.name for total in step.totals("layer")}
    assert {"layers.0", "layers.1", "layers.2"} <= layers
    assert step.totals("part")[0].name == "attention"
    ops = {node.op for node in step.nodes}
    assert any(op.startswith("dsv4.sparse_mla_decode") for op in ops)
    attention = [node for node in step.nodes if node.op.startswith("dsv4.sparse_mla_decode")]
    assert all(node.basis == "expression" and node.floor_us for node in attention)


def test_edges_form_one_graph_in_the_order_of_creation(step: ReplayReport) -> None:
    assert sum(not node.after for node in step.nodes) >= 1
    assert all(edge.node < node.index for node in step.nodes for edge in node.after)
    assert sum(len(node.after) for node in step.nodes) >= len(step.nodes) - 1
    programmatic = sum(edge.programmatic for node in step.nodes for edge in node.after)
    print(f"\n{len(step.nodes)} nodes, {programmatic} programmatic edges")


def test_streams_and_joins_are_seen() -> None:
    report = dsv4_compile.explain_replay(
        Branches(), torch.ones(64, 1024, device=CUDA, dtype=torch.bfloat16), backend=None
    )
    kernels = [node for node in report.nodes if node.kind == "kernel"]
    assert {node.stream for node in kernels} == {0, 1}
    assert {node.module for node in kernels} == {"left", "right", ""}
    addition = next(node for node in kernels if node.op == "aten.add")
    assert len(addition.after) == 2
    assert addition.place.source == "return left + right"


def test_two_reports_of_one_step_have_the_same_nodes() -> None:
    model, x = nn.Linear(512, 512, device=CUDA), torch.ones(8, 512, device=CUDA)
    first, again = (dsv4_compile.explain_replay(model, x, backend=None) for _ in range(2))
    difference = again.diff(first)
    assert (difference.added, difference.removed, difference.reshaped) == ([], [], [])


def test_copies_and_fills_have_their_bytes() -> None:
    source, target = torch.ones(1 << 20, device=CUDA), torch.empty(1 << 20, device=CUDA)

    def step() -> Tensor:
        target.copy_(source)
        return target.zero_()

    report = dsv4_compile.explain_replay(step, backend=None)
    assert report.nodes[0].kind == "copy"
    assert all(node.bytes and node.bytes >= 4 << 20 for node in report.nodes)
