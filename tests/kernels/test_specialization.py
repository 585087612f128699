"""What Triton compiles a kernel again for: not for where in a batch's arrays a piece of the batch begins."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import pytest
from torch import Tensor
from triton.runtime import JITFunction

from dsv4_compile.kernels.host.gpu import Gpu
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.ops.common.kernels import KERNELS, launcher, refusal
from dsv4_compile.testing.samples import op_samples
from tests.support import fake_triton

MODULES = (
    *("linear.gemm", "attention.sparse_mla_decode", "attention.sparse_mla_prefill"),
    *("indexer.indexer_logits", "indexer.select_topk"),
)

WHOLE = {
    *("advance", "batch_metadata", "copy_ragged_to_graph_buffers", "preprocess_insert", "preprocess_insert_quant"),
    *("accept_drafts", "markov_drafts"),
}
"""Ops that are given a step whole, in buffers that begin where memory does."""


def specializations(op: str, args: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """Return the launches of a call on Hopper: the kernel, and the arguments that its compiled code depends on."""
    launches: list[tuple[str, Any]] = []

    def bind(self: Any, *values: Any, grid: Any, warmup: bool, **options: Any) -> None:
        *_, binder = self.create_binder()
        _, specialization, rest = binder(*values, debug=False, instrumentation_mode="", **options)
        launches.append((self.fn.__name__, (specialization, sorted(rest.items()))))

    with (
        mock.patch.object(fake_triton.triton_driver, "_active", fake_triton.FakeDriver(fake_triton.HOPPER)),
        mock.patch.object(JITFunction, "run", bind),
    ):
        launcher(op)(*args)
    return launches


def shifted(value: Any, name: str) -> Any:
    """A copy of a list of integers, one for each token or request, that does not begin at a multiple of 16 bytes."""
    if not isinstance(value, Tensor) or value.dim() != 1 or value.is_floating_point() or "indices" in name:
        return value
    room = value.new_empty(value.shape[0] + 1)[1:] if value.is_contiguous() else value
    return room.copy_(value)


@pytest.mark.parametrize("op", sorted(KERNELS.keys() - WHOLE))
def test_nothing_is_compiled_again_for_a_piece_of_a_batch(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in MODULES:
        kernels = importlib.import_module(f"dsv4_compile.kernels.{module}")
        monkeypatch.setattr(kernels, "gpu_of", lambda device: Gpu("cuda", 90, 132))
    names, refuses = [argument.name for argument in OPS[op]._schema.arguments], refusal(op)
    for args in op_samples(op):
        if refuses is not None and refuses(*args):
            continue
        piece = tuple(shifted(value, name) for value, name in zip(args, names, strict=False))
        for (kernel, full), (again, partial) in zip(specializations(op, args), specializations(op, piece), strict=True):
            assert (kernel, full) == (again, partial)


def test_nothing_is_compiled_again_for_other_numbers_of_gathered_keys() -> None:
    op = "indexer_logits_topk_ragged"
    before, k, k_scale, after = (lambda args: (args[:3], args[3], args[4], args[5:]))(op_samples(op)[0])
    first, second = (
        specializations(
            op, (*before, k.new_zeros(rows, *k.shape[1:]), k_scale.new_zeros(rows, *k_scale.shape[1:]), *after)
        )
        for rows in (33, 48)
    )
    assert first == second
