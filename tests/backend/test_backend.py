"""The backend: its imports, its graph pass with the user's, and the settings of Inductor that it changes."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.loop_body import LoopBody
from torch._inductor.utils import run_and_get_code

from dsv4_compile import _compat, backend
from dsv4_compile.errors import EnvironmentFault
from dsv4_compile.options import Options
from dsv4_compile.passes import ChooseImplementations
from dsv4_compile.selection import decisions, proven

ROOT = Path(__file__).resolve().parents[2]


class Recording(CustomGraphPass):
    """A user's pass with a uuid, which can be cached."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.key = uuid.uuid4().hex  # new in each run, so that the cache of an earlier run is not hit

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen.extend(str(node.target) for node in graph.nodes if node.op == "call_function")

    def uuid(self) -> Any:
        return self.key


def _pass(*user_passes: Any) -> ChooseImplementations:
    return ChooseImplementations(Options(), user_passes, [torch.device("cpu")])


def test_backend_is_an_attribute_and_loads_neither_inductor_nor_triton() -> None:
    code = (
        "import sys, dsv4_compile; dsv4_compile.backend.dsv4; dsv4_compile.selection.decisions.collect\n"
        "print([m for m in sys.modules if m.startswith(('torch._inductor', 'triton'))])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", sorted(_compat.PRIVATE))
def test_private_name_exists_in_this_torch(name: str) -> None:
    assert getattr(_compat, name) is not None
    assert _compat.PRIVATE[name].purpose


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0.dev20261101+cu132", "3.0.0"])
def test_an_unsupported_torch_version_is_e101_with_the_pip_command(version: str) -> None:
    with mock.patch.object(torch, "__version__", version), pytest.raises(EnvironmentFault) as caught:
        _compat.check_torch()
    assert caught.value.code == "E101"
    assert f"torch {version}" in caught.value.got
    assert caught.value.fix == 'pip install "torch>=2.11,<2.16"'


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.15.3"])
def test_both_ends_of_the_supported_range_are_accepted(version: str) -> None:
    with mock.patch.object(torch, "__version__", version):
        _compat.check_torch()


def test_key_covers_options_architecture_and_the_users_passes() -> None:
    options = Options(impl="eager")
    passes = [
        _pass(),
        _pass(Recording()),
        ChooseImplementations(options, (), [torch.device("cpu")]),
        ChooseImplementations(Options(), (), [torch.device("meta")]),
    ]
    keys = {p.uuid() for p in passes}
    assert len(keys) == len(passes)
    assert _pass().uuid() == _pass().uuid()
    with proven.trust():  # other implementations may be chosen there
        assert _pass().uuid() not in keys


def test_a_pass_without_uuid_and_a_collector_bypass_the_caches() -> None:
    assert _pass(lambda graph: None).uuid() is None
    assert _pass(Recording(), lambda graph: None).uuid() is None
    with decisions.collect():
        assert _pass().uuid() is None


@torch.no_grad()
@pytest.mark.parametrize("cached", [True, False])
def test_users_pass_runs_before_ours_and_its_uuid_decides_whether_caches_are_used(
    cached: bool,
) -> None:
    recording = Recording()
    user = recording if cached else recording.__call__
    q, positions, table = torch.randn(3, 2, 8), torch.arange(3), torch.randn(4, 4)

    def run(q: Tensor) -> Tensor:
        return torch.ops.dsv4.q_norm_rope(q, positions, table, 1e-6)

    counters.clear()
    torch.compile(run, backend=backend.dsv4, options={"post_grad_custom_post_pass": user})(q)
    assert recording.seen == ["dsv4.q_norm_rope.default"]
    assert (counters["inductor"]["fxgraph_cache_bypass"] == 0) is cached


