"""The garbage collector, and torch's cache of fake results, while a process with a compiled folder traces graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile._compat import FakeTensorMode, TracingContext, dynamo_config
from dsv4_compile.runtime import compiled_in_use
from dsv4_compile.runtime.capture_status import without_collections


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Restore the collector and torch's compiled functions after a test."""
    before = gc.isenabled()
    gc.enable()
    torch.compiler.reset()
    yield
    compiled_in_use.stop()
    (gc.enable if before else gc.disable)()


@pytest.fixture
def enabled() -> list[bool]:
    """Whether the collector was enabled, for each graph that `first_call` has compiled."""
    return []


@pytest.fixture
def first_call(enabled: list[bool]) -> Callable[[], None]:
    """Compile for one more size, with a backend that notes whether the collector is enabled."""

    def backend(gm: Any, example_inputs: Any) -> Any:
        enabled.append(gc.isenabled())
        return gm.forward

    def function(x: Tensor) -> Tensor:
        return x + 1

    def call() -> None:
        torch.compile(function, backend=backend, dynamic=False)(torch.ones(2 + len(enabled)))

    return call


def use() -> None:
    compiled_in_use.use(Path("compiled"), required=False, options=[])


def test_graphs_are_traced_without_collections(first_call: Callable[[], None], enabled: list[bool]) -> None:
    first_call()
    use()
    use()  # of the same folder, for a second model
    first_call()
    assert gc.isenabled()
    compiled_in_use.stop()
    first_call()
    assert enabled == [True, False, True]
    assert gc.isenabled()


def test_a_folder_is_used_again_after_torch_forgot_its_callbacks(
    first_call: Callable[[], None], enabled: list[bool]
) -> None:
    use()
    torch.compiler.reset()
    use()
    first_call()
    assert enabled == [False]
    assert gc.isenabled()


def test_the_collector_is_enabled_after_an_error() -> None:
    def backend(gm: Any, example_inputs: Any) -> Any:
        raise ValueError(f"not today, {gc.isenabled()}")

    use()
    with pytest.raises(Exception, match="not today, False"):
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert gc.isenabled()


def test_a_collector_that_is_disabled_stays_disabled(first_call: Callable[[], None], enabled: list[bool]) -> None:
    use()
    gc.disable()
    first_call()
    assert enabled == [False]
    assert not gc.isenabled()


def test_a_capture_around_a_compilation_stays_without_collections(first_call: Callable[[], None]) -> None:
    use()
    with without_collections():
        first_call()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_folder_that_is_no_longer_used_while_a_graph_is_traced_leaves_the_collector_enabled() -> None:
    def backend(gm: Any, example_inputs: Any) -> Any:
        compiled_in_use.stop()
        assert gc.isenabled()
        return gm.forward

    use()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert gc.isenabled()


def test_a_graph_that_the_folder_lacks_compiles_with_collections() -> None:
    def backend(gm: Any, example_inputs: Any) -> Any:
        states.append(gc.isenabled())
        missing = compiled_in_use.watched(lambda *_: states.append(gc.isenabled()), None, None)
        assert missing is not None
        missing(gm, example_inputs)
        return gm.forward

    states: list[bool] = []
    use()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert states == [False, True]
    assert gc.isenabled()


def test_fakes_of_ops_are_not_cached_while_dynamo_traces_a_graph_of_the_folder() -> None:
    def backend(gm: Any, example_inputs: Any) -> Any:
        settings.append(dynamo_config.fake_tensor_cache_enabled)
        compiled_in_use.watched(lambda *_: None, None, None)
        settings.append(dynamo_config.fake_tensor_cache_enabled)
        settings.append(TracingContext.get().fake_mode.cache_enabled)
        return gm.forward

    def misses(function: Callable[[Tensor], Tensor]) -> int:
        before = FakeTensorMode.cache_misses
        torch.compile(function, backend=backend)(torch.ones(2))
        return int(FakeTensorMode.cache_misses - before)

    settings: list[bool] = []
    FakeTensorMode.cache_clear()
    assert misses(lambda x: x + 1) > 0
    use()
    FakeTensorMode.cache_clear()
    assert misses(lambda x: x - 1) == 0
    assert settings == [True, True, True, False, True, True], "AOTAutograd, which follows the trace, has the cache"
    assert dynamo_config.fake_tensor_cache_enabled
