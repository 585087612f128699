"""The prefill kernels compiled ahead of time, and which of them a call on Hopper takes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile._compat import triton_release
from dsv4_compile.kernels.attention import sparse_mla_prefill as portable
from dsv4_compile.kernels.attention import sparse_mla_prefill_sm90 as hopper
from dsv4_compile.kernels.attention.sparse_mla_decode_plan import Fusion
from dsv4_compile.kernels.attention.sparse_mla_prefill import Rows
from dsv4_compile.testing import strided
from dsv4_compile.testing.fake_triton import TARGETS, compiled_for, machine_code, resources
from tests.kernels.gpus import GPUS

# From Triton 3.8 on the accumulator of the left warpgroup does not quite fit its registers.
MOST_SPILLS = 4 if triton_release() < (3, 8) else 128
# Bytes of a thread that fuses, from Triton 3.9 on.
SPILLED = 0 if triton_release() < (3, 9) else 216


def operands(heads: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return torch.zeros(2, heads, 512, dtype=dtype), torch.zeros(70, 512, dtype=dtype)


def rows(ragged: bool = False, lens: bool = True) -> Rows:
    if ragged:
        return Rows(torch.zeros(1280, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), 640, ragged=True)
    return Rows(torch.zeros(2, 640, dtype=torch.int32), torch.zeros(2, dtype=torch.int32) if lens else None, 640)


@pytest.mark.parametrize(
    ("target", "heads", "dtype", "ragged"),
    [
        *((target, 64, torch.bfloat16, number % 2 == 0) for number, target in enumerate(TARGETS)),
        ("sm_90", 8, torch.bfloat16, False),
        ("gfx942", 8, torch.bfloat16, True),
        ("sm_120", 64, torch.float32, False),
    ],
)
def test_it_compiles_ahead_of_time_within_shared_memory(
    target: str, heads: int, dtype: torch.dtype, ragged: bool
) -> None:
    gpu, kibibytes = GPUS[target]
    with compiled_for(TARGETS[target]) as compiled:
        portable.launch(*operands(heads, dtype), rows(ragged), 0.1, torch.zeros(heads), gpu)
    (kernel,) = compiled
    assert machine_code(kernel)
    assert kernel.metadata.shared * portable.choose_tiles(gpu, heads, dtype).resident <= kibibytes * 1024


@pytest.mark.parametrize(("heads", "sink", "ragged"), [(128, True, False), (100, False, True)])
def test_the_hopper_kernel_compiles_with_its_registers_and_asynchronous_products(
    heads: int, sink: bool, ragged: bool
) -> None:
    gpu, kibibytes = GPUS["sm_90"]
    logits = torch.zeros(heads) if sink else None
    with compiled_for(TARGETS["sm_90"]) as compiled:
        hopper.launch_hopper(*operands(heads), rows(ragged, lens=sink), 0.1, logits, gpu)
    (kernel,) = compiled
    code = kernel.asm["sass"]
    assert kernel.metadata.shared <= kibibytes * 1024
    assert code.count("USETMAXREG") >= 4
    assert code.count("LDL") + code.count("STL") <= MOST_SPILLS
    # Each warpgroup looks up how long each row is. Triton has once let one use the first row's length for all.
    assert len(re.findall(r"tt\.load \S+ : !tt\.ptr<i32>", kernel.asm["ttgir"])) == (8 if ragged else 4)
    # No thread of a warp goes another way than its neighbours: what follows are instructions of whole warps.
    assert "BSSY" not in code
    # Products that wait for each other would each be fenced off by an arrival of their own.
    assert code.count("HGMMA") >= 72 and code.count("WARPGROUP.ARRIVE") <= 8
    assert code.count("LDGSTS.E.BYPASS.128") == 32  # a thread's copies of a block of keys


def fusion(rope: int = 64, tokens: int = 2, **options: Any) -> Fusion:
    return Fusion(torch.zeros(tokens, dtype=torch.int64), torch.zeros(70, rope), **options)


NORM, BACK = {"q_norm_eps": 1e-6}, {"inverse_rope": True}


@pytest.mark.parametrize(
    ("heads", "ragged", "options"),
    [
        (128, False, NORM),
        (64, True, BACK),
        (100, False, NORM | BACK),
        (64, False, NORM | BACK | {"n_groups": 8, "heads_per_group": 8}),
        (128, False, NORM | BACK | {"n_groups": 8, "heads_per_group": 16, "packed_scales": True}),
    ],
)
def test_with_all_that_is_fused_it_spills_nothing_and_products_stay_asynchronous(
    heads: int, ragged: bool, options: dict[str, Any]
) -> None:
    with compiled_for(TARGETS["sm_90"]) as compiled:
        hopper.launch_fused(
            *operands(heads), rows(ragged), 0.1, torch.zeros(heads), GPUS["sm_90"][0], fusion(**options)
        )
    (kernel,) = compiled
    code, used = kernel.asm["sass"], resources(kernel)
    assert kernel.metadata.shared <= GPUS["sm_90"][1] * 1024
    assert used["STACK"] <= SPILLED and used["LOCAL"] == 0
    assert "BSSY" not in code
    # The squares of queries are four instructions, in a loop.
    normed = 4 if "q_norm_eps" in options else 0
    assert kernel.asm["ptx"].count("m64n64k16") == 2 * 512 // 16 + normed
    assert 72 + normed <= code.count("HGMMA") <= 80 and code.count("WARPGROUP.ARRIVE") <= 8
    # Outputs that are stored as they are leave by the copy engine.
    assert code.count("UTMASTG") == (0 if "inverse_rope" in options else 2)


def test_what_is_not_fused_costs_nothing() -> None:
    """A table of which nobody reads makes no other kernel, and positions may begin anywhere."""
    with compiled_for(TARGETS["sm_90"]) as compiled:
        for where in (Fusion(), fusion()):
            hopper.launch_fused(*operands(64), rows(), 0.1, None, GPUS["sm_90"][0], where)
        for first in (0, 3):
            piece = fusion(tokens=5, **NORM)._replace(positions=torch.zeros(5, dtype=torch.int64)[first:][:2])
            hopper.launch_fused(*operands(64), rows(), 0.1, None, GPUS["sm_90"][0], piece)
    assert compiled[0].hash == compiled[1].hash and compiled[2].hash == compiled[3].hash


@pytest.mark.parametrize("kernel", [hopper.launch_hopper, portable.launch])
def test_nothing_is_compiled_again_for_a_piece_of_a_batch(kernel: Any) -> None:
    lens = torch.zeros(5, dtype=torch.int32)
    with compiled_for(TARGETS["sm_90"]) as compiled:
        for first in (0, 3):
            kernel(*operands(128), rows()._replace(bounds=lens[first:][:2]), 0.1, None, GPUS["sm_90"][0])
    assert compiled[0].hash == compiled[1].hash


def test_the_hopper_kernel_leaves_what_does_not_fit_to_the_portable_one() -> None:
    q, kv = operands(64)
    sink, some = torch.zeros(64), rows()
    assert (
        hopper.hopper_refuses(q, kv, some, 0.1, sink)
        == hopper.hopper_refuses(q, kv, rows(ragged=True), 2.0, None)
        == ""
    )
    fused = torch.zeros(2, 64 * 512 + 64, dtype=torch.bfloat16)
    apart, uneven = (fused[:, first:][:, : 64 * 512].unflatten(1, (64, 512)) for first in (8, 1))
    wide = torch.zeros(70, 520, dtype=torch.bfloat16)
    calls = {
        "bfloat16 vectors": (q.half(), kv, some, 0.1, sink),
        "of 512 dims": (q[..., :256], kv[:, :256], some, 0.1, sink),
        "that are rows": (strided(q), kv, some, 0.1, sink),
        "of their own": (q[:, :1].expand(2, 64, 512), kv, some, 0.1, sink),
        "that has rows": (q, kv[:0], some, 0.1, sink),
        "elements apart": (q, wide[:, :512], some, 0.1, sink),
        "start at": (uneven, kv, some, 0.1, sink),
        "positive scales": (q, kv, some, -0.1, sink),
        "neighbours": (q, kv, some._replace(indices=strided(some.indices)), 0.1, sink),
    }
    for reason, call in calls.items():
        assert reason in hopper.hopper_refuses(*call)
    for table in (
        torch.zeros(70, 66),
        strided(torch.zeros(70, 64)),
        torch.zeros(1, 64).as_strided((1, 64), (2**31, 1)),
    ):
        where = fusion(**NORM)._replace(cos_sin_cache=table)
        assert "64 columns at most" in hopper.hopper_refuses(q, kv, some, 0.1, sink, where)
    assert hopper.hopper_refuses(apart, kv, some, 0.1, sink, fusion(**NORM)) == ""
    assert hopper.hopper_refuses(q[:1, :1].as_strided((1, 1, 512), (1, 3, 1)), kv, some, 0.1, sink) == ""
