"""Random sequences of calls of a converted model: every call is that of eager transformers, or refused with a code.

DSV4_FUZZ=2000 (`make fuzz`) runs that many sequences with eager ops, and a tenth through Inductor.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dsv4_compile import hf
from dsv4_compile.hf.tiny import tiny_model
from tests.hf.fuzz import CAPACITY, World
from tests.hf.small import LAYERS

SEQUENCES = int(os.environ.get("DSV4_FUZZ", "0"))
WAYS = ["attention", "whole", *(["inductor"] if SEQUENCES else [])]
COUNTS = {"attention": SEQUENCES // 2 or 30, "whole": SEQUENCES // 2 or 30, "inductor": SEQUENCES // 10}


class Pair:
    """The original and the converted model, with the weights that each sequence begins with."""

    def __init__(self, way: str) -> None:
        self.way, self.attention_only = way, way != "whole"
        self.original = tiny_model(**LAYERS)
        self.converted = hf.convert(copy.deepcopy(self.original), **CAPACITY, attention_only=self.attention_only)
        self.weights = copy.deepcopy(self.original.state_dict())
        self.calls = 0
        if way == "inductor":
            torch._dynamo.config.recompile_limit = 64
            self.converted.compile(fullgraph=True, backend="dsv4")

    def play(self, data: Any) -> None:
        for model in (self.original, self.converted):
            model.load_state_dict(self.weights)
        options = {"in_graph": self.way == "inductor", "attention_only": self.attention_only}
        world = World(self.original, self.converted, data, **options)
        try:
            world.play()
        finally:
            self.calls += world.calls
            if self.converted.training or type(self.converted) is type(self.original):  # where a sequence has failed
                self.__init__(self.way)  # type: ignore[misc]


@pytest.fixture(scope="module", params=WAYS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


@pytest.mark.filterwarnings("ignore")
def test_every_call_is_that_of_eager_transformers_or_refused(pair: Pair) -> None:
    @settings(
        max_examples=COUNTS[pair.way],
        deadline=None,
        derandomize=not SEQUENCES,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if SEQUENCES else [Phase.generate],
    )
    @given(st.data())
    def sequences(data: Any) -> None:
        pair.play(data)

    sequences()
    assert pair.calls > COUNTS[pair.way]
