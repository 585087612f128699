"""`explain_replay`: every node with its op, line, module, cost and time; on the stand-in of CPUs."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dsv4_compile
from dsv4_compile import cli
from dsv4_compile.debug import ReplayReport
from dsv4_compile.debug.replay.command import EXCEEDED, FAILED, OK, diff, replay
from dsv4_compile.debug.replay.rows import Edge
from dsv4_compile.runtime.cuda_graphs import CudaGraphs
from dsv4_compile.runtime.standin import StandInGraphs
from tests.runtime.engine import make_runner, make_world

T, D = 4, 16


class Layer(nn.Module):
    """A norm, a GEMM and a dsv4 op."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D))
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        q, kv = torch.ops.dsv4.fused_q_kv_rmsnorm(y, y + 1, self.scale, self.scale, 1e-6)
        return q.sigmoid() * kv


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def line_of(text: str) -> int:
    """Return the line of this file that holds `text`."""
    return next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)


@pytest.fixture(scope="module")
def eager() -> ReplayReport:
    return dsv4_compile.explain_replay(Model(), torch.ones(T, D), backend=None, graphs="standin")


@pytest.fixture(scope="module")
def compiled() -> ReplayReport:
    # `auto` would leave ops to their forms for CPUs.
    return dsv4_compile.explain_replay(Model(), torch.ones(T, D), graphs="standin", options={"dsv4.impl": "ir"})


def test_every_call_has_its_op_line_module_and_time(eager: ReplayReport) -> None:
    ops = ["aten.mm", "aten.add", "dsv4.fused_q_kv_rmsnorm", "aten.sigmoid", "aten.mul", "aten.add"]
    assert [node.op for node in eager.nodes] == ops * 2
    assert all(node.place.file == __file__ and node.us for node in eager.nodes)
    gemm, norm = eager.nodes[6], eager.nodes[8]
    assert gemm.place.line == line_of("y = x @ self.weight")
    assert gemm.place.source == "y = x @ self.weight"
    assert (gemm.module, gemm.layer, eager.nodes[11].module) == ("layers.1", "layers.1", "")
    assert norm.place.line == line_of("q, kv = torch.ops")
    assert (norm.part, gemm.part) == ("attention", "other")


def test_costs_are_those_of_the_table_or_of_the_tensors(eager: ReplayReport) -> None:
    gemm, norm, product = eager.nodes[0], eager.nodes[2], eager.nodes[4]
    assert (gemm.basis, gemm.bytes, gemm.flops) == ("tensors", 4 * (2 * T * D + D * D), 2 * T * D * D)
    want = dsv4_compile.costs.of("fused_q_kv_rmsnorm", T=T, D=D, Q=D, e=4)
    assert (norm.basis, norm.bytes, norm.flops) == ("expression", want.bytes, 0)
    assert product.bytes == 4 * 3 * T * D
    assert norm.floor_us == round(dsv4_compile.costs.floor_us(want, dsv4_compile.costs.H200), 3)


def test_generated_kernels_have_the_ops_lines_and_modules_that_they_fuse(compiled: ReplayReport) -> None:
    fused = [node for node in compiled.nodes if node.name.startswith("cpp_fused")]
    assert len(fused) == 2
    assert [node.op for node in fused] == ["dsv4.fused_q_kv_rmsnorm"] * 2
    assert [node.layer for node in fused] == ["layers.0", "layers.1"]
    for node in fused:
        assert {"aten.sigmoid", "dsv4.fused_q_kv_rmsnorm"} <= set(node.ops)
        assert node.place.line == line_of("q, kv = torch.ops")
        assert any(location.endswith(f":{line_of('return q.sigmoid')}") for location in node.where)
        assert node.basis == "expression" and node.us
    assert [node.place.line for node in compiled.nodes if node.op == "aten.mm"] == [line_of("y = x @")] * 2
    assert compiled.breaks == 0


def test_times_of_the_calls_are_within_a_replay(eager: ReplayReport) -> None:
    assert eager.us is not None and eager.replay_us is not None
    assert 0 < eager.us < 20 * eager.replay_us
    starts = [node.start_us for node in eager.nodes]
    assert starts == sorted(starts, key=float)


