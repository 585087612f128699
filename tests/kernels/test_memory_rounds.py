"""Kernels of few tokens wait for memory as often in a row as their addresses make necessary, and no more.

Reads code compiled ahead of time for Hopper. A different version of the assembler may order instructions otherwise:
then this says where.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from dsv4_compile._compat import triton_release
from dsv4_compile.bench import gemm, indexer, preprocess, preprocess_insert, sparse_mla_decode
from dsv4_compile.config import DeepseekV4Config
from dsv4_compile.kernels.attention import sparse_mla_decode_sm90_few_tokens as small
from dsv4_compile.kernels.attention.common import decode_call
from dsv4_compile.kernels.host import gpu
from dsv4_compile.kernels.host import pdl as early
from dsv4_compile.kernels.linear import fp8_linear
from dsv4_compile.kernels.linear import gemm as grouped_matmul
from dsv4_compile.kernels.preprocess import compress_window
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.reference.attention.sparse_mla_decode import DecodeArguments, DecodeQuantArguments
from tests.kernels.gpus import GPUS
from tests.support import fake_triton
from tests.tools.compiled_facts import compiled_for
from tests.tools.memory_rounds import MemoryRounds, loads_of, memory_rounds

FLASH = (DeepseekV4Config.flash(),)
ONE_LOAD, POSITION_THEN_ANGLES, ENTRY_THEN_BLOCK, TABLE_THEN_STATES = 1, 2, 2, 3
AFTER_SLOTS, AFTER_BLOCKS = 2, 2


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (early, gpu, fp8_linear, grouped_matmul):
        monkeypatch.setattr(module, "gpu_of", lambda device: GPUS["sm_90"][0])


def kernels_of(scenario: ModuleType, tokens: int, **only: str) -> Iterator[Any]:
    """What the launcher of an op of the bench launches."""
    more: Any = {preprocess: {"configs": FLASH}, gemm: {"models": {"Flash": FLASH[0]}}, indexer: {"context": 2048}}
    wanted = {name: {value} for name, value in only.items()}
    for problem in scenario.problems(torch.device("cpu"), wanted, tokens=(tokens,), **more.get(scenario, {})):
        with compiled_for("sm_90") as compiled:
            launcher(problem.op)(*problem.make(0))
        yield from compiled


def taken_and_needed(compiled: Any) -> tuple[int, int]:
    return memory_rounds(compiled)[:2]


def loads_in(compiled: Any, file: str = "", first: int = 0, end: int = 0) -> list[tuple[int, int]]:
    """Rounds before each load of a compiled kernel, and those it needs: of all, or from some lines of a file."""
    loads = [(load, *load.place.rsplit(":", 1)) for load in loads_of(fake_triton.source_lines(compiled))]
    here = [load for load, name, line in loads if not file or (name == file and first <= int(line) < end)]
    return [(load.before, load.needed) for load in here]


@pytest.mark.parametrize(
    ("scenario", "only", "tokens", "rounds"),
    [
        (preprocess, {"op": "fused_q_kv_rmsnorm"}, (8,), ONE_LOAD),
        (preprocess_insert, {"kind": "swa", "latent": "1024"}, (1, 8, 128), POSITION_THEN_ANGLES),
        (preprocess, {"op": "q_norm_rope"}, (1, 32, 128), POSITION_THEN_ANGLES),
        (preprocess, {"op": "kv_rope_insert"}, (1, 32), POSITION_THEN_ANGLES),
        (preprocess, {"op": "inv_rope"}, (1, 32, 128), POSITION_THEN_ANGLES),
        (preprocess, {"op": "inv_rope_fp8_quant"}, (1, 32, 128), POSITION_THEN_ANGLES),
        (indexer, {"op": "save_partial_states", "layer": "CSA"}, (8,), POSITION_THEN_ANGLES),
        (indexer, {"op": "compress_norm_rope_insert", "layer": "CSA"}, (8,), TABLE_THEN_STATES),
        (indexer, {"op": "compress_norm_rope_insert", "layer": "indexer"}, (8,), TABLE_THEN_STATES),
        (indexer, {"op": "indexer_q_rope_quant"}, (8, 128), POSITION_THEN_ANGLES),
        (indexer, {"op": "global_topk", "topk": "512"}, (8,), ENTRY_THEN_BLOCK),
        (gemm, {"op": "fp8_linear", "layer": "wq_a + wkv"}, (8,), ONE_LOAD),
        (gemm, {"op": "fp8_linear", "layer": "wq_a + wkv beside HCA"}, (8, 16), ONE_LOAD),
        (gemm, {"op": "fp8_linear", "layer": "wo_b"}, (8,), ONE_LOAD),
    ],
)
def test_no_load_waits_for_one_that_it_does_not_need(
    scenario: ModuleType, only: dict[str, str], tokens: tuple[int, ...], rounds: int
) -> None:
    for count in tokens:
        (kernel,) = kernels_of(scenario, count, **only)
        waits = MemoryRounds(*kernel.ask(memory_rounds))
        assert (waits.taken, waits.needed) == (rounds, rounds), waits.late
        assert kernel.resources()["STACK"] == 0


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", [32, 128])
def test_heads_in_strips_wait_for_their_position_and_angles(tokens: int, packed: bool) -> None:
    o, table = torch.empty(tokens, 64, 512, dtype=torch.bfloat16), torch.empty(4096, 64)
    with compiled_for("sm_90") as compiled:
        launcher("inv_rope_fp8_quant")(o, torch.arange(tokens), table, 8, 8, packed)
    # Triton 3.9 has fewer registers left where scales are packed.
    late = int(packed and tokens == 128 and triton_release() >= (3, 9))
    assert compiled[0].ask(taken_and_needed) == [POSITION_THEN_ANGLES + late, POSITION_THEN_ANGLES]


@pytest.mark.parametrize("cache_format", ["indexer_fp8", "indexer_mxfp4", "plain"])
@pytest.mark.parametrize("hadamard", [False, True])
def test_queries_of_an_indexer_are_in_registers(hadamard: bool, cache_format: str) -> None:
    q, weights = torch.empty(8, 64, 128, dtype=torch.bfloat16), torch.empty(8, 64, dtype=torch.bfloat16)
    with compiled_for("sm_90") as compiled:
        launcher("indexer_q_rope_quant")(q, torch.arange(8), torch.empty(4096, 64), weights, cache_format, hadamard)
    assert compiled[0].resources()["STACK"] == 0


def test_a_quantisation_in_front_of_a_product_waits_once() -> None:
    (problem,) = gemm.problems(
        torch.device("cpu"), {"model": {"Flash"}, "op": {"fp8_linear"}, "layer": {"wo_b"}}, tokens=(64,)
    )
    with compiled_for("sm_90") as compiled:
        fp8_linear.quantize_activation(problem.make(0)[0])
    assert compiled[0].ask(taken_and_needed) == [ONE_LOAD, ONE_LOAD]


def test_long_windows_wait_for_their_states_and_for_each_other() -> None:
    """Positions, their place in the table, states, the arrival of the other parts, and their pools."""
    (kernel,) = kernels_of(indexer, 8, op="compress_norm_rope_insert", layer="HCA")
    assert kernel.ask(taken_and_needed)[0] == 5


@pytest.mark.parametrize("tiling", [small.NARROW, *small.ONE_BLOCK])
@pytest.mark.parametrize("fused", ["none", "quant"])
def test_keys_of_few_tokens_are_loaded_once_and_stay_in_registers(fused: str, tiling: small.Tiling) -> None:
    """The order is the assembler's: on an H200 it is faster than all loads in front of the first wait."""
    args = sparse_mla_decode.fused_arguments(fused, 8, 64, torch.device("cpu"), 0)
    call = decode_call((DecodeArguments if fused == "none" else DecodeQuantArguments)(*args))
    with compiled_for("sm_90") as compiled:
        small.launch(call, GPUS["sm_90"][0], 10, tiling=tiling)
    # Nothing else waits for two loads. Triton 3.8 gives one of them to a line of a different file.
    needed = [load[-1] for load in compiled[0].ask(loads_in)]
    # Codes of seven tiles, two parts of the rope, and scales, of one key or two.
    assert needed.count(AFTER_SLOTS) == 10 * (tiling.block_n // 64)
    assert compiled[0].resources()["STACK"] == 0


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_states_of_a_decode_step_are_loaded_as_soon_as_their_blocks_are_known(kind: str) -> None:
    """Not when the token's own state is there. With them come those of a step of consecutive tokens."""
    (kernel,) = kernels_of(preprocess_insert, 8, kind=kind, latent="1024")
    lines, first = inspect.getsourcelines(compress_window._cached_states.fn)
    states = kernel.ask(loads_in, "compress_window.py", first, first + len(lines))
    at_once = [rounds for rounds in states if rounds == [AFTER_BLOCKS, AFTER_BLOCKS]]
    # Triton 3.8 has those of the indexer one round later.
    late = kind == "csa" and triton_release() == (3, 8)
    assert len(states) >= 16 and len(at_once) == len(states) // (4 if late else 2)
