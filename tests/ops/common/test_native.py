"""C++ kernels of a CPU, in the calls that a small model makes, against the references of the ops that they are for."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile._compat import TorchDispatchMode
from dsv4_compile.cpu import native
from dsv4_compile.cpu.moe.moe_experts import moe_experts
from dsv4_compile.hf import convert
from dsv4_compile.hf.tiny import tiny_model
from dsv4_compile.ops.common.define import EAGER, OPS, REFERENCES
from dsv4_compile.reference.moe.moe_experts import ExpertsArguments
from dsv4_compile.testing import assert_bitwise

pytestmark = pytest.mark.usefixtures("native_kernels")

Calls = list[tuple[str, list[Any]]]
KERNELS = {
    "attend": "sparse_mla_decode",
    "add_rows": "moe_experts",
    "clamped_swiglu": "moe_experts",
    "indexer_topk": "indexer_logits_topk",
    "matmul": "grouped_linear",
    "rms_norm": "fused_q_kv_rmsnorm",
    "rope": "inv_rope",
}
"""Ops of the kernels that are not named like theirs."""


class Recorder(TorchDispatchMode):
    """Keeps copies of the arguments of every op of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Calls = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "dsv4":
            name = func._schema.name.removeprefix("dsv4::")
            self.calls.append((name, [value.clone() if isinstance(value, Tensor) else value for value in args]))
        return func(*args, **kwargs or {})


@pytest.fixture(scope="module")
def recorded() -> Calls:
    """Calls of a padded prefill and of decode steps that close groups of both ratios; tokens equal eager ones."""
    eager, model = tiny_model(3), tiny_model(3)
    convert(model, max_batch_size=3, max_seq_len=200, attention_only=False)
    ids = torch.randint(1, 512, (3, 126))
    mask = torch.ones_like(ids)
    mask[1, :60], mask[2, :125] = 0, 0
    with Recorder() as recorder:
        out = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    alone = eager.generate(ids[1:2, 60:], max_new_tokens=6, do_sample=False)
    assert torch.equal(out[1, 126:], alone[0, 66:])
    return recorder.calls


def both(op: str, args: list[Any]) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of results and arguments after a run of the op with kernels and of its reference."""
    runs = []
    for run in (EAGER[op], REFERENCES[op]):
        copies = [value.clone() if isinstance(value, Tensor) else value for value in args]
        results = run(*copies)
        results = () if results is None else results if isinstance(results, tuple) else (results,)
        runs.append([*results, *(value for value in copies if isinstance(value, Tensor))])
    return list(zip(*runs, strict=True))


def test_every_kernel_computes_what_references_do(recorded: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    called: set[str] = set()
    call = native.call
    monkeypatch.setattr(native, "call", lambda kernel, *values: (called.add(kernel), call(kernel, *values))[1])
    for op, args in recorded:
        for got, want in both(op, args):
            if got.dtype.is_floating_point:
                torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5, equal_nan=True)
            else:
                assert_bitwise(got, want)
    source = "\n".join(path.read_text() for path in native.SOURCES)
    _, _, exported = source.partition('extern "C" {')
    kernels = {line.split("(")[0].removeprefix("void ") for line in exported.splitlines() if line.startswith("void ")}
    metadata = {"token_slots", "listed_slots"}  # of a different op: tests/metadata/test_on_cpu.py
    assert called == kernels - metadata - {"rows_from"}
    assert all(KERNELS.get(kernel, kernel) in OPS for kernel in called)


def test_rotations_and_stores_keep_every_bit(recorded: Calls) -> None:
    exact = ("kv_rope_insert", "save_partial_states", "inv_rope", "mhc_post", "indexer_q_rope_quant", "global_topk")
    for op, args in recorded:
        if op in exact:
            for got, want in both(op, args):
                assert_bitwise(got, want)


def test_a_sum_is_of_one_thread_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    team = native._state["loaded"].team_of
    team.restype = ctypes.c_int64
    assert [team(struct.pack("=q", wanted)) for wanted in (1, 3)] == [1, 3]
    experts = ExpertsArguments(
        *(torch.randn(3, 96), torch.tensor([[0, 2], [2, -1], [1, 2]], dtype=torch.int32), torch.rand(3, 2)),
        *(
            torch.randn(4, 2 * 200, 96),
            torch.randn(4, 96, 200),
            None,
            None,
            torch.randn(2 * 130, 96),
            torch.randn(96, 130),
        ),
    )
    keys, slots = torch.randn(10, 8, 512), torch.randint(-1, 80, (2, 60), dtype=torch.int32)
    attention = torch.randn(2, 7, 512), keys, slots, torch.tensor([60, 41], dtype=torch.int32), 8, "plain", 0.05
    mix = torch.randn(40, 4, 1024), torch.randn(24, 4096), torch.randn(24), torch.rand(3), torch.rand(1024), 1e-6, 1e-6
    results = []
    for threads in (1, 3, 16):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append((moe_experts(experts), *EAGER["sparse_mla_decode"](*attention), *EAGER["mhc_pre"](*mix)))
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert_bitwise(got, want)


def test_a_compiler_without_threads_builds_kernels_of_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "_state", {})
    monkeypatch.setattr(native, "_OPENMP", ("-fno-such-flag-openmp", native._OPENMP[1]))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    native.build()
    assert "run on one thread" in caplog.text
    assert native._state["loaded"].team_of(struct.pack("=q", 3)) == 1


def test_slots_and_pages_that_do_not_exist_are_skipped(recorded: Calls) -> None:
    for op in ("sparse_mla_decode", "compress_norm_rope_insert", "indexer_logits_topk", "save_partial_states"):
        args = next(args for name, args in reversed(recorded) if name == op)
        for index, value in enumerate(args):
            if isinstance(value, Tensor) and not value.dtype.is_floating_point:
                for hostile in (-1, -(2**31), 2**31 - 1):
                    changed = list(args)
                    changed[index] = torch.where(torch.rand(value.shape) < 0.5, value, hostile).to(value.dtype)
                    for got, want in both(op, changed):
                        if got.dtype.is_floating_point:
                            torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5, equal_nan=True)
                        else:
                            assert_bitwise(got, want)


def test_without_a_compiler_ops_run_as_calls_of_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, recorded: Calls, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "_state", {})
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    native.build()
    assert "were not built" in caplog.text and "no-such-compiler" in caplog.text
    op, args = recorded[-1]
    assert not native.takes()
    for got, want in both(op, args):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
