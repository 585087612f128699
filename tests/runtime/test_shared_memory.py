"""Tests of `dsv4.cudagraph="full"` with tensors that share memory: reads, writes and outputs equal eager's."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from dsv4_compile import _compat
from dsv4_compile.errors import DSV4Error, DSV4Warning
from dsv4_compile.runtime import Counts, counting, mark_static_inputs
from dsv4_compile.runtime.graph_inputs import inputs_in_place
from dsv4_compile.testing import assert_bitwise

STANDIN = {"dsv4.cudagraph": "full", "dsv4.cudagraph.graphs": "standin"}
REPLAYED = Counts(captures=1, replays=3, compiled=2)
"""Counts of five calls of one shape."""
LIBRARY = torch.library.Library("dsv4_shared_memory", "DEF")
LIBRARY.define("add_to_all(Tensor x, Tensor(a!)[] rows, Tensor(b!)? more=None) -> ()")


@torch.library.impl(LIBRARY, "add_to_all", "CompositeExplicitAutograd")
def _add_to_all(x: Tensor, rows: list[Tensor], more: Tensor | None = None) -> None:
    for tensor in (*rows, *([] if more is None else [more])):
        tensor.add_(x)


@pytest.fixture(autouse=True)
def as_traced(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Run graphs as they were traced, except in tests with "inductor" in their name."""
    if "inductor" not in request.node.name:
        monkeypatch.setitem(vars(_compat), "compile_fx", lambda gm, example_inputs, **kwargs: gm.forward)
    torch.compiler.reset()
    with torch.no_grad():
        yield
    torch.compiler.reset()


StepFunction = Callable[..., Any]
Views = Callable[[Tensor], tuple[Tensor, ...]]


def nothing(memory: Tensor) -> tuple[Tensor, ...]:
    return ()


def compare(
    step: StepFunction, views: Views, *, after: StepFunction | None = None, fresh: bool = False, calls: int = 5
) -> Counts:
    """Compare `step(x, *views(memory))` compiled with eager, each on separate memory.

    `after(out, x)` runs after each call. With `fresh` the views are made anew for each call.
    """
    compiled = torch.compile(step, backend="dsv4", options=STANDIN)
    memories = [torch.arange(24.0).view(6, 4), torch.arange(24.0).view(6, 4)]
    both_views = [views(memory) for memory in memories]
    with counting() as counts:
        for call in range(calls):
            rows, seen = torch.randn(12, 4), []
            for run, memory, tensors in zip((compiled, step), memories, both_views, strict=True):
                buffer = rows.clone()
                x = buffer[call : call + 3]  # with a new storage offset at each call
                out = run(x, *(views(memory) if fresh else tensors))
                if after is not None:
                    after(out, x)
                seen.append([t.clone() for t in (*_compat.pytree.tree_leaves(out), buffer, memory)])
            for got, expected in zip(*seen, strict=True):
                assert_bitwise(got, expected, label=f"call {call}")
    return counts


# Inputs.


