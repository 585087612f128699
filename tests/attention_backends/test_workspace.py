"""The workspace of prefills: reserved once, fixed address, and the same result in several chunks."""

from __future__ import annotations

import random

import pytest
import torch

from dsv4_compile.attention_backends.workspace import Workspace
from dsv4_compile.errors import InputError
from dsv4_compile.testing import assert_bitwise, assert_close
from dsv4_compile.testing.batch import Batch
from tests.attention_backends.systems import Layer, Setup, case_of


def test_locked_workspace_keeps_its_address_and_does_not_grow() -> None:
    workspace = Workspace()
    workspace.reserve(((3, 5), torch.bfloat16), ((7,), torch.float32))
    workspace.lock()
    first, second = workspace.get_simultaneous(((3, 5), torch.bfloat16), ((7,), torch.float32))
    assert (first.shape, first.dtype, second.shape, second.dtype) == ((3, 5), torch.bfloat16, (7,), torch.float32)
    assert second.data_ptr() - first.data_ptr() == 256
    first.fill_(1.0)
    second.fill_(2.0)
    assert (first == 1).all()
    assert workspace.get_simultaneous(((2,), torch.int32))[0].data_ptr() == first.data_ptr()
    with pytest.raises(InputError, match="E204"):
        workspace.get_simultaneous(((1000,), torch.float32))


def test_prefill_in_several_chunks_in_a_reserved_workspace_is_exact(seed: int) -> None:
    rng = random.Random(seed)
    batch = Batch((1, 6, 9, 30, 4, 12, 5, 0), (200, 6, 150, 30, 129, 290, 77, 0), padding=2)
    for name in ("FLASHMLA_SPARSE_DSV4", "ROCM_FLASHMLA_SPARSE_DSV4"):
        setup = Setup(name, "fp8_ds_mla", 4)
        case = case_of(rng, setup, batch)
        workspace = Workspace()
        reserved = Layer(setup, case, workspace=workspace)
        reserved.module.reserve_workspace()
        workspace.lock()
        out = reserved.module(*reserved.arguments(case))
        assert_close(out, case.expected())
        free = Layer(setup, case)
        assert_bitwise(out, free.module(*free.arguments(case)))
