"""The decode kernel for sm_90 over mxfp8 and nvfp4, simulated against the reference, and compiled."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dsv4_compile import layout
from dsv4_compile.kernels.attention import sparse_mla_mixed_sm90 as kernel
from dsv4_compile.kernels.attention.common import Outputs
from dsv4_compile.reference.attention.sparse_mla_mixed import MixedArguments
from dsv4_compile.reference.common.row_format import store_rows
from dsv4_compile.testing import assert_bitwise, assert_close, poisoned_empty
from tests.kernels.attention.test_sparse_mla_mixed import PAGE, REFERENCE, SLOTS, arguments
from tests.kernels.gpus import GPUS
from tests.simulator.copies import simulated
from tests.simulator.decode import GPU
from tests.tools.compiled_facts import compiled_for


@pytest.fixture(scope="module")
def hopper() -> Any:
    """Return the launcher of a call with a number of splits, simulated."""
    many = simulated("attention.sparse_mla_decode_sm90")

    def launch(a: MixedArguments, splits: int) -> torch.Tensor:
        out = torch.empty(a.q.shape, dtype=a.q.dtype)
        call = kernel.call_of(a)
        with poisoned_empty(), torch.no_grad():
            many.launch_into(Outputs(out, None), call, GPU, splits)
        return out

    return launch


def of_model(tokens: int = 3, heads: int = 64, window: int = 100, entries: int = 150, **options: Any) -> MixedArguments:
    return arguments(tokens, heads, window, entries, **{"dim": 512, **options})


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("splits", "heads", "widths"),
    [(1, 64, (100, 150)), (2, 33, (20, 70)), (3, 64, (130, 64)), (1, 64, (0, 65)), (2, 64, (70, 0)), (1, 100, (1, 1))],
)
def test_results_are_those_of_the_reference(hopper: Any, splits: int, heads: int, widths: tuple[int, int]) -> None:
    a = of_model(2, heads, *widths)
    assert_close(hopper(a, splits), REFERENCE(*a), "attention_few_keys", label="out")


@pytest.mark.interpreted
def test_a_layer_of_a_window_alone(hopper: Any) -> None:
    a = of_model(2, formats=("mxfp8", ""))
    assert_close(hopper(a, 1), REFERENCE(*a), "attention_few_keys", label="out")


@pytest.mark.interpreted
def test_one_key_gives_its_exact_values(hopper: Any) -> None:
    """Every code of e2m1 and e4m3 with scales of many sizes: a token that attends one row returns it."""
    a = of_model(12, window=1, entries=1)
    assert a.entries is not None and a.entry_slots is not None
    scale = torch.logspace(-9, 9, SLOTS, base=2)[:, None]
    for cache, fmt in ((a.window, "mxfp8"), (a.entries, "nvfp4")):
        store_rows(cache, fmt, PAGE, torch.arange(SLOTS), torch.randn(SLOTS, 512) * scale)
    slots = torch.arange(12, dtype=torch.int32)[:, None] * 4
    none = torch.full_like(slots, -1)
    for first, second in ((slots, none), (none, slots)):
        call = a._replace(window_slots=first, entry_slots=second, sink=torch.full((64,), -math.inf))
        assert_bitwise(hopper(call, 1), REFERENCE(*call))


@pytest.mark.interpreted
@pytest.mark.parametrize("splits", [1, 2])
def test_rows_of_nan_reach_only_tokens_that_attend_them(hopper: Any, splits: int) -> None:
    """The first row, which is loaded for invalid slots, is NaN, as are unused ones."""
    a = of_model(3, window=40, entries=50)
    assert a.entries is not None and a.entry_slots is not None
    bad = torch.full((2, 512), math.nan)
    for cache, slots, fmt in ((a.window, a.window_slots, "mxfp8"), (a.entries, a.entry_slots, "nvfp4")):
        slots[slots < 2] = -1
        store_rows(cache, fmt, PAGE, torch.arange(2), bad)
    a.window_slots[0], a.entry_slots[0] = -1, -1
    want, got = REFERENCE(*a), hopper(a, splits)
    assert got.isfinite().all() and (got[0] == 0).all()
    assert_close(got, want, "attention_few_keys", label="out")
    for slots in (a.window_slots, a.entry_slots):
        mine = slots.clone()
        mine[1, 7] = 1
        attending = a._replace(**{"window_slots" if slots is a.window_slots else "entry_slots": mine})
        assert REFERENCE(*attending)[1].isnan().all()
        result = hopper(attending, splits)
        assert result[1].isnan().all()
        assert_bitwise(result[2], got[2])


@pytest.mark.interpreted
def test_hostile_slots_are_no_keys(hopper: Any) -> None:
    a = of_model(2, window=40, entries=50)
    assert a.entry_slots is not None
    for slots in (a.window_slots, a.entry_slots):
        slots[:, ::3] = torch.tensor([[SLOTS], [-(2**31)]])
        slots[:, 1::5] = 2**31 - 1
    assert_close(hopper(a, 2), REFERENCE(*a), "attention_few_keys", label="out")
    wide = a._replace(window_slots=a.window_slots.long() + 2**32, entry_slots=a.entry_slots.long())
    assert_close(hopper(wide, 1), REFERENCE(*wide), "attention_few_keys", label="out")


def test_calls_of_other_kernels_have_a_reason() -> None:
    a = of_model(8)
    assert kernel.why_unsupported(a) == ""
    assert kernel.why_unsupported(of_model(8, formats=("mxfp8", ""))) == ""
    other: dict[str, MixedArguments] = {
        "heads or more": of_model(8, 32),
        "torch.float16": a._replace(q=a.q.half()),
        "mxfp8 and mxfp8": of_model(8, formats=("mxfp8", "mxfp8")),
        "plain and nvfp4": of_model(8, formats=("plain", "nvfp4")),
        "contiguous, these have stride 2": a._replace(window_slots=a.window_slots[:, ::2]),
        "channels and sinks": a._replace(sink=torch.zeros(128)[::2]),
        "of 64": arguments(8, 64),
    }
    for reason, call in other.items():
        assert reason in kernel.why_unsupported(call), reason
    pages = layout.byte_pages(a.window, "mxfp8", PAGE, head_dim=512)
    shifted = torch.zeros(pages.numel() + 8, dtype=torch.uint8)[8:].view(pages.shape)
    assert "multiples of 16 bytes" in kernel.why_unsupported(a._replace(window=shifted))


@pytest.mark.parametrize("splits", [1, 5])
def test_it_compiles_with_few_registers_on_the_stack(splits: int) -> None:
    a = of_model(8, window=128, entries=512)
    with compiled_for("sm_90") as compiled:
        kernel.launch(a, GPUS["sm_90"][0], splits)
    assert compiled[0].resources()["STACK"] <= 56
    assert compiled[0].metadata.name == "sparse_mla_decode_sm90_kernel"
