"""IR of `compress_norm_rope_insert` on a GPU against the reference on the same GPU: what is cached, and launches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from dsv4_compile import layout
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.testing import assert_cached, assert_close
from tests.gpu.lowered import as_ir, launches
from tests.gpu.preprocess.test_compress_norm_rope_insert import CACHE, LAYERS, NEIGHBOURS, arguments, storage

OP, TENSORS, SLOTS = "compress_norm_rope_insert", 9, 5
PER_TOKEN = (1, 2, 3, 4, 5)
"""State slots, tables, owners, positions and slots: in these inputs a token is a request."""


def split(args: tuple[Any, ...]) -> tuple[list[Any], Callable[..., Any]]:
    """Split a call into its tensors and a function that calls an op with them and the other arguments."""
    tensors = [*args[:TENSORS], args[15]] if args[15] is not None else list(args[:TENSORS])

    def call(op: Any, *given: Any) -> None:
        op(*given[:TENSORS], *args[TENSORS:15], given[TENSORS] if len(given) > TENSORS else None)

    return tensors, call


@pytest.mark.parametrize(("ratio", "dim", "fmt", "hadamard"), LAYERS)
@torch.inference_mode()
def test_entries_are_those_of_the_reference(ratio: int, dim: int, fmt: str, hadamard: bool) -> None:
    _, call = split(arguments(2, ratio, dim, fmt, hadamard))
    compiled = as_ir(OP, call)
    for tokens in (33, 512, 4099, 2, 1):
        args = arguments(tokens, ratio, dim, fmt, hadamard)
        tensors, same = split(args)
        cache, results = args[CACHE], []
        for index in PER_TOKEN if tokens > 1 else ():
            torch._dynamo.mark_dynamic(tensors[index], 0)
        torch._dynamo.maybe_mark_dynamic(cache, 0)
        for run in (compiled, partial(same, REFERENCES[OP])):
            storage(cache).fill_(0)
            run(*tensors)
            results.append(storage(cache).clone().view(cache.dtype).as_strided(cache.shape, cache.stride()))
        ours, theirs = results
        if fmt == "plain":
            assert_close(ours, theirs, NEIGHBOURS)
            continue
        ties = assert_cached(ours, theirs, fmt, args[12], transformed=hadamard, pooled=ratio)
        # A value of two bytes may differ in both; nothing else was written.
        assert (storage(ours) != storage(theirs)).sum() <= 2 * ties


@pytest.mark.parametrize(
    ("ratio", "dim", "fmt", "expected"),
    [(4, 512, "fp8_ds_mla", 3), (128, 512, "fp8_ds_mla", 3), (4, 128, "indexer_fp8", 2)],
)
@torch.inference_mode()
def test_launches_without_a_copy(ratio: int, dim: int, fmt: str, expected: int) -> None:
    tensors, call = split(arguments(250, ratio, dim, fmt))
    assert len(launches(OP, call, tensors)) == expected


@torch.inference_mode()
def test_a_cache_of_more_than_2_31_bytes() -> None:
    args = list(arguments(300, 4, 512, "fp8_ds_mla"))
    near, block = args[CACHE], args[12]
    results = []
    pages = 2**31 // near.stride(0) + 2 * len(near)
    args[SLOTS] = torch.where(args[SLOTS] >= 0, args[SLOTS] + (pages - len(near)) * block, -1)
    for impl in ("ir", "reference"):
        args[CACHE] = layout.allocate_cache("fp8_ds_mla", pages, block, device="cuda")
        tensors, call = split(tuple(args))
        (as_ir(OP, call) if impl == "ir" else partial(call, REFERENCES[OP]))(*tensors)
        assert not args[CACHE][: -len(near)].any()
        results.append(args[CACHE][-len(near) :].clone())
    assert results[1].any()
    assert_cached(*results, "fp8_ds_mla", block, transformed=False, pooled=4)
