"""Tests of calls that others wrap: autocast that is entered inside a call, and errors that torch wraps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor
from torch._dynamo.exc import Unsupported

from dsv4_compile import DSV4Error, errors, explain, hf
from dsv4_compile.hf.tiny import tiny_model
from tests.hf.small import LAYERS, close, random_ids

AUTOCAST = r"E208[\s\S]*torch\.autocast\('cpu'\)"


@pytest.fixture
def model() -> Any:
    return hf.convert(tiny_model(**LAYERS), max_batch_size=2, max_seq_len=128)


@pytest.fixture
def small() -> Any:
    layer = {"num_hidden_layers": 1, "layer_types": LAYERS["layer_types"][1:]}
    return hf.convert(tiny_model(**layer), max_batch_size=2, max_seq_len=128)


@pytest.fixture(autouse=True)
def no_autocast_after() -> Iterator[None]:
    yield
    torch.set_autocast_enabled("cpu", False)


def wrap(module: Any, dtype: torch.dtype = torch.bfloat16, enabled: bool = True) -> None:
    module.forward = torch.autocast("cpu", dtype=dtype, enabled=enabled)(module.forward)


def enter_in_a_hook(module: Any) -> None:
    context = torch.autocast("cpu", dtype=torch.bfloat16)
    module.register_forward_pre_hook(lambda *_: context.__enter__() and None)
    module.register_forward_hook(lambda *_: context.__exit__(None, None, None))


def prepare(model: Any) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier test may have had another precision
    Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model, evaluation_mode=True)


WAYS: dict[str, Callable[[Any], Any]] = {
    "accelerate": prepare,
    "a decorator of the stack": lambda model: wrap(model.model, torch.float16),
    "a decorator of a layer": lambda model: wrap(model.model.layers[1]),
    "a decorator of attention": lambda model: wrap(model.model.layers[0].self_attn),
    "a decorator of experts": lambda model: wrap(model.model.layers[1].mlp, torch.float16),
    "a decorator of a router": lambda model: wrap(model.model.layers[0].mlp.gate),
    "a hook of the model": enter_in_a_hook,
    "a hook of a layer": lambda model: enter_in_a_hook(model.model.layers[1]),
    "a mode that stays": lambda model: model.register_forward_pre_hook(
        lambda *_: torch.set_autocast_enabled("cpu", True)
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_autocast_inside_a_call_is_named(way: str, model: Any) -> None:
    WAYS[way](model)
    with pytest.raises(DSV4Error, match=AUTOCAST):
        model(random_ids(2, 20))
    torch.set_autocast_enabled("cpu", False)
    with pytest.raises(DSV4Error, match=AUTOCAST):
        model.generate(random_ids(1, 5), max_new_tokens=2)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_autocast_is_named_where_the_call_is_compiled(fullgraph: bool, small: Any) -> None:
    ids = random_ids(2, 20)
    want = small(ids).logits
    prepare(small)
    wrapper = torch.compile(small, backend="eager", fullgraph=fullgraph)
    with pytest.raises(DSV4Error, match=AUTOCAST):
        wrapper(ids)
    del small.forward
    small.compile(backend="eager", fullgraph=fullgraph)
    close(small(ids).logits, want)
    enter_in_a_hook(small)
    with pytest.raises(DSV4Error, match=AUTOCAST):
        small(ids)
    torch.compiler.reset()


def test_autocast_that_changes_nothing_runs(model: Any) -> None:
    ids = random_ids(1, 20)
    want = model(ids).logits
    wrap(model, enabled=False)
    wrap(model.model.layers[1], enabled=False)
    assert torch.equal(model(ids).logits, want)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=False):
        assert torch.equal(model(ids).logits, want)


def refusing(graph: Any, inputs: Any) -> Any:
    errors.fail("E302", got="a backend that refuses")


@pytest.mark.parametrize(
    ("road", "fullgraph"), [("in place", True), ("a wrapper", False), ("a function", False), ("a function", True)]
)
def test_an_error_that_torch_wraps_is_raised(road: str, fullgraph: bool, small: Any) -> None:
    options: dict[str, Any] = {"backend": refusing, "fullgraph": fullgraph}
    call = small if road != "a function" else lambda ids: small(ids).logits
    if road == "in place":
        small.compile(**options)
    else:
        call = torch.compile(call, **options)
    if road == "a function" and fullgraph:
        with pytest.raises(Unsupported, match="E208: a call of a converted model is checked on the host"):
            call(random_ids(1, 5))
    else:
        with pytest.raises(DSV4Error, match=r"\[E302\][\s\S]*a backend that refuses") as seen:
            call(random_ids(1, 5))
        assert type(seen.value.__cause__).__name__ == "BackendCompilerFailed"
    torch.compiler.reset()


def test_an_op_that_refuses_its_arguments_while_it_is_traced(small: Any) -> None:
    small.model.layers[0].register_forward_pre_hook(lambda _, args: (args[0].double(), *args[1:]))
    ids = random_ids(1, 5)
    with pytest.raises(DSV4Error) as eager:
        small(ids)
    small.compile(backend="eager", fullgraph=True)
    with pytest.raises(DSV4Error) as traced:
        small(ids)
    assert traced.value.code == eager.value.code
    torch.compiler.reset()


def test_an_error_of_the_caller_stays_the_error(model: Any) -> None:
    def hook(*_: Any) -> None:
        try:
            errors.fail("E201", got="something that the caller handles")
        except DSV4Error:
            raise KeyError("the caller's") from None

    model.model.layers[0].register_forward_hook(hook)
    with pytest.raises(KeyError, match="the caller's"):
        model(random_ids(1, 5))


def test_explain_gives_the_reason_of_this_package(small: Any) -> None:
    def call(ids: Tensor) -> Tensor:
        return small(ids).logits

    report = explain(call, random_ids(1, 5), backend="eager")
    (graph_break,) = report.breaks
    assert graph_break.cause == "a call of a converted model is checked on the host, before its graph"
    assert "compile the model itself" in graph_break.fix and "without fullgraph=True" in graph_break.fix
    assert "remove the mark" not in str(report)
