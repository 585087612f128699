"""Conformance of the attention backends on the kernels, which the interpreter runs in the place of a GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dsv4_compile.attention_backends import get_backend
from dsv4_compile.ops.common.define import OPS, checked
from dsv4_compile.ops.common.kernels import KERNELS, launcher, refusal
from dsv4_compile.testing import assert_close
from dsv4_compile.testing.batch import Batch
from tests.attention_backends.record import FEW_KEYS
from tests.attention_backends.systems import Setup, any_case, any_layer, caches

BATCH = Batch((1, 2, 4, 0), (140, 7, 9, 0), padding=1)
ATTEND = {"DSV4_PAGED": {"sparse_mla_decode"}, "FLASHMLA_SPARSE_DSV4": {"sparse_mla_decode", "sparse_mla_prefill"}}
ATTEND |= {"FLASHINFER_MLA_SPARSE_DSV4": {"sparse_mla_decode"}, "FLASHINFER_MLA_SPARSE": {"sparse_mla_decode_latent"}}
ATTEND |= {"ROCM_FLASHMLA_SPARSE_DSV4": {"sparse_mla_decode_ragged", "sparse_mla_prefill_ragged"}}
SETUPS = [Setup(name, word, 1 if name == "FLASHINFER_MLA_SPARSE" else 4) for name in ATTEND for word in caches(name)]
# DSV4_PAGED runs the same kernel as FlashInfer on plain and fp8 rows: only its other format is tested.
SETUPS = [setup for setup in SETUPS if setup.name != "DSV4_PAGED" or setup.fmt == "fp8_ds_mla"]


@pytest.fixture
def launched() -> Iterator[set[str]]:
    """Every op on a CPU runs its kernel, unless that refuses; the names of those that were launched."""
    names: set[str] = set()

    def kernel(op: str) -> Any:
        def run(*args: Any) -> Any:
            refuses = refusal(op)
            arguments = [*args, *(a.default_value for a in OPS[op]._schema.arguments[len(args) :])]
            assert refuses is None or not refuses(*arguments), refuses(*arguments)
            names.add(op)
            return launcher(op)(*args)

        return run

    with torch.library._scoped_library("dsv4", "IMPL") as library:
        for op in KERNELS:
            if op in OPS:
                library.impl(op, checked(None, kernel(op)), "CPU")
        yield names


@pytest.mark.interpreted
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_kernels_give_the_exact_answer(setup: Setup, launched: set[str], seed: int) -> None:
    case = any_case(random.Random(seed), setup, BATCH)
    layer = any_layer(setup, case)
    with torch.inference_mode():
        out = layer.module(*layer.arguments(case))
    assert_close(out, case.expected(), FEW_KEYS)
    assert ATTEND[setup.name] <= launched


def test_every_backend_is_here() -> None:
    assert {setup.name for setup in SETUPS} == set(ATTEND)
    assert all(get_backend(name) for name in ATTEND)
