"""Tests of `x * 1` and `x + 0` in compiled graphs: copies of memory that is written, returned or read elsewhere."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.passes.identities import keeping_copies

aten: Any = torch.ops.aten
COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "* 1": lambda x: x * 1,
    "1.0 *": lambda x: 1.0 * x,
    "+ 0": lambda x: x + 0,
    "- 0": lambda x: x - 0,
    "/ 1": lambda x: x / 1,
    "* ones": lambda x: x * torch.ones(x.shape),
    "+ zeros": lambda x: x + torch.zeros(x.shape),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "row": lambda x: x[0],
    "rows": lambda x: x[1:3],
    "every second column": lambda x: x[:, ::2],
    "transposed": lambda x: x.t(),
    "flat": lambda x: x.view(-1),
}


@pytest.fixture
def write() -> Iterator[Any]:
    """An op of a foreign library that adds 1 to a tensor in place."""

    @torch.library.custom_op("dsv4_test_identities::write", mutates_args=("x",))
    def write(x: Tensor) -> None:
        x.add_(1)

    write.register_fake(lambda x: None)
    torch.compiler.reset()
    yield write


def assert_compiled_as_eager(model: Callable[[Tensor], list[Tensor]]) -> None:
    """Compare results, their strides and the input's new values; no result may lie in the memory of any other."""
    eager, inputs = torch.rand(6, 4), torch.empty(6, 4)
    inputs.copy_(eager)
    wanted = [result.clone(memory_format=torch.preserve_format) for result in model(eager)]
    results = torch.compile(model, backend="dsv4", fullgraph=True)(inputs)
    torch.testing.assert_close(results, wanted, rtol=0, atol=0)
    torch.testing.assert_close(inputs, eager, rtol=0, atol=0)
    assert [result.stride() for result in results] == [result.stride() for result in wanted]
    assert len({tensor.untyped_storage().data_ptr() for tensor in [inputs, *results]}) == 1 + len(results)


@torch.no_grad()
@pytest.mark.parametrize("written", ["by ATen", "by an op", "not at all"])
def test_a_copy_has_the_values_before_a_write_and_memory_that_no_other_has(written: str, write: Any) -> None:
    def model(x: Tensor) -> list[Tensor]:
        copies = [copy(view(x)) for view in VIEWS.values() for copy in COPIES.values()]
        if written == "by ATen":
            x.add_(1)
        elif written == "by an op":
            write(x)
        return copies

    assert_compiled_as_eager(model)


@torch.no_grad()
def test_two_results_do_not_share_memory() -> None:
    def model(x: Tensor) -> list[Tensor]:
        y = x * 3
        return [y, y * 1, y[0] + 0, y * torch.ones(6, 4)]

    assert_compiled_as_eager(model)


@pytest.mark.parametrize("model", [lambda x: x.detach(), lambda x: x.t().t(), lambda x: x.contiguous()])
def test_a_graph_that_computes_nothing_compiles(model: Callable[[Tensor], Tensor]) -> None:
    torch.compiler.reset()
    x = torch.rand(2, 3)
    torch.testing.assert_close(torch.compile(model, backend="dsv4", fullgraph=True)(x), x, rtol=0, atol=0)


def test_only_copies_of_shared_memory_are_kept() -> None:
    """A product of a value that has no second name may go, and so may one that only other products read."""
    graph = torch.fx.Graph()

    def traced(target: Any, *args: Any) -> torch.fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = target(*(value.meta["val"] if isinstance(value, torch.fx.Node) else value for value in args))
        return node

    x, unviewed = graph.placeholder("x"), graph.placeholder("unviewed")
    x.meta["val"] = torch.empty(4, 4)
    unviewed.meta["val"] = torch.empty(4, 4)
    free, viewed, returned = (traced(aten.mul.Scalar, x, factor) for factor in (3, 4, 5))
    traced(aten.select.int, viewed, 0, 0)
    row = traced(aten.select.int, x, 0, 0)
    products = [traced(aten.mul.Tensor, value, 1) for value in (free, unviewed, viewed, returned, row)]
    pair = traced(aten.sort.default, products[0])
    graph.output((traced(operator.getitem, pair, 0), returned, *products[3:]))
    seen: list[torch.fx.Node] = []

    def remove_no_ops(gm: Any, zeros: Any, ones: Any) -> None:
        seen.extend(gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor))
        raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        keeping_copies(remove_no_ops)(SimpleNamespace(graph=graph), set(), set())  # type: ignore[arg-type]
    assert seen == products[:1]
    assert graph.find_nodes(op="call_function", target=aten.mul.Tensor) == products
