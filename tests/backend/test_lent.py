"""Texts that Inductor is lent: arguments of an op in errors are short, whatever led to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.exc import OperatorIssue
from torch._inductor.lowering import lowerings


@pytest.fixture
def failing() -> Iterator[Any]:
    """An op of a foreign library with a lowering that raises."""

    @torch.library.custom_op("dsv4_test_lent::fails", mutates_args=())
    def fails(x: Tensor, several: list[Tensor], text: str, factor: float = 2.0) -> Tensor:
        return x.clone()

    fails.register_fake(lambda x, several, text, factor=2.0: torch.empty_like(x))
    op = torch.ops.dsv4_test_lent.fails.default

    def lower(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("not today")

    lowerings[op] = lower
    yield op
    del lowerings[op]


def test_arguments_of_an_op_that_fails_are_named_by_kind_and_size(failing: Any) -> None:
    before = OperatorIssue.operator_str

    def model(x: Tensor) -> Tensor:
        for _ in range(12):
            x = x.sin() + x.cos()
        return torch.ops.dsv4_test_lent.fails(x, [x + 1, x[:3]], "a text", 3.0)

    with pytest.raises(Exception, match="not today") as error:
        torch.compile(model, backend="dsv4", fullgraph=True)(torch.randn(7))
    text = str(error.value)
    assert "target: dsv4_test_lent.fails.default" in text
    assert "args[0]: TensorBox torch.float32 [7]" in text
    assert "args[1]: [TensorBox torch.float32 [7], TensorBox torch.float32 [3]]" in text
    assert "args[2]: 'a text'" in text and "args[3]: 3.0" in text
    assert "inner_fn" not in text
    assert OperatorIssue.operator_str is before
