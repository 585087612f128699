"""`diverge`: planted faults of ten kinds are found at the op that has them, and rounding is no fault."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsv4_compile
from dsv4_compile._compat import inductor_config
from dsv4_compile.debug import Divergence, diverge
from dsv4_compile.debug.rerun import main, rerun
from dsv4_compile.debug.rounding import distance
from dsv4_compile.runtime.standin import StandInGraphs
from tests.backend.test_fuse_attention import Attention

T, D, ROWS = 6, 16, 24


class Layer(nn.Module):
    """A GEMM, a norm, a cache that is written and read, a mask and a gate; attributes plant faults."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D) * D**-0.5)
        self.scale = nn.Parameter(torch.rand(D) + 0.5)
        self.eps, self.shift, self.strict, self.gain, self.stale = 1e-6, 0, False, 1.0, False
        self.rounds = self.turned = self.swapped = self.holes = False

    def forward(self, x: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        weight = self.weight.t() if self.turned else self.weight
        y = x @ weight
        if self.rounds:
            y = y.bfloat16().float()
        q, kv = torch.ops.dsv4.fused_q_kv_rmsnorm(y, y + 1, self.scale, self.scale, self.eps)
        if self.swapped:
            q, kv = kv, q
        if not self.stale:
            cache.index_copy_(0, slots + self.shift, kv)
        read = cache.index_select(0, slots)
        hidden = read > 0 if self.strict else read >= 0
        masked = read.masked_fill(hidden, 0.0)
        gate = torch.sigmoid(q) * self.gain
        if self.holes:
            gate = gate.masked_fill(gate > gate.max() - 1e-6, float("nan"))
        return gate * masked


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])

    def forward(self, x: Tensor, caches: list[Tensor], slots: Tensor) -> Tensor:
        for layer, cache in zip(self.layers, caches, strict=True):
            x = x + layer(x, cache, slots)
        return x


@pytest.fixture
def model() -> Model:
    torch.manual_seed(3)
    return Model()


@pytest.fixture
def call() -> tuple[Tensor, list[Tensor], Tensor]:
    torch.manual_seed(4)
    return torch.randn(T, D), [torch.randn(ROWS, D) for _ in range(3)], torch.arange(T) * 2


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)


def planted(model: Model, **attributes: Any) -> Model:
    """Return a copy with attributes of its second layer set."""
    other = copy.deepcopy(model)
    for name, value in attributes.items():
        setattr(other.layers[1], name, value)
    return other


def one_weight(model: Model) -> Model:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.layers[1].weight[3, 5] += 0.5
    return other


FAULTS: dict[str, tuple[Callable[[Model], Model], str, str]] = {
    "a weight": (one_weight, "aten.mm", "y = x @ weight"),
    "a transposed weight": (lambda m: planted(m, turned=True), "aten.mm", "y = x @ weight"),
    "an epsilon": (lambda m: planted(m, eps=1e-1), "dsv4.fused_q_kv_rmsnorm", "q, kv = torch.ops"),
    "a rounding": (lambda m: planted(m, rounds=True), "aten.add", "q, kv = torch.ops"),
    "swapped results": (lambda m: planted(m, swapped=True), "aten.index_copy_", "cache.index_copy_"),
    "a slot off by one": (lambda m: planted(m, shift=1), "aten.add", "cache.index_copy_"),
    "a stale cache": (lambda m: planted(m, stale=True), "aten.index_select", "read = cache"),
    "NaN in a hole": (lambda m: planted(m, holes=True), "aten.mul", "return gate * masked"),
}
"""Faults of the second layer, with the op and the line that show them first."""


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found_at_its_op(
    fault: str, model: Model, call: tuple[Tensor, list[Tensor], Tensor], tmp_path: Path
) -> None:
    plant, op, line = FAULTS[fault]
    before = [cache.clone() for cache in call[1]]
    divergence = diverge(model, plant(model), *call, save=tmp_path / "call.pt")
    assert (divergence.op, divergence.place.line, divergence.layer) == (op, line_of(line), "layers.1"), str(divergence)
    assert divergence.distance is not None and divergence.distance.differs
    assert all(torch.equal(a, b) for a, b in zip(before, call[1], strict=True))
    assert "expected" in str(divergence) and "layers.1" in str(divergence)
    assert (fault == "a rounding") == any("_to_copy of the second" in op for op in divergence.between)
    assert rerun(tmp_path / "call.pt").first.largest == 0


def test_fault_of_an_other_comparison_is_found_where_it_is(model: Model, call: Any) -> None:
    with torch.no_grad():
        call[1][1].zero_()
        model.layers[1].weight.zero_()
        model.layers[1].scale.zero_()
    divergence = diverge(model, planted(model, strict=True), *call, save=None)
    assert (divergence.op, divergence.place.line, divergence.layer) == (
        "aten.ge",
        line_of("hidden = read > 0"),
        "layers.1",
    )