def test_totals_add_up(eager: ReplayReport) -> None:
    for by in ("op", "layer", "part"):
        totals = eager.totals(by)
        assert sum(total.nodes for total in totals) == len(eager.nodes)
        assert sum(total.us for total in totals) == pytest.approx(eager.us)
    most = eager.most_to_win(3)
    assert len(most) == 3
    assert most[0].win_us == max(node.win_us or 0 for node in eager.nodes)


def test_step_of_a_runner_is_explained_with_its_metadata() -> None:
    world = make_world()
    runner = make_runner(world)
    world.load([1] * 4, [100, 20, 30, 128])
    before = {name: tensor.clone() for name, tensor in world.buffers.tensors.items()}
    report = dsv4_compile.explain_replay(runner, 3)
    assert report.what == "the step of 4 tokens"
    assert report.nodes[0].op == "dsv4.batch_metadata"
    assert {total.name for total in report.totals("layer")} == {"layers.0", "layers.1", "layers.2", "outside layers"}
    decode = next(node for node in report.nodes if node.op == "dsv4.sparse_mla_decode")
    assert (decode.layer, decode.part) == ("layers.0", "attention")
    assert decode.place.file.endswith("paged.py")
    assert all(torch.equal(before[name], world.buffers.tensors[name]) for name in ("query_start_loc", "seq_lens"))


def test_nothing_is_observed_afterwards(eager: ReplayReport) -> None:
    assert eager.nodes
    for kind in (CudaGraphs, StandInGraphs):
        assert kind.capture.__qualname__ == f"{kind.__name__}.capture"
    capture = StandInGraphs().capture(lambda: torch.ones(3) + 1, "a call")
    assert capture.replay.__qualname__ == "Recorder.replay"


def test_json_round_trips(eager: ReplayReport) -> None:
    assert ReplayReport.from_json(eager.to_json()) == eager
    assert eager.to_dict()["schema"] == "dsv4.replay/1"
    with pytest.raises(dsv4_compile.DSV4Error, match="E201"):
        ReplayReport.from_json('{"schema": "dsv4.explain/1"}')


def test_text_names_every_node_and_the_most_to_win(eager: ReplayReport) -> None:
    text = eager.text(160)
    for words in ("MOST TO WIN", "TIME BY LAYER", "12 calls", "layers.1", "test_replay.py:", "report.save("):
        assert words in text, words


class _Page(HTMLParser):
    """Tags with their attributes, and whether each closes the tag that is open."""

    VOID = ("meta", "br", "hr", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_has_every_node_and_needs_nothing_from_outside(eager: ReplayReport, tmp_path: Path) -> None:
    text = eager.save(tmp_path / "replay.html").read_text()
    page = _Page(text)
    assert page.open == []
    buttons = [attributes for tag, attributes in page.tags if tag == "button" and attributes.get("class") == "node"]
    assert sorted(str(attributes["id"]) for attributes in buttons) == sorted(f"n{node.index}" for node in eager.nodes)
    assert all(attributes["aria-label"] for attributes in buttons)
    assert [attributes["tabindex"] for attributes in buttons].count("0") == 1
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.tags:
        assert not {"src", "onclick"} & set(attributes) and tag not in ("link", "img", "iframe")
        address = attributes.get("href") or "#"
        assert address.startswith("https://") or address.removeprefix("#") in ("", *map(str, ids))
    assert "url(" not in text and "@import" not in text and "prefers-color-scheme: dark" in text
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert [dict(node_data["rows"])["kernel"] for node_data in data] == [node.name for node in eager.nodes]


def test_page_escapes_what_code_may_contain(eager: ReplayReport, tmp_path: Path) -> None:
    odd = ReplayReport.from_json(eager.to_json())
    odd.nodes[0].name = odd.nodes[0].op = "</script><script>alert(1)</script>"
    text = odd.save(tmp_path / "odd.html").read_text()
    assert "<script>alert" not in text
    assert _Page(text).open == []


Change = Callable[[ReplayReport], object]


def _slower(report: ReplayReport) -> None:
    report.nodes[3].us = 10 * (report.nodes[3].us or 0) + 100


def _reshaped(report: ReplayReport) -> None:
    report.nodes[0].shapes[0] = "f32[8, 16]"


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        (lambda report: None, (0, 0, 0, 0)),
        (lambda report: report.nodes.pop(2), (0, 1, 0, 0)),
        (lambda report: report.nodes.insert(5, report.nodes[2]), (1, 0, 0, 0)),
        (_slower, (0, 0, 1, 0)),
        (_reshaped, (0, 0, 0, 1)),
    ],
)
def test_difference_finds_what_changed(eager: ReplayReport, change: Change, counts: tuple[int, ...]) -> None:
    new = ReplayReport.from_json(eager.to_json())
    change(new)
    difference = new.diff(eager)
    assert (len(difference.added), len(difference.removed), len(difference.slower), len(difference.reshaped)) == counts
    assert all(str(count) in difference.verdict for count in counts)
    assert json.loads(difference.to_json())["verdict"] == difference.verdict


