"""Random sequences of calls of a converted model on a GPU: each is that of eager transformers, or refused with a code.

Eager ops, and compiled with captured steps. DSV4_FUZZ=2000 runs a tenth as many sequences of each, else 30.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.hf.test_fuzz import Pair, play

SEQUENCES = int(os.environ.get("DSV4_FUZZ", "300")) // 10
CAPTURES = {"dsv4.cudagraph": "full"}


@pytest.fixture(params=["attention", "whole", "captured"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = CAPTURES if device == "cuda" else {**CAPTURES, "dsv4.cudagraph.graphs": "standin"}
    models = Pair(request.param, device, options if request.param == "captured" else {})
    before = torch.get_default_device()
    torch.set_default_device(device)  # ids and masks of the sequences
    yield models
    torch.set_default_device(before)


@pytest.mark.filterwarnings("ignore")
def test_every_call_is_that_of_eager_transformers_or_refused(pair: Pair) -> None:
    play(pair, SEQUENCES)