def test_value_that_a_capture_froze_is_found(model: Model, call: Any) -> None:
    with torch.no_grad():
        capture = StandInGraphs().capture(lambda: model(*call), "the step")

    def replayed() -> Tensor:
        capture.replay()
        result: Tensor = capture.outputs
        return result

    agreed = diverge(lambda: model(*call), replayed, state=call[1], save=None)
    assert agreed.agrees and agreed.compared > 20, str(agreed)
    model.layers[1].gain = 2.0
    divergence = diverge(lambda: model(*call), replayed, state=call[1], save=None)
    assert (divergence.op, divergence.place.line, divergence.layer) == (
        "aten.mul",
        line_of("gate = torch.sigmoid"),
        "layers.1",
    )


class Gated(nn.Module):
    """Two GEMMs with a gate between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(D, D) * D**-0.5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.up
        gated = torch.sigmoid(y) * y
        return gated @ self.down


@pytest.fixture(scope="module")
def gated() -> Gated:
    torch.manual_seed(5)
    return Gated()


def test_fault_of_generated_code_is_found_in_its_kernel(gated: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codegen.cpp import CppVecOverrides

    x = torch.randn(T, D)
    compiled = torch.compile(gated, backend="inductor")
    with inductor_config.patch(fx_graph_cache=False):
        agreed = diverge(gated, compiled, x, save=None)
        assert agreed.agrees, str(agreed)
        monkeypatch.setattr(CppVecOverrides, "sigmoid", staticmethod(lambda x: f"({x}).tanh()"))
        divergence = diverge(gated, compiled, x, save=None)
    assert divergence.place.line == line_of("gated = torch.sigmoid"), str(divergence)
    assert "aten.sigmoid" in divergence.ops and divergence.after.startswith("aten.mm")


def test_forms_that_round_differently_agree(gated: Gated) -> None:
    other = copy.deepcopy(gated)
    other.forward = lambda x: ((torch.sigmoid(x @ other.up) * (x @ other.up)).double() @ other.down.double()).float()
    x = torch.randn(64, D)
    divergence = diverge(gated, other, x, save=None)
    assert divergence.agrees, str(divergence)
    assert str(divergence).startswith("agree: ")


def test_fused_call_of_an_op_is_not_compared_with_the_op_alone() -> None:
    attention = Attention()
    rotation: Any = {"positions": attention.positions, "cos_sin_cache": attention.table}

    def apart(q: Tensor, turn: float) -> Tensor:
        out = attention(q, attention.cache)
        rotated: Tensor = torch.ops.dsv4.inv_rope(out, attention.positions, attention.table)
        return rotated * turn

    def fused(q: Tensor, turn: float) -> Tensor:
        return attention(q, attention.cache, inverse_rope=True, **rotation).clone() * turn  # as many results

    assert diverge(lambda q: apart(q, 1.0), lambda q: fused(q, 1.0), attention.q, save=None).agrees
    divergence = diverge(lambda q: apart(q, 1.0), lambda q: fused(q, 1.5), attention.q, save=None)
    assert divergence.op == "aten.mul", str(divergence)


def test_call_is_replayed_alone_from_its_file(gated: Gated, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = copy.deepcopy(gated)
    with torch.no_grad():
        other.down[0, 0] += 1
    divergence = diverge(gated, other, torch.randn(T, D), save=tmp_path / "call.pt")
    assert divergence.file == tmp_path / "call.pt"
    assert str(divergence.file) in str(divergence)
    assert main([str(divergence.file)]) == 0
    printed = capsys.readouterr().out
    assert "aten::mm" in printed and "agrees with the first form" in printed and "differs from the second" in printed
    (tmp_path / "other.pt").write_bytes(b"")
    with pytest.raises(dsv4_compile.DSV4Error, match="E201"):
        main([])


@pytest.mark.parametrize(
    ("got", "want", "before", "differs"),
    [
        (torch.ones(4), torch.ones(4), 0.0, False),
        (torch.ones(4) + 1e-6, torch.ones(4), 0.0, False),
        (torch.ones(4) + 1e-3, torch.ones(4), 0.0, True),
        (torch.ones(4) + 1e-3, torch.ones(4), 1e-3, False),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), 0.0, False),
        (torch.tensor([1.0, float("nan")]), torch.ones(2), 0.1, True),
        (torch.tensor([float("inf")]), torch.tensor([-float("inf")]), 0.1, True),
        (torch.tensor([1e-9, 1.0]), torch.tensor([0.0, 1.0]), 0.0, False),
        (torch.tensor([3, 4]), torch.tensor([3, 5]), 0.0, True),
        (torch.tensor([3] * 99 + [4]), torch.tensor([3] * 99 + [5]), 1e-6, False),
        (torch.tensor([True]), torch.tensor([False]), 1e-6, True),
        (torch.ones(3).bfloat16() * 1.0078125, torch.ones(3).bfloat16(), 0.0, False),
        (torch.ones(3).bfloat16() * 1.0625, torch.ones(3).bfloat16(), 0.0, True),
        (torch.zeros(0), torch.zeros(0), 0.0, False),
    ],
)
def test_distance_is_rounding_or_not(got: Tensor, want: Tensor, before: float, differs: bool) -> None:
    assert distance(got, want, before).differs == differs


def test_element_with_the_largest_distance_is_shown() -> None:
    largest = distance(torch.tensor([[1.0, 2.0], [3.0, 9.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 0.0)
    assert (largest.index, largest.got, largest.want, largest.share) == ((1, 1), "9.0", "4.0", 0.25)
    assert isinstance(Divergence(distance=largest).agrees, bool)
