"""Random sequences of calls of a converted model: every call is that of eager transformers, or refused with a code.

DSV4_FUZZ=2000 (`make fuzz`) runs that many sequences with eager ops, and a tenth through Inductor; DSV4_FUZZ_SEED=1
draws others.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv4_compile import hf
from dsv4_compile.cpu import native
from dsv4_compile.hf.tiny import tiny_model
from tests.hf.fuzz import CAPACITY, MAX_GRAPHS
from tests.hf.fuzz_changes import ChangingWorld
from tests.hf.fuzz_eager import Eager
from tests.hf.small import LAYERS, close

SEQUENCES, SEED = (int(os.environ.get(name, "0")) for name in ("DSV4_FUZZ", "DSV4_FUZZ_SEED"))
WAYS = ["attention", "whole", *(["inductor"] if SEQUENCES else [])]
COUNTS = {"attention": SEQUENCES // 2 or 25, "whole": SEQUENCES // 2 or 25, "inductor": SEQUENCES // 10}


FEW: dict[str, Any] = {"n_routed_experts": 4, "hc_sinkhorn_iters": 2}
"""Fewer loops in Python, which take most of a call's time."""


class Pair:
    """The original and the converted model, with the weights that each sequence begins with.

    Args:
        way: one of `WAYS`, or "captured".
        captures: options of torch.compile for "captured".
    """

    def __init__(self, way: str, device: str = "cpu", captures: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.way, self.again = way, (way, device, captures)
        # On a GPU, experts of transformers in float32 read how many tokens each has: such a step is not captured.
        self.attention_only = way not in ("whole", "captured")
        self.original = tiny_model(**LAYERS, **FEW).to(device)
        self.converted = hf.convert(copy.deepcopy(self.original), **CAPACITY, attention_only=self.attention_only)
        self.weights = copy.deepcopy(self.original.state_dict())
        self.calls = 0
        self.in_graph = way in ("inductor", "captured")
        if self.in_graph:
            torch._dynamo.config.recompile_limit = MAX_GRAPHS
            self.converted.compile(fullgraph=True, backend="dsv4", options=dict(captures))

    def play(self, data: Any) -> None:
        how = {"in_graph": self.in_graph, "attention_only": self.attention_only}
        world = ChangingWorld(self.original, self.converted, data, **how)
        try:
            world.play()
        finally:
            self.calls += world.calls
            if self.converted.training or type(self.converted) is type(self.original):  # where a sequence has failed
                self.__init__(*self.again)  # type: ignore[misc]
            elif world.changed:
                for model in (self.original, self.converted):
                    model.load_state_dict(self.weights)


@pytest.fixture(scope="module", params=WAYS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "inductor":
            patch.setattr(native, "_state", {})  # a compiled model has C++ kernels for CPUs
        yield Pair(request.param)


def play(pair: Pair, sequences: int) -> None:
    """Play that many random sequences; after a fault, look for a shorter one if `DSV4_FUZZ` is set."""

    @seed(f"{SEED} {pair.way}")
    @settings(
        max_examples=sequences,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if SEQUENCES else [Phase.generate],
    )
    @given(st.data())
    def played(data: Any) -> None:
        pair.play(data)

    played()
    assert pair.calls > sequences


@pytest.mark.filterwarnings("ignore")
def test_every_call_is_that_of_eager_transformers_or_refused(pair: Pair) -> None:
    play(pair, COUNTS[pair.way])


@torch.no_grad()
def test_calls_are_compared_with_what_eager_transformers_gives_for_each_row_alone() -> None:
    original = tiny_model(**LAYERS, **FEW)
    eager = Eager(original)
    for length, count in ((1, 1), (150, 150), (40, 7), (64, 1)):
        row = torch.randint(0, 512, (1, length))
        alone = original(row, use_cache=False).logits[0, -count:]
        eager.expect(7, row[0].tolist(), count, partial(close, alone))
        eager.expect_greedy(7, [*row[0].tolist(), int(alone[-1].argmax())], 1)
    eager.settle()
    eager.expect(7, row[0].tolist(), 1, partial(close, alone[-1:] + 1e-3))
    with pytest.raises(AssertionError, match="call 7"):
        eager.settle()
    eager.expected.clear()
    eager.expect_greedy(7, [*row[0].tolist(), int(alone[-1].argmin())], 1)
    with pytest.raises(AssertionError, match="call 7"):
        eager.settle()


def test_a_row_is_compared_up_to_a_tie_of_experts() -> None:
    eager = Eager(tiny_model(**LAYERS, **FEW))
    row = torch.randint(0, 512, (3, 40), generator=torch.Generator().manual_seed(1 << 16))[2].tolist()
    counts = []

    def compare(logits: Tensor) -> None:
        counts.append(logits.shape[0])

    for length, count in ((23, 23), (24, 1), (40, 16)):
        eager.expect(1, row[:length], count, compare)
    eager.settle()
    assert counts == [23]
