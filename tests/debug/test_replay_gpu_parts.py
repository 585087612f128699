"""Parts of `explain_replay` only a GPU uses, on hand-made data: the driver's structures, spans, generated code."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

import dsv4_compile
from dsv4_compile.debug.places import Place
from dsv4_compile.debug.replay import driver
from dsv4_compile.debug.replay.assemble import assemble, part_of
from dsv4_compile.debug.replay.captures import ObservedCapture
from dsv4_compile.debug.replay.driver import CaptureReader, DriverNode, function_name
from dsv4_compile.debug.replay.observe import Launch
from dsv4_compile.debug.replay.rows import Edge, Replay
from dsv4_compile.debug.replay.sources import Source, _lines, _Origin, layer_of, module_path
from dsv4_compile.debug.replay.times import NodeTime, Span, assign, exclusive, node_times
from dsv4_compile.runtime.captures import Capture
from dsv4_compile.selection.costs import Cost

KERNEL, COPY, EMPTY = 0x100, 0x200, 0x300


class Driver:
    """A libcuda that captures a kernel, then a copy by a programmatic edge, then an empty node."""

    capturing, count, status = True, 3, 0

    def cuStreamGetCaptureInfo_v3(self, stream: Any, status: Any, number: Any, graph: Any, *rest: None) -> int:
        assert rest == (None, None, None)
        status._obj.value, graph._obj.value = int(self.capturing), 0x1
        return self.status

    def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> int:
        if nodes is not None:
            nodes[:] = [KERNEL, COPY, EMPTY][: self.count]
        count._obj.value = self.count
        return 0

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        kind._obj.value = {KERNEL: 0, COPY: 1, EMPTY: 5}[node.value]
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: Any, params: Any) -> int:
        launch = params._obj
        launch.grid[:], launch.block[:], launch.shared, launch.kern = (132, 2, 1), (256, 1, 1), 1000, 0x77
        return 0

    def cuKernelGetFunction(self, function: Any, kernel: Any) -> int:
        assert kernel.value == 0x77
        function._obj.value = 0x88
        return 0

    def cuFuncGetName(self, name: Any, function: Any) -> int:
        name._obj.value = b"_ZN3foo9my_kernelILi4EEEvi"
        return 0 if function.value == 0x88 else 1

    def cuFuncGetAttribute(self, value: Any, which: Any, function: Any) -> int:
        value._obj.value = {1: 24, 4: 168}[which.value]
        return 0

    def cuGraphMemcpyNodeGetParams(self, node: Any, params: Any) -> int:
        params._obj.width_bytes, params._obj.height, params._obj.depth = 64, 2, 1
        return 0

    def cuGraphGetEdges_v2(self, graph: Any, sources: Any, targets: Any, data: Any, count: Any) -> int:
        count._obj.value = 2
        if sources is not None:
            sources[:], targets[:] = [KERNEL, COPY], [COPY, EMPTY]
            data[0].type = 1
        return 0

    def cuGetErrorName(self, status: Any, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_NOT_SUPPORTED"
        return 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake_driver = Driver()
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: fake_driver)
    monkeypatch.setattr(torch.cuda, "current_stream", type("Stream", (), {"cuda_stream": 0x5}))
    return fake_driver


def test_driver_describes_nodes_and_edges(fake: Driver) -> None:
    reader = CaptureReader()
    fake.count = 1
    assert reader.new_nodes() == [KERNEL]
    assert reader.new_nodes() == []
    fake.count = 3
    fake.status, fake.capturing = 906, False  # the legacy stream
    assert reader.new_nodes() == []
    fake.status, fake.capturing = 0, True
    assert reader.new_nodes() == [COPY, EMPTY]
    reader.read()
    fake.capturing = False
    reader.describe_functions()
    assert reader.new_nodes() == []
    kernel, copy, empty = reader.nodes
    assert (kernel.kind, kernel.grid, kernel.block) == ("kernel", [132, 2, 1], [256, 1, 1])
    assert (kernel.shared_bytes, kernel.registers, function_name(kernel.name)) == (1024, 168, "my_kernel")
    assert (copy.kind, copy.bytes, copy.after) == ("copy", 256, [Edge(0, programmatic=True)])
    assert (empty.kind, empty.timed, empty.after) == ("empty", False, [Edge(1)])


def test_error_of_the_driver_names_its_function(fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "cuGraphNodeGetType", lambda self, node, kind: 801)
    with pytest.raises(dsv4_compile.DSV4Error, match=r"E420[\s\S]*cuGraphNodeGetType: CUDA_ERROR_NOT_SUPPORTED"):
        CaptureReader().read()


def test_missing_or_old_driver_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: object())
    with pytest.raises(dsv4_compile.DSV4Error, match=r"E420[\s\S]*CUDA 12.3"):
        CaptureReader()


def test_structures_have_the_sizes_of_the_headers() -> None:
    sizes = (driver._KernelParams, 72), (driver._CopyParams, 200), (driver._FillParams, 40), (driver._EdgeData, 8)
    for structure, size in sizes:
        assert ctypes.sizeof(structure) == size, structure


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15FillFunctorIfEE", "vectorized_elementwise_kernel"),
        ("_ZN7cutlass13device_kernelINS_4gemm", "device_kernel"),
        ("_Z9my_kernelPfi", "my_kernel"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("nvjet_tst_128x8", "nvjet_tst_128x8"),
    ],
)
def test_name_of_the_function_in_a_symbol(symbol: str, name: str) -> None:
    assert function_name(symbol) == name


def kernels(*names: str, after: tuple[tuple[int, ...], ...] = ()) -> list[DriverNode]:
    edges = after or tuple((i - 1,) if i else () for i in range(len(names)))
    return [
        DriverNode(i, "kernel", name, after=[Edge(e) for e in node_edges])
        for i, (name, node_edges) in enumerate(zip(names, edges, strict=True))
    ]


def test_spans_of_two_streams_belong_to_nodes_whose_predecessors_ran() -> None:
    nodes = kernels("fork", "a", "a", "b", "join", after=((), (0,), (1,), (0,), (2, 3)))
    spans = [Span(name, i, i + 1) for i, name in enumerate(("fork", "b", "a", "a", "join"))]
    assert assign(nodes, spans) == [0, 3, 1, 2, 4]
    nodes[3].kind = "empty"
    assert assign(nodes, spans) is None
    assert assign(nodes, [span for span in spans if span.name != "b"]) == [0, 1, 2, 4]
    assert assign(nodes, spans[:1]) is None


def test_times_and_gaps_add_up_to_the_replay() -> None:
    spans = [Span("a", 10, 14), Span("b", 13, 16), Span("c", 13.5, 15), Span("d", 18, 20)]
    times = exclusive(spans)
    assert times == [NodeTime(0, 4, 0), NodeTime(3, 2, 0), NodeTime(3.5, 0, 2), NodeTime(8, 2, 0)]
    assert sum(time.us + time.gap for time in times) == 10


def test_profiles_that_do_not_fit_are_counted() -> None:
    nodes = kernels("a", "b")
    good = [Span("a", 0, 1), Span("b", 2, 4)]
    slow = [Span("a", 0, 3), Span("b", 4, 8)]
    want = {0: NodeTime(0, 2, 1), 1: NodeTime(3, 3, 0)}
    assert node_times(nodes, [good, good[:1], slow]) == (want, "")
    times, why = node_times(nodes, [good[:1], good[:1], slow, good[1:], good])
    assert times == want
    assert why == "2 of 5 profiles fit the graph: 2 nodes, 1 to 2 seen by the profiler"
    assert node_times(nodes, [good]) == ({0: NodeTime(0, 1, 1), 1: NodeTime(2, 2, 0)}, "")


def test_cost_of_a_call_is_shared_by_its_nodes_in_proportion_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    nodes = kernels("split", "combine", "add")
    nodes[0].grid = [132, 1, 1]
    source = Source("dsv4.sparse_mla_decode", (), Place("model.py", 7), (), "layers.3.attn")
    launches = [
        Launch(source, "dsv4.sparse_mla_decode", cost=Cost(4_300_000, 0), basis="expression", handles=[0, 1]),
        Launch(Source("aten.add"), "aten.add", handles=[2]),
    ]
    spans = [Span("split", 0, 3), Span("combine", 3, 4), Span("add", 6, 7)]
    seen = ObservedCapture("cuda", "cuda:0", Capture((), lambda: None, "the step"), launches, nodes, [spans])
    report = assemble(seen, Replay, target="M", backend="dsv4")
    split, combine, add = report.nodes
    assert (split.floor_us, combine.floor_us, add.floor_us) == (0.75, 0.25, None)
    assert (split.us, split.win_us, combine.gap_us) == (3, 2.25, 2)
    assert (split.layer, split.part, split.call, combine.call, add.call) == ("layers.3", "attention", 0, 0, 1)
    assert report.us == report.replay_us == 7
    assert report.notes == []


CODE = """
triton_poi_fused_sigmoid_0 = async_compile.triton('triton_poi_fused_sigmoid_0', '''
''')
def call(args):
    with torch.cuda._DeviceGuard(0):
        buf0 = empty_strided_cuda((4, 16), (16, 1), torch.float32)
        # Topologically Sorted Source Nodes: [y], Original ATen: [aten.mm]
        extern_kernels.mm(arg0_1, reinterpret_tensor(arg1_1, (16, 16), (1, 16), 0), out=buf0)
        buf1 = empty_strided_cuda((4, 16), (16, 1), torch.float32)
        # Topologically Sorted Source Nodes: [sigmoid], Original ATen: [aten.sigmoid]
        # [Provenance debug handles] triton_poi_fused_sigmoid_0:2
        stream0 = get_raw_stream(0)
        triton_poi_fused_sigmoid_0.run(buf0, buf1, 64, stream=stream0)
    return (buf1, )