def test_nested_conditions_are_not_inlined_exponentially_in_cpp_unless_an_option_allows_it() -> None:
    def run(x: Tensor, end: int) -> Tensor:
        for _ in range(4):
            x = torch.where((x >= 0) & (x < end), x * 3 - 1, 0)
        return x

    def operations(**options: int) -> int:
        bodies: list[LoopBody] = []
        built = LoopBody.__init__

        def init(body: LoopBody, *args: Any) -> None:
            built(body, *args)
            bodies.append(body)

        torch.compiler.reset()
        with mock.patch.object(LoopBody, "__init__", init):
            torch.compile(run, backend=backend.dsv4, options={**options, "fx_graph_cache": False})(torch.arange(9), 7)
        return sum(len(body.root_block.graph.nodes) for body in bodies)

    assert operations() < 50 * 4
    assert operations(realize_opcount_threshold=50) > 10 * 3**4
    with _compat.inductor_config.patch(realize_opcount_threshold=0):
        assert operations() == operations(realize_opcount_threshold=0) > 0


@torch.no_grad()
def test_ops_stay_opaque_under_plain_inductor() -> None:
    q, positions, table = torch.randn(3, 2, 8), torch.arange(3), torch.randn(4, 4)

    def run(q: Tensor) -> Tensor:
        return torch.ops.dsv4.q_norm_rope(q * 2, positions, table, 1e-6) + 1

    _, [lowered] = run_and_get_code(torch.compile(run, backend=backend.dsv4), q)
    _, [opaque] = run_and_get_code(torch.compile(run, backend="inductor"), q)
    assert "torch.ops.dsv4" not in lowered.split("def call(")[1]
    assert "torch.ops.dsv4.q_norm_rope.default(" in opaque.split("def call(")[1]


@torch.no_grad()
def test_mode_and_kwargs_reach_inductor() -> None:
    def run(x: Tensor) -> Tensor:
        return x * 2 + 1

    x = torch.randn(4)
    compiled = torch.compile(run, backend=backend.dsv4, mode="max-autotune-no-cudagraphs")
    assert torch.equal(compiled(x), run(x))
    with pytest.raises(Exception, match="unexpected keyword argument 'surprise'"):
        backend.dsv4(torch.fx.symbolic_trace(run), [x], surprise=1)


@torch.no_grad()
def test_a_view_of_a_cache_with_dynamic_dims_is_written_at_its_offset() -> None:
    # pytorch#198068: without a lowering for aten.sym_storage_offset the row lands in the first cache of the stack.
    slots, positions, table = torch.tensor([2, -1, 7]), torch.arange(3), torch.randn(8, 8)
    kv, expected, actual = torch.randn(3, 24), torch.zeros(3, 5, 4, 24), torch.zeros(3, 5, 4, 24)

    def run(kv: Tensor, stack: Tensor) -> None:
        torch.ops.dsv4.kv_rope_insert(kv, stack[1], slots, positions, table, 4, "plain")

    run(kv, expected)
    torch._dynamo.mark_dynamic(actual, 1)
    torch.compile(run, backend=backend.dsv4, fullgraph=True)(kv, actual)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("dynamic", [False, True])
@torch.no_grad()
def test_a_slice_of_a_cache_that_is_itself_a_view_is_written_at_its_offset(dynamic: bool) -> None:
    # torch counts the pages of the slice from the start of the allocation, so other pages would be written, or none.
    slots, positions, table = torch.tensor([2, -1, 7]), torch.arange(3), torch.randn(8, 8)
    kv, expected, actual = torch.randn(3, 24), torch.zeros(9, 4, 24), torch.zeros(9, 4, 24)

    def run(kv: Tensor, cache: Tensor) -> None:
        torch.ops.dsv4.kv_rope_insert(kv, cache[2:], slots, positions, table, 4, "plain")
        torch.ops.dsv4.kv_rope_insert(kv * 2, cache[:2], slots, positions, table, 4, "plain")

    run(kv, expected[3:])
    argument = actual[3:]
    if dynamic:
        torch._dynamo.mark_dynamic(argument, 0)
    torch.compile(run, backend=backend.dsv4, fullgraph=True)(kv, argument)
    assert torch.equal(actual, expected) and actual[:5].any() and actual[5:].any()
