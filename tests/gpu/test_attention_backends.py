"""The attention backends on a GPU: conformance cases eager, compiled as one graph, and captured for other batches."""

from __future__ import annotations

import importlib.util
import random

import pytest
import torch

from dsv4_compile._compat import device_architecture
from dsv4_compile.attention_backends import Demand, get_backend
from tests.attention_backends import record
from tests.attention_backends.systems import PHASES, Layer, Way, case_of, ways

CASES = list(ways())
DECODES = [way for way in CASES if way.phase == "decode"]
MIXED = list(ways(("mixed",), ratios=(4,)))


@pytest.mark.parametrize("way", CASES, ids=str)
def test_backend_gives_the_exact_answer(way: Way) -> None:
    with torch.inference_mode():
        record.eager(way, "cuda")


@pytest.mark.parametrize("way", MIXED, ids=str)
def test_compiled_attends_every_batch_with_one_graph(way: Way) -> None:
    with torch.inference_mode():
        record.compiled(way, "cuda")


@pytest.mark.parametrize("way", DECODES, ids=str)
def test_captured_decode_serves_other_batches(way: Way) -> None:
    with torch.inference_mode():
        record.captured(way, "cuda")


def libraries() -> list[tuple[str, str]]:
    """Backends whose kernel library is installed and has kernels for this GPU, with the cache that it reads."""
    found = []
    for name, word in (("FLASHMLA_SPARSE_DSV4", "fp8_ds_mla"), ("FLASHINFER_MLA_SPARSE_DSV4", "bfloat16")):
        architecture = device_architecture(torch.device("cuda")) if torch.cuda.is_available() else "cpu"
        demand = Demand(kv_cache_dtype=word, architecture=architecture, engine="library")
        if importlib.util.find_spec(get_backend(name).library) and get_backend(name).supports(demand):
            found.append((name, word))
    return found


@pytest.mark.parametrize("ratio", [1, 4, 128])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("name", "word"), libraries())
def test_library_gives_the_exact_answer(name: str, word: str, phase: str, ratio: int, seed: int) -> None:
    way = Way(name, word, ratio, phase)
    case = case_of(random.Random(seed), way, heads=64, head_dim=512)
    layer = Layer(way, case, "library", device="cuda")
    with torch.inference_mode():
        record.assert_close(layer.module(*layer.arguments(case)), case.expected())