def benchmark_compiled_module():
    triton_poi_fused_sigmoid_0.run(buf0, buf1, 64, stream=stream0)
"""


def test_origins_are_read_from_numbers_and_from_names() -> None:
    origins = {
        "mm": _Origin("aten.mm", Place("m.py", 3), "layers.0", "y"),
        "sigmoid_7": _Origin("aten.sigmoid", Place("m.py", 5), "layers.1", "other"),
        "norm_2": _Origin("dsv4.norm", Place("m.py", 4), "layers.1", "other"),
    }
    handles = {"triton_poi_fused_sigmoid_0:2": ["norm_2", "sigmoid_7"]}
    lines = dict(_lines(CODE, origins, handles, {"norm_2": Cost(10, 0)}))
    gemm, fused = lines.values()
    assert [CODE.splitlines()[number - 1].strip()[:12] for number in lines] == ["extern_kerne", "triton_poi_f"]
    assert (gemm.kernel, gemm.tensors) == ("extern_kernels.mm", ("arg0_1", "arg1_1", "buf0"))
    assert gemm.source == Source("aten.mm", ("aten.mm",), Place("m.py", 3), (Place("m.py", 3),), "layers.0")
    assert (fused.source.op, fused.source.ops) == ("dsv4.norm", ("aten.sigmoid", "dsv4.norm"))
    assert (fused.source.place.line, fused.source.module) == (4, "layers.1")
    assert fused.source.cost == Cost(10, 0)


@pytest.mark.parametrize(
    ("name", "path", "layer"),
    [
        ("L['self'].layers.3.attn", "layers.3.attn", "layers.3"),
        ("L['s'].model.layers[11].mlp", "model.layers.11.mlp", "model.layers.11"),
        ("L['self']._modules['head']", "head", ""),
        ("layers.0._orig_mod", "layers.0", "layers.0"),
        ("L['self']", "", ""),
    ],
)
def test_paths_of_modules(name: str, path: str, layer: str) -> None:
    assert module_path(name) == path
    assert layer_of(path) == layer


@pytest.mark.parametrize(
    ("source", "kernel", "part"),
    [
        (Source("dsv4.moe_experts"), "k", "experts"),
        (Source("dsv4.mhc_pre"), "k", "hyper-connections"),
        (Source("dsv4.indexer_topk_slots"), "k", "attention"),
        (Source("dsv4.fp8_linear", module="layers.0.mlp.up"), "k", "experts"),
        (Source("dsv4.fp8_linear", module="layers.0.self_attn"), "k", "attention"),
        (Source("aten.mm", place=Place("m.py"), caller=Place("a/dsv4_compile/modules/output.py")), "k", "attention"),
        (Source("aten.mul", module="layers.0.attn_hc"), "k", "hyper-connections"),
        (Source("c10d.allreduce_"), "k", "collectives"),
        (Source("aten.add"), "ncclDevKernel_AllGather", "collectives"),
        (Source("aten.add"), "k", "other"),
    ],
)
def test_part_of_a_launch(source: Source, kernel: str, part: str) -> None:
    assert part_of(source, kernel) == part
