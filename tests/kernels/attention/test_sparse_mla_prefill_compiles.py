"""The prefill kernels compiled ahead of time, and the calls that the sm_90 kernel supports."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_compile._compat import triton_release
from dsv4_compile.kernels.attention import sparse_mla_prefill, sparse_mla_prefill_sm90
from dsv4_compile.kernels.attention.common import FusedParts
from dsv4_compile.kernels.attention.sparse_mla_prefill import IndexRows, PrefillCall
from dsv4_compile.testing import strided
from tests.kernels.gpus import GPUS
from tests.support.fake_triton import TARGETS
from tests.tools.compiled_facts import compiled_for

# From Triton 3.8 on the accumulator of the left warpgroup does not quite fit its registers.
MOST_SPILLS = 4 if triton_release() < (3, 8) else 128
# Bytes that a thread with fused parts spills, from Triton 3.9 on.
SPILLED = 0 if triton_release() < (3, 9) else 216


SM90 = GPUS["sm_90"][0]


def index_rows(ragged: bool = False, lens: bool = True) -> IndexRows:
    if ragged:
        return IndexRows(torch.zeros(1280, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), 640, ragged=True)
    bounds = torch.zeros(2, dtype=torch.int32) if lens else None
    return IndexRows(torch.zeros(2, 640, dtype=torch.int32), bounds, 640)


def make_call(
    heads: int, rows: IndexRows | None = None, sink: bool = False, dtype: torch.dtype = torch.bfloat16
) -> PrefillCall:
    q, kv = torch.zeros(2, heads, 512, dtype=dtype), torch.zeros(70, 512, dtype=dtype)
    return PrefillCall(q, kv, rows or index_rows(), 0.1, torch.zeros(heads) if sink else None)


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
    with compiled_for(target) as compiled:
        sparse_mla_prefill.launch(make_call(heads, index_rows(ragged), sink=True, dtype=dtype), gpu)
    (kernel,) = compiled
    assert kernel.assembled
    assert kernel.metadata.shared * sparse_mla_prefill.choose_tiles(gpu, heads, dtype).resident <= kibibytes * 1024


@pytest.mark.parametrize(("heads", "sink", "ragged"), [(128, True, False), (100, False, True)])
def test_the_sm90_kernel_compiles_with_its_registers_and_asynchronous_gemms(
    heads: int, sink: bool, ragged: bool
) -> None:
    gpu, kibibytes = GPUS["sm_90"]
    with compiled_for("sm_90") as compiled:
        sparse_mla_prefill_sm90.launch(make_call(heads, index_rows(ragged, lens=sink), sink), gpu)
    (kernel,) = compiled
    code = kernel.asm["sass"]
    assert kernel.metadata.shared <= kibibytes * 1024
    assert code.count("USETMAXREG") >= 4
    assert code.count("LDL") + code.count("STL") <= MOST_SPILLS
    # Each warpgroup looks up how long each row is. Triton has once let one use the first row's length for all.
    assert len(kernel.asm["ttgir"].findall(r"tt\.load \S+ : !tt\.ptr<i32>")) == (8 if ragged else 4)
    # No branch splits a warp: what follows are instructions of whole warps.
    assert "BSSY" not in code
    # GEMMs that wait for each other would have one arrival each.
    assert code.count("HGMMA") >= 72 and code.count("WARPGROUP.ARRIVE") <= 8
    assert code.count("LDGSTS.E.BYPASS.128") == 32  # a thread's copies of a block of keys


def fused_parts(rope: int = 64, tokens: int = 2, **options: Any) -> FusedParts:
    return FusedParts(torch.zeros(tokens, dtype=torch.int64), torch.zeros(70, rope), **options)


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
def test_with_fused_parts_it_spills_nothing_and_gemms_stay_asynchronous(
    heads: int, ragged: bool, options: dict[str, Any]
) -> None:
    with compiled_for("sm_90") as compiled:
        sparse_mla_prefill_sm90.launch_fused(
            make_call(heads, index_rows(ragged), sink=True), SM90, fused_parts(**options)
        )
    (kernel,) = compiled
    code, used = kernel.asm["sass"], kernel.resources()
    assert kernel.metadata.shared <= GPUS["sm_90"][1] * 1024
    assert used["STACK"] <= SPILLED and used["LOCAL"] == 0
    assert "BSSY" not in code
    # The squares of queries are four instructions, in a loop.
    normed = 4 if "q_norm_eps" in options else 0
    assert kernel.asm["ptx"].count("m64n64k16") == 2 * 512 // 16 + normed
    assert 72 + normed <= code.count("HGMMA") <= 80 and code.count("WARPGROUP.ARRIVE") <= 8
    # Outputs that are neither rotated nor quantised leave by TMA.
    assert code.count("UTMASTG") == (0 if "inverse_rope" in options else 2)


def test_unused_parts_cost_nothing() -> None:
    """An unused table does not make a second kernel, and positions may begin anywhere."""
    with compiled_for("sm_90") as compiled:
        for parts in (FusedParts(), fused_parts()):
            sparse_mla_prefill_sm90.launch_fused(make_call(64), SM90, parts)
        for first in (0, 3):
            piece = fused_parts(tokens=5, **NORM)._replace(positions=torch.zeros(5, dtype=torch.int64)[first:][:2])
            sparse_mla_prefill_sm90.launch_fused(make_call(64), SM90, piece)
    assert compiled[0].hash == compiled[1].hash and compiled[2].hash == compiled[3].hash


@pytest.mark.parametrize("kernel", [sparse_mla_prefill_sm90, sparse_mla_prefill])
def test_nothing_is_compiled_again_for_a_piece_of_a_batch(kernel: Any) -> None:
    lens = torch.zeros(5, dtype=torch.int32)
    with compiled_for("sm_90") as compiled:
        for first in (0, 3):
            kernel.launch(make_call(128, index_rows()._replace(bounds=lens[first:][:2])), SM90)
    assert compiled[0].hash == compiled[1].hash


def test_unsupported_calls_of_the_sm90_kernel_say_why() -> None:
    why_unsupported = sparse_mla_prefill_sm90.why_unsupported
    usual = make_call(64, sink=True)
    q, kv, rows = usual.q, usual.kv, usual.rows
    assert why_unsupported(usual) == ""
    assert why_unsupported(make_call(64, index_rows(ragged=True))._replace(scale=2.0)) == ""
    wider = torch.zeros(2, 64 * 512 + 64, dtype=torch.bfloat16)
    apart, uneven = (wider[:, first:][:, : 64 * 512].unflatten(1, (64, 512)) for first in (8, 1))
    wide = torch.zeros(70, 520, dtype=torch.bfloat16)
    changes: dict[str, dict[str, Any]] = {
        "bfloat16 vectors": {"q": q.half()},
        "of 512 dims": {"q": q[..., :256], "kv": kv[:, :256]},
        "last dim of q is contiguous": {"q": strided(q)},
        "do not overlap": {"q": q[:, :1].expand(2, 64, 512)},
        "that has rows": {"kv": kv[:0]},
        "elements apart": {"kv": wide[:, :512]},
        "start at": {"q": uneven},
        "scale is positive": {"scale": -0.1},
        "last dim of indices is contiguous": {"rows": rows._replace(indices=strided(rows.indices))},
    }
    for reason, change in changes.items():
        assert reason in why_unsupported(usual._replace(**change))
    for table, reason in (
        (torch.zeros(70, 66), "at most 64 columns"),
        (strided(torch.zeros(70, 64)), "last dim of cos_sin_cache is contiguous"),
        (torch.zeros(1, 64).as_strided((1, 64), (2**31, 1)), "at most 64 columns"),
    ):
        assert reason in why_unsupported(usual, fused_parts(**NORM)._replace(cos_sin_cache=table))
    assert why_unsupported(usual._replace(q=apart), fused_parts(**NORM)) == ""
    assert why_unsupported(usual._replace(q=q[:1, :1].as_strided((1, 1, 512), (1, 3, 1)))) == ""