@pytest.mark.parametrize(
    ("limits", "status"),
    [("nodes>12, removed>0", OK), ("nodes>11", EXCEEDED), ("slower>0, nodes>90", EXCEEDED), ("breaks>0", OK)],
)
def test_limits_decide_the_status(
    eager: ReplayReport, tmp_path: Path, limits: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    new = ReplayReport.from_json(eager.to_json())
    _slower(new)
    old_file, new_file = str(eager.save(tmp_path / "a.json")), str(new.save(tmp_path / "b.json"))
    assert diff(old_file, new_file, as_json=False, fail_if=limits) == status
    captured = capsys.readouterr()
    assert "1 slower" in captured.out
    assert bool(captured.err) == (status == EXCEEDED)


@pytest.mark.parametrize("limits", ["nodes<3", "time>3", "nodes>many"])
def test_limit_that_cannot_be_read_is_an_error(tmp_path: Path, limits: str) -> None:
    with pytest.raises(dsv4_compile.DSV4Error, match="E201"):
        diff(str(tmp_path / "a.json"), str(tmp_path / "b.json"), as_json=False, fail_if=limits)


SCRIPT = """
import torch
import dsv4_compile
from dsv4_compile.runtime import graphs_for

def step():
    return (torch.ones(3) + 1).sin()

graphs = graphs_for(torch.device("cpu"), "standin")
once, often = graphs.capture(step, "once"), graphs.capture(lambda: step().cos(), "often")
once.replay()
for _ in range(8):
    often.replay()
"""


def test_capture_that_a_script_replays_most_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    page = tmp_path / "page.html"
    assert replay(str(script), as_json=True, html=str(page), fail_if="breaks>0") == OK
    report = ReplayReport.from_json(capsys.readouterr().out)
    assert (report.what, report.captures) == ("often", 2)
    assert [node.op for node in report.nodes][-2:] == ["aten.sin", "aten.cos"]
    assert report.nodes[-1].us and report.nodes[-1].place.file == str(script)
    assert page.read_text().count('class="node"') == len(report.nodes)


@pytest.mark.parametrize("text", ["print(1)", "raise ValueError(3)"])
def test_script_without_a_capture_fails(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    assert replay(str(script), as_json=False, html=None, fail_if=None) == FAILED
    captured = capsys.readouterr()
    assert "ValueError" in captured.out or "captures no graph" in captured.err


def test_command_line_explains_a_replay_and_compares_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, record = tmp_path / "script.py", tmp_path / "record.json"
    script.write_text(SCRIPT)
    assert cli.main(["explain", "--replay", str(script), "--json", "--fail-if", "nodes>2"]) == EXCEEDED
    captured = capsys.readouterr()
    assert "limit 2" in captured.err
    record.write_text(captured.out)
    assert cli.main(["explain", "--diff", str(record), str(record), "--fail-if", "added>0, slower>0"]) == OK
    assert "0 added, 0 removed, 0 slower" in capsys.readouterr().out
    assert cli.main(["explain", "--diff", str(record), str(tmp_path / "none.json")]) == FAILED
    assert "E201" in capsys.readouterr().err


def test_dependencies_are_shown_with_their_kind(eager: ReplayReport) -> None:
    report = ReplayReport.from_json(eager.to_json())
    report.nodes[2].after = [Edge(0), Edge(1, programmatic=True)]
    assert "0 1p" in report.text(160)
    assert ReplayReport.from_json(report.to_json()).nodes[2].after == report.nodes[2].after