def write_both(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    a.add_(x)
    b.mul_(2)
    return a + 1


def write_one(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    a.add_(x)
    return b * 2


def write_a_part(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    a[3:].add_(x)
    return b * 2


SHARING: dict[str, tuple[StepFunction, Views]] = {
    "both halves written": (write_both, lambda w: (w[:3], w[3:])),
    "every second row": (write_both, lambda w: (w[0::2], w[1::2])),
    "rows in common": (write_both, lambda w: (w[:3], w[2:5])),
    "rows in common, one read": (write_one, lambda w: (w[:3], w[2:5])),
    "all and a part": (write_a_part, lambda w: (w, w[2:5])),
    "as integers": (write_both, lambda w: (w[:3], w[2:5].view(torch.int32))),
}


@pytest.mark.parametrize("case", SHARING)
def test_views_of_one_allocation_are_used_in_place(case: str) -> None:
    step, views = SHARING[case]
    assert compare(step, views) == REPLAYED
    # A view made for one call has a base that is known again, unless its dtype differs.
    assert compare(step, views, fresh=True).captures == (case != "as integers")


def test_inductor_code_gets_views_of_one_allocation() -> None:
    """AOTAutograd looks at the bases of its arguments at each call."""
    assert compare(write_both, lambda w: (w[:3], w[2:5])) == REPLAYED


def test_empty_inputs_share_no_memory() -> None:
    step = lambda x, a, b: (a.add_(1), b * 2, x[:0] * 2, x * 2)[1:]  # noqa: E731
    assert compare(step, lambda w: (torch.empty(0, 4), torch.empty(0, 4))) == REPLAYED


def test_views_of_written_or_marked_memory_are_not_copied() -> None:
    in_place: list[set[str]] = []

    def backend(gm: GraphModule, example_inputs: Any) -> Any:
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        in_place.append({names[i] for i in inputs_in_place(gm)})
        return gm.forward

    def step(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return x + a.add_(1) + b + c + d

    written, marked = torch.zeros(6, 4), torch.zeros(6, 4)
    mark_static_inputs({"marked": marked})
    torch.compile(step, backend=backend, fullgraph=True)(
        torch.zeros(3, 4), written[:3], written[3:], marked[:3], marked[:3].clone()
    )
    torch.compile(lambda x, m, v: x + m[:3] + v, backend=backend)(torch.zeros(3, 4), marked, marked[3:])
    assert in_place == [{"l_a_", "l_b_"}, {"l_m_", "l_v_"}]


# Writes.


@torch.compiler.nested_compile_region
def region(x: Tensor, rows: Tensor) -> Tensor:
    rows.add_(x)
    return x * 2


def augmented(x: Tensor, a: Tensor, b: Tensor) -> None:
    a += x
    b -= x


functional, ours = torch.nn.functional, torch.ops.dsv4_shared_memory
WRITES: dict[str, tuple[str, StepFunction]] = {
    "a list": ("ab", lambda x, a, b: torch._foreach_mul_([a, b], 1.5)),
    "parts of a tensor": ("a", lambda x, a, b: torch._foreach_mul_(a.split(2), 1.5)),
    "a list of an op": ("ab", lambda x, a, b: ours.add_to_all(x, [a, b])),
    "an optional of an op": ("ab", lambda x, a, b: ours.add_to_all(x, [a], more=b)),
    "out of an op": ("a", lambda x, a, b: torch.ops.aten.add(x, b, out=a)),
    "an operator": ("ab", augmented),
    "the operator's method": ("a", lambda x, a, b: a.__iadd__(x)),
    "the assignment's method": ("a", lambda x, a, b: a.__setitem__(0, x[0])),
    "by name": ("a", lambda x, a, b: torch.relu_(input=a)),
    "inplace=True": ("a", lambda x, a, b: functional.hardtanh(a.mul(1), inplace=True) + functional.silu(a, True)),
    "rows of a norm": ("a", lambda x, a, b: functional.embedding(torch.arange(2), a, max_norm=0.1)),
    "statistics": ("ab", lambda x, a, b: functional.batch_norm(x, a[0], b[0], training=True)),
    "a region, for two tensors": ("ab", lambda x, a, b: region(x, a) + region(x, b)),
    "nothing": ("", lambda x, a, b: functional.silu(a) + functional.embedding(torch.arange(3), b) + x.__add__(a)),
}

if _compat.torch_release() >= (2, 13):  # older versions allow no write in a branch
    WRITES["a branch"] = (
        "a",
        lambda x, a, b: torch.cond(x.sum() > 0, lambda x, a, b: a.add_(x) + b, lambda x, a, b: x * b, (x, a, b)),
    )


@pytest.mark.parametrize("case", WRITES)
def test_written_inputs_are_found(case: str) -> None:
    expected, write = WRITES[case]
    in_place: list[set[str]] = []

    def backend(gm: GraphModule, example_inputs: Any) -> Any:
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        in_place.append({names[i] for i in inputs_in_place(gm)})
        return gm.forward

    def step(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        write(x, a, b)
        return x + a + b

    torch.compile(step, backend=backend, fullgraph=True)(*(torch.ones(3, 4) for _ in range(3)))
    assert in_place == [{f"l_{name}_" for name in expected}]


@pytest.mark.parametrize("case", ["a list", "a list of an op", "an operator", "inplace=True"])
def test_writes_reach_the_callers_tensors(case: str) -> None:
    def step(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        WRITES[case][1](x, a, b)
        return x * 2

    assert compare(step, lambda w: (w[:3].clone(), w[3:].clone(), w)[:2]) == REPLAYED
    assert compare(step, lambda w: (w[:3], w[3:])) == REPLAYED


# Outputs.


def write_first(out: Any, x: Tensor) -> None:
    (out if isinstance(out, Tensor) else out[0]).view(torch.int32).add_(1)


RETURNED: dict[str, tuple[StepFunction, Views]] = {
    "rows of a copied input": (lambda x: x[1:].t(), nothing),
    "a copied input as bytes": (lambda x: x[1:].view(torch.uint8)[:, 4:8], nothing),
    "rows of a written input": (lambda x, a: (a.add_(x), a[1:])[1], lambda w: (w[:3],)),
    "rows of a written input, of another view": (lambda x, a, b: (a.add_(x), b[1:])[1], lambda w: (w[:3], w[2:])),
    "a written input": (lambda x, a: a.add_(x), lambda w: (w[:3],)),
    "two results with rows in common": (lambda x: (lambda y: (y[1:], y, y[:2]))(x * 2), nothing),
    "two results in other dtypes": (lambda x: (lambda y: (y, y.view(torch.int16)[:, 3:5]))(x * 2), nothing),
    "two results in turns": (lambda x: (lambda y: (y[:, 1::2], y[:, ::2]))(x * 2), nothing),
    "one row, many times": (lambda x: (x * 2, (x[:1] * 2).expand(3, 4)), nothing),
}


@pytest.mark.parametrize("case", RETURNED)
def test_a_write_to_an_output_shows_wherever_eager_shows_it(case: str) -> None:
    step, views = RETURNED[case]
    assert compare(step, views, after=write_first) == REPLAYED


def test_a_replay_raises_for_a_view_that_eager_would_not_make() -> None:
    step = torch.compile(lambda x: x.view(torch.int16), backend="dsv4", options=STANDIN)
    memory = torch.arange(40, dtype=torch.uint8)
    for first in (2, 4, 6, 8):
        assert_bitwise(step(memory[first : first + 8]), memory[first : first + 8].view(torch.int16))
    with pytest.raises(DSV4Error, match=r"E201[\s\S]*9 bytes into its storage"):
        step(memory[9:17])


def test_replays_do_not_overwrite_earlier_outputs() -> None:
    step = torch.compile(lambda x: (lambda y: (y, y[1:]))(x * 2), backend="dsv4", options=STANDIN)
    inputs = [torch.randn(3, 4) for _ in range(5)]
    outputs = [step(x) for x in inputs]
    for x, (out, rows) in zip(inputs, outputs, strict=True):
        assert_bitwise(out, x * 2)
        assert rows.data_ptr() == out[1:].data_ptr()


def test_a_view_stays_a_view_across_a_graph_break() -> None:
    def step(x: Tensor) -> Tensor:
        rows = x[1:]
        torch._dynamo.graph_break()
        rows.add_(1)
        return x * 2

    # The second graph writes memory that is new at every call.
    assert compare(step, nothing) == Counts(captures=1, replays=3, compiled=7)


# Lifetimes.


def test_captures_that_return_rows_of_a_cache_do_not_keep_it_alive() -> None:
    step = torch.compile(lambda x, a: (a.add_(x), a[:2])[1], backend="dsv4", options=STANDIN)
    for view in (False, True):
        cache = torch.zeros(6, 4)
        rows = cache[:3] if view else cache.narrow(0, 0, 3).clone()
        with counting() as counts:
            for _ in range(5):
                step(torch.randn(3, 4), rows)
        assert counts == REPLAYED
        alive = [weakref.ref(cache), weakref.ref(rows)]
        del cache, rows
        gc.collect()
        assert [reference() for reference in alive] == [None, None]


def test_views_at_another_address_get_another_capture() -> None:
    step = torch.compile(lambda x, a: a.add_(x).sum(), backend="dsv4", options=STANDIN, dynamic=False)
    memory, expected = torch.zeros(6, 4), torch.zeros(6, 4)
    with counting() as counts:
        for call in range(12):
            x, first = torch.randn(3, 4), 3 * (call % 2)
            step(x, memory[first : first + 3])
            expected[first : first + 3] += x
            assert_bitwise(memory, expected)
    assert counts == Counts(captures=2, replays=8, compiled=4)


def test_memory_that_is_new_at_every_call_is_reported() -> None:
    step = torch.compile(lambda x: x.add_(1), backend="dsv4", options=STANDIN)
    with warnings.catch_warnings(record=True) as caught, counting() as counts:
        warnings.simplefilter("always")
        for _ in range(20):
            step(torch.zeros(3, 4))
    assert counts == Counts(captures=0, replays=0, compiled=20)
    assert [str(w.message).split("\n")[2] for w in caught if w.category is DSV4Warning] == [
        "  got   a graph that has l_x_ by address, a different tensor in every call"
    ]
