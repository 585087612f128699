"""Kernels are built while their graph compiles, in the variants that its first call launches, and failures are told."""

from __future__ import annotations

import importlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

from dsv4_compile import _compat, options, progress
from dsv4_compile.backend import dsv4
from dsv4_compile.debug import compile_log
from dsv4_compile.errors import DSV4Error
from dsv4_compile.kernels.hopper.cluster_mailbox import launch_clusters
from dsv4_compile.kernels.host import semaphores
from dsv4_compile.kernels.host.gpu import Gpu
from dsv4_compile.kernels.host.launch import is_building, launch_kernel
from dsv4_compile.lowering import registry
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.ops.common.kernels import KERNELS, launcher, refusal
from dsv4_compile.runtime import early_builds
from dsv4_compile.runtime.early_builds import Built, EarlyBuilds, Metadata, traced
from dsv4_compile.selection import decisions
from dsv4_compile.testing.samples import op_samples
from tests.support import fake_triton

CPU = torch.device("cpu")
_devices = itertools.count(1)


class Hopper:
    """A fake GPU without kernels. Launches build what is missing, into `builds`, and run nothing."""

    def __init__(self) -> None:
        self.early: list[str] = []
        self.builds: list[str] = []
        self.launches: list[str] = []

    def hook(self, **given: Any) -> None:
        """Note a build that begins."""
        (self.early if is_building() else self.builds).append(given["fn"].jit_function.fn.__name__)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Hopper:
    gpu, hopper, run, number = Gpu("cuda", 90, 132), Hopper(), JITFunction.run, next(_devices)
    package = "dsv4_compile.kernels"
    for name in {*KERNELS.values(), f"{package}.linear.gemm", f"{package}.indexer.select_topk"}:
        importlib.import_module(name)
    for name, module in list(sys.modules.items()):
        if name.startswith("dsv4_compile.kernels.") and hasattr(module, "gpu_of"):
            monkeypatch.setattr(module, "gpu_of", lambda device: gpu)

    def build_only(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        if not is_building():
            hopper.launches.append(self.fn.__name__)
        return run(self, *args, grid=grid, warmup=True, **constants)

    driver = fake_triton.FakeDriver(fake_triton.HOPPER)
    monkeypatch.setattr(driver, "get_current_device", lambda: number)  # a device that no kernel was built for
    monkeypatch.setattr(driver, "launcher_cls", lambda source, metadata: None)
    monkeypatch.setattr(fake_triton.triton_driver, "_active", driver)
    monkeypatch.setattr(JITFunction, "run", build_only)
    monkeypatch.setattr(CompiledKernel, "__getitem__", lambda self, grid: lambda *args: None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", hopper.hook)
    return hopper


def described(args: Sequence[Any]) -> list[Any]:
    return [Metadata.of(x) if isinstance(x, Tensor) else x for x in args]


def in_full(op: str, args: Sequence[Any]) -> list[Any]:
    """Arguments with the defaults of those that are not given."""
    return [*args, *(declared.default_value for declared in OPS[op]._schema.arguments[len(args) :])]


def variants_of(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return every launch of a call: its kernel, and the arguments, constants and options that it is compiled for."""
    launches: list[tuple[str, str]] = []

    def bind(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        *_, binder = self.create_binder()
        _, specialization, rest = binder(*args, debug=False, instrumentation_mode="", **constants)
        launches.append((self.fn.__name__, f"{specialization} {sorted(rest.items(), key=str)}"))

    with monkeypatch.context() as patched:
        patched.setattr(JITFunction, "run", bind)
        call()
    return launches


@pytest.mark.parametrize("op", sorted(KERNELS))
def test_early_builds_are_of_the_variants_that_are_launched(
    op: str, hopper: Hopper, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses, failed = refusal(op), list[Built]()
    for args in op_samples(op):
        if refuses is not None and refuses(*args):
            continue

        def add(args: Any = args) -> None:
            with EarlyBuilds(1) as builds:
                builds.add(op, lambda: described(in_full(op, args)))

        with early_builds.listen(failed.append):
            early = variants_of(add, monkeypatch)
        assert failed == [] and early == variants_of(lambda args=args: launcher(op)(*args), monkeypatch)


@triton.jit
def _add_kernel(p_out, p_x, n, N: triton.language.constexpr):
    places = triton.language.arange(0, N)
    triton.language.store(p_out + places, triton.language.load(p_x + places) + n)


def add_rows(x: Tensor, n: int) -> None:
    launch_kernel(_add_kernel, (1,), x, x, n, N=16)


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., Any]]:
    """Launchers that tests add, by op."""
    added: dict[str, Callable[..., Any]] = {"add_rows": add_rows}
    monkeypatch.setattr(early_builds, "launcher", lambda op: added[op])
    monkeypatch.setattr(early_builds, "refusal", lambda op: None)
    return added


@pytest.fixture
def told() -> Iterator[list[Built]]:
    builds: list[Built] = []
    with early_builds.listen(builds.append):
        yield builds


def test_offset_dtype_and_scalars_select_the_variant_and_each_is_built_once(
    hopper: Hopper, launchers: Any, told: list[Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    room, begun, timed = torch.zeros(64), list[Any](), early_builds._timed
    monkeypatch.setattr(early_builds, "_timed", lambda build: (begun.append(build), timed(build))[1])
    calls = [(room[4:], 1), (room[4:], 32), (room[4:], 48), (room[1:], 32), (room.double(), 32)]
    with EarlyBuilds(2) as builds:
        for x, n in calls:
            builds.add("add_rows", lambda x=x, n=n: [Metadata.of(x), n])
    for x, n in calls:
        add_rows(x, n)
    assert hopper.builds == [] and len(hopper.launches) == 5
    assert [(built.name, built.error) for built in told] == [("_add_kernel", "")] * 4 and len(begun) == 4
    assert all(built.seconds > 0 for built in told)
    add_rows(room[4:], 3)
    assert hopper.builds == ["_add_kernel"]


def test_a_launch_in_clusters_and_its_counters_are_built_early_without_memory(
    hopper: Hopper, launchers: Any, told: list[Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    def count_rows(x: Tensor) -> None:
        launch_clusters(_add_kernel, 2, 2, 0, semaphores.arrival_counters(16, CPU), x, 1, N=16)

    launchers["count_rows"] = count_rows
    with monkeypatch.context() as patched, EarlyBuilds(1) as builds:
        patched.setattr(semaphores, "_counters", lambda *args: pytest.fail("counters of a GPU"))
        builds.add("count_rows", lambda: [Metadata.of(torch.zeros(16))])
    assert [(built.name, built.error) for built in told] == [("_add_kernel", "")]
    count_rows(torch.zeros(16))
    assert hopper.builds == [] and hopper.launches == ["_add_kernel"]


def test_a_failed_build_is_told_and_made_again_by_the_launch(
    hopper: Hopper, launchers: Any, told: list[Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(build: Callable[[], Any]) -> Any:
        raise MemoryError("no room for ptxas")

    monkeypatch.setattr(early_builds, "_timed", out_of_memory)
    with compile_log() as log, EarlyBuilds(2) as builds:
        builds.add("add_rows", lambda: [Metadata.of(torch.zeros(16)), 1])
    assert told == [Built("_add_kernel", 0, "MemoryError: no room for ptxas")]
    assert [(entry.kind, entry.what, entry.seconds) for entry in log] == [("kernel", "_add_kernel", None)]
    assert "MemoryError" in log[0].cause and "first launch" in log[0].cause and not log[0].early
    add_rows(torch.zeros(16), 1)
    assert hopper.builds == ["_add_kernel"]


def test_a_launcher_that_needs_values_is_told_and_changes_nothing(
    hopper: Hopper, launchers: Any, told: list[Built]
) -> None:
    launchers["needs_values"] = lambda x: x.sum().item()
    with EarlyBuilds(1) as builds:
        builds.add("needs_values", lambda: [Metadata.of(torch.zeros(16))])
        builds.add("add_rows", lambda: [Metadata.of(torch.zeros(16)), 1])
    seen = [(built.name, built.seconds > 0, bool(built.error)) for built in told]
    assert seen == [("needs_values", False, True), ("_add_kernel", True, False)] and told[0].seconds == 0


def test_the_compile_log_has_early_builds_with_their_times_and_progress_shows_the_wait(
    hopper: Hopper, launchers: Any, told: list[Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, timed, events = threading.Event(), early_builds._timed, list[progress.Event]()

    def slowly(build: Callable[[], Any]) -> Any:
        assert finish.wait(30)
        return timed(build)

    def hear(event: progress.Event) -> None:
        events.append(event)
        finish.set()

    monkeypatch.setattr(early_builds, "_timed", slowly)
    with progress.listen(hear), compile_log() as log, EarlyBuilds(1) as builds:
        builds.add("add_rows", lambda: [Metadata.of(torch.zeros(16)), 1])
    assert {(event.stage, event.total) for event in events} == {("build kernels", 1)}
    assert [(entry.what, entry.seconds) for entry in log] == [("_add_kernel", told[0].seconds)]
    assert log[0].cause == "built during the compilation of its graph" and log[0].early
    with compile_log(strict=True), EarlyBuilds(1) as builds:  # which objects to the compilation alone
        builds.add("add_rows", lambda: [Metadata.of(torch.zeros(16)), 2])
    assert [built.error for built in told] == ["", ""]


def test_builds_of_a_compilation_that_failed_are_dropped(
    hopper: Hopper, launchers: Any, told: list[Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, end, timed = threading.Event(), threading.Event(), early_builds._timed

    def slowly(build: Callable[[], Any]) -> Any:
        begun.set()
        assert end.wait(30)
        return timed(build)

    monkeypatch.setattr(early_builds, "_timed", slowly)
    with pytest.raises(ValueError, match="of the graph"), EarlyBuilds(1) as builds:
        for n in (1, 2):
            builds.add("add_rows", lambda n=n: [Metadata.of(torch.zeros(16)), n])
        assert begun.wait(30)
        raise ValueError("of the graph")
    end.set()
    assert [variant.future.cancelled() for variant in builds._variants.values()] == [False, True]
    assert told == [] and early_builds.active() is None


def test_a_graph_builds_early_what_its_first_call_launches(
    hopper: Hopper, told: list[Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views of a cache that an op writes, slices of a projection, and a number of tokens that varies."""
    monkeypatch.setattr(registry, "_ours", lambda call: call.op in KERNELS)
    monkeypatch.setattr(early_builds, "for_graph", lambda wanted, devices: {"all": EarlyBuilds}[wanted](2))
    asked: list[list[Any]] = []
    add = EarlyBuilds.add

    def noted(self: EarlyBuilds, op: str, arguments: Callable[[], Sequence[Any]]) -> None:
        asked.append(list(arguments()))
        add(self, op, arguments)

    monkeypatch.setattr(EarlyBuilds, "add", noted)

    kv, ape, state, slots, positions, block = op_samples("save_partial_states")[0]
    norm = op_samples("fused_q_kv_rmsnorm")[0]
    sizes = norm[0].shape[1], norm[1].shape[1]
    projected = torch.randn(kv.shape[0], sum(sizes), dtype=norm[0].dtype)
    count = state.shape[0]
    pages = torch.zeros(3 * count + 1, *state.shape[1:], dtype=state.dtype)

    def views(pages: Tensor) -> tuple[Tensor, Tensor]:
        return pages[1 : 1 + count], pages[1 + count :: 2]

    def step(kv: Tensor, projected: Tensor, pages: Tensor, slots: Tensor, positions: Tensor) -> Any:
        for view in views(pages):
            torch.ops.dsv4.save_partial_states(kv, ape, view, slots, positions, block)
        qr, latent = projected.split(sizes, dim=1)
        return torch.ops.dsv4.fused_q_kv_rmsnorm(qr, latent, *norm[2:])

    inputs = kv, projected, pages, slots, positions
    for x in (kv, projected, slots, positions):
        torch._dynamo.mark_dynamic(x, 0)
    torch.compiler.reset()
    only_kernels = {"dsv4.impl": "triton", "dsv4.fuse": "off"}
    with torch.no_grad(), decisions.collect():  # so that the graph comes from no cache
        torch.compile(step, backend=dsv4, options=only_kernels, fullgraph=True)(*inputs)
    split = projected.split(sizes, dim=1)
    expected = [described((kv, ape, view, slots, positions, block)) for view in views(pages)]
    assert asked == [*expected, described(in_full("fused_q_kv_rmsnorm", (*split, *norm[2:])))]
    assert hopper.launches and hopper.builds == [] and {built.error for built in told} == {""}
    assert {built.name for built in told} == set(hopper.early) == set(hopper.launches)


@pytest.mark.parametrize("all_sizes", [True, False])
def test_a_graph_builds_early_what_calls_of_all_sizes_launch(
    all_sizes: bool, hopper: Hopper, launchers: Any, told: list[Built]
) -> None:
    """A launcher with a threshold, and sizes that follow from the number of tokens."""

    def double_rows(x: Tensor, n: int, other: int) -> None:
        many = x.shape[0] > 100
        launch_kernel(_add_kernel, (1,), x, x, n, N=32 if many else 16)
        assert x.shape[0] == 2 * n and other == 5

    launchers["double_rows"] = double_rows
    shapes = ShapeEnv()
    tokens, other = (
        shapes.create_symintnode(shapes.create_symbol(hint, ConstantSource(name), DimDynamic.DYNAMIC), hint=hint)
        for name, hint in (("tokens", 64), ("other", 5))
    )
    with EarlyBuilds(1, all_sizes=all_sizes) as builds, early_builds.also_for(64, (16, 48, 64, 800)):
        builds.add(
            "double_rows",
            lambda: [Metadata(traced((2 * tokens, 4)), (4, 1), 0, torch.float32, CPU), *traced((tokens, other))],
        )
    assert {built.error for built in told} == {""}
    for n in (16, 48, 64, 800):
        double_rows(torch.zeros(2 * n, 4), n, 5)
    assert len(told) == (2 if all_sizes else 1)
    assert hopper.builds == ([] if all_sizes else ["_add_kernel"])


def test_only_graphs_on_a_gpu_build_early_unless_switched_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from dsv4_compile._compat import cache_dir_utils, inductor_config

    gpu = torch.device("cuda", 1)
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that it is put back
    monkeypatch.delenv("TRITON_CACHE_DIR")
    assert not isinstance(early_builds.for_graph("on", {CPU}), EarlyBuilds)
    assert not isinstance(early_builds.for_graph("off", {gpu}), EarlyBuilds)
    with inductor_config.patch(worker_start_method="fork"), caplog.at_level("INFO", "dsv4_compile.runtime"):
        assert not isinstance(early_builds.for_graph("on", {gpu}), EarlyBuilds)
    assert "forks" in caplog.text
    with monkeypatch.context() as patched, caplog.at_level("INFO", "dsv4_compile.runtime"):
        patched.setattr(_compat, "TRITON_LAST", (3, 5))
        assert not isinstance(early_builds.for_graph("on", {gpu}), EarlyBuilds)
    assert "was not tested" in caplog.text
    expected = cache_dir_utils.triton_cache_dir(1)
    with early_builds.for_graph("on", {CPU, gpu}) as builds:
        assert early_builds.active() is builds
    assert cache_dir_utils.triton_cache_dir(0) == expected != ""


@pytest.mark.parametrize("wanted", ["on", "off"])
def test_builds_of_graphs_on_a_gpu_are_prepared_before_torch_looks_for_a_graph_in_its_cache(
    wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that it is put back
    monkeypatch.setattr(early_builds, "prepare_builds", lambda: done.append("prepared"))
    early_builds.for_graph(wanted, {CPU})
    assert done == []
    early_builds.for_graph(wanted, {CPU, torch.device("cuda", 0)})
    assert done == ["prepared"]


def test_the_option_is_all_by_default() -> None:
    assert options.Options.parse(None, None, ops=()).early_builds == "all"
    for value in ("all", "first", "off", "on"):
        assert options.Options.parse(None, {"dsv4.early_builds": value}, ops=()).early_builds == value
    with pytest.raises(DSV4Error, match=r"E301[\s\S]*dsv4.early_builds='no'"):
        options.Options.parse(None, {"dsv4.early_builds": "no"}, ops=())
