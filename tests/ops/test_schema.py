"""Schemas are inferred from references: types, defaults, results, and the tensors that are written."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dsv4_compile.ops.common.schema import infer_schema


class Arguments(NamedTuple):
    x: Tensor
    cache: Tensor
    more: Tensor | None = None
    eps: float = 1e-6
    rows: int = 3
    name: str = "plain"
    dtype: torch.dtype | None = None


def plain(x: Tensor, cache: Tensor, rows: int, flag: bool = False) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


def packed(call: Arguments) -> None:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("reference", "arguments", "mutates", "schema"),
    [
        (plain, None, (), "op(Tensor x, Tensor cache, int rows, bool flag=False) -> (Tensor, Tensor)"),
        (plain, None, ("cache",), "op(Tensor x, Tensor(a!) cache, int rows, bool flag=False) -> (Tensor, Tensor)"),
        (
            packed,
            Arguments,
            ("more", "x"),
            "op(Tensor(a!) x, Tensor cache, Tensor(b!)? more=None, float eps=1e-06, int rows=3, "
            'str name="plain", ScalarType? dtype=None) -> ()',
        ),
    ],
)
def test_schema_says_what_the_reference_says(reference: Any, arguments: Any, mutates: Any, schema: str) -> None:
    assert infer_schema("op", reference, arguments, mutates) == schema
    torch._C.parse_schema(schema)


def test_a_tensor_that_is_written_has_to_be_an_argument() -> None:
    with pytest.raises(ValueError, match="mutates_args"):
        infer_schema("op", plain, None, ("cash",))
