"""Refusals of calls that lack tensors: graphs do not have mutated ones, callers leave optional ones out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dsv4_compile.ops.common.kernels import KERNELS, refusal
from dsv4_compile.testing.samples import op_samples

REFUSING = [op for op in sorted(KERNELS) if refusal(op) is not None]


def incomplete(op: str) -> Iterator[tuple[str, list[Any]]]:
    """Yield what is missing, and the arguments of a call: all that the op mutates, and one optional tensor more."""
    declared = getattr(torch.ops.dsv4, op).default._schema.arguments
    mutated = {i for i, one in enumerate(declared) if one.alias_info is not None and one.alias_info.is_write}
    optional = {i for i, one in enumerate(declared) if str(one.type) == "Optional[Tensor]"} - mutated
    for args in op_samples(op):
        for missing in [set(), *({i} for i in optional if i < len(args))]:
            names = ", ".join(declared[i].name for i in sorted(mutated | missing))
            yield names, [None if i in mutated | missing else value for i, value in enumerate(args)]


@pytest.mark.parametrize("op", REFUSING)
def test_a_call_without_mutated_and_optional_tensors_gets_an_answer(op: str) -> None:
    refuses = refusal(op)
    assert refuses is not None
    for missing, args in incomplete(op):
        try:
            assert isinstance(refuses(*args), str)
        except (AttributeError, TypeError) as fault:
            pytest.fail(f"why_unsupported_{op} needs {missing}: {fault}")
