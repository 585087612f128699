"""Every private name of torch and Triton that this package uses, and the versions they were tried with.

No other file uses a private name of torch. Those of the compiler are imported when they are first read,
`from ._compat import ir`, so importing the package loads neither Inductor nor Triton.

CI has torch 2.13.0 and Triton 3.7.1. All tests that need no GPU ran with torch 2.11.0 and Triton 3.6.0, 2.14.1 and
3.8.0, and 2.15.0 and 3.9.0 too, on Python 3.11; the last on 3.13. Nothing ran with torch 2.12.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch

from .errors import check

OpOverload = torch._ops.OpOverload
"""One signature of an op: what a graph node calls."""
OpOverloadPacket = torch._ops.OpOverloadPacket
"""All signatures of an op under one name: what a traced graph may call."""
assert_async = torch._assert_async
"""Fail on the device, without waiting for it, unless a tensor is true."""
below_autograd = torch._C._AutoDispatchBelowAutograd
"""Context in which an op dispatches as if no input required grad."""

TORCH_FIRST = (2, 11)
TORCH_LAST = (2, 15)
TRITON_FIRST = (3, 6)
TRITON_LAST = (3, 9)
"""Kernels for Hopper are written in Gluon, which is experimental: 3.8 and 3.9 have other names for what they call."""


@dataclass(frozen=True, slots=True)
class PrivateName:
    """Where a private name lives, and what it is used for. An empty `attribute` means the module itself."""

    module: str
    attribute: str
    purpose: str


PRIVATE: dict[str, PrivateName] = {
    "compile_fx": PrivateName("torch._inductor.compile_fx", "compile_fx", "compiles a graph; the backend wraps it"),
    "inductor_config": PrivateName(
        "torch._inductor.config", "", "checks option names and types; reads codegen choices"
    ),
    "list_mode_options": PrivateName("torch._inductor", "list_mode_options", "what torch.compile(mode=...) stands for"),
    "custom_graph_pass": PrivateName("torch._inductor.custom_graph_pass", "", "classes of graph passes"),
    "CustomGraphPass": PrivateName(
        "torch._inductor.custom_graph_pass", "CustomGraphPass", "a graph pass whose uuid is part of the cache key"
    ),
    "ir": PrivateName("torch._inductor.ir", "", "the nodes that lowerings build"),
    "lowerings": PrivateName("torch._inductor.lowering", "lowerings", "which ops have a lowering already"),
    "register_lowering": PrivateName("torch._inductor.lowering", "register_lowering", "adds a lowering for an op"),
    "fallback_handler": PrivateName("torch._inductor.lowering", "fallback_handler", "calls an op from a lowering"),
    "ops": PrivateName("torch._inductor.virtualized", "ops", "scalar operations inside an IR node"),
    "V": PrivateName("torch._inductor.virtualized", "V", "the graph that is being lowered"),
    "make_fx": PrivateName("torch.fx.experimental.proxy_tensor", "make_fx", "traces a reference that is to be lowered"),
    "select_decomp_table": PrivateName(
        "torch._inductor.decomposition", "select_decomp_table", "what Inductor takes ops apart into"
    ),
    "clone_preserve_strides": PrivateName(
        "torch._prims_common", "clone_preserve_strides", "the fake of a cache that an op has written"
    ),
    "ReductionHint": PrivateName("torch._inductor.runtime.hints", "ReductionHint", "asks for one pass over a row"),
    "auto_functionalize": PrivateName(
        "torch._higher_order_ops.auto_functionalize", "", "counts slices from the storage's first element"
    ),
    "FloorDiv": PrivateName("torch.utils._sympy.functions", "FloorDiv", "integer division in index expressions"),
    "ModularIndexing": PrivateName("torch.utils._sympy.functions", "ModularIndexing", "remainder in index expressions"),
    "mark_static": PrivateName("torch._dynamo", "mark_static", "keeps the dims of a cache out of a graph's symbols"),
    "mark_static_address": PrivateName("torch._dynamo", "mark_static_address", "says that a cache keeps its address"),
    "maybe_mark_dynamic": PrivateName("torch._dynamo", "maybe_mark_dynamic", "says that a dim will vary"),
    "FakeTensorMode": PrivateName("torch._subclasses.fake_tensor", "FakeTensorMode", "runs an op's fake alone"),
    "pytree": PrivateName("torch.utils._pytree", "", "walks over nested arguments and results"),
    "TorchDispatchMode": PrivateName("torch.utils._python_dispatch", "TorchDispatchMode", "sees every op that runs"),
    "GraphLowering": PrivateName("torch._inductor.graph", "GraphLowering", "hook that sees the generated code"),
    "AsyncCompile": PrivateName("torch._inductor.async_compile", "AsyncCompile", "where kernel sources are built"),
    "DTYPE_TO_CPP": PrivateName("torch._inductor.codegen.cpp_utils", "DTYPE_TO_CPP", "what dtypes are called in C++"),
    "dynamo_config": PrivateName("torch._dynamo.config", "", "settings of tracing; explain() sets its own meanwhile"),
    "functorch_config": PrivateName("torch._functorch.config", "", "switches a cache of compiled graphs off"),
    "counters": PrivateName("torch._dynamo.utils", "counters", "torch's counts, restored after explain()"),
    "ReinplaceCounters": PrivateName("torch._dynamo.utils", "ReinplaceCounters", "mutations that became copies"),
    "CompileContext": PrivateName("torch._guards", "CompileContext", "which compilation is under way"),
    "lookup_backend": PrivateName("torch._dynamo", "lookup_backend", "the function behind a backend's name"),
    "convert_frame": PrivateName("torch._dynamo.convert_frame", "", "which functions were traced"),
    "RestartAnalysis": PrivateName("torch._dynamo.exc", "RestartAnalysis", "raised where a graph is traced anew"),
    "eval_frame": PrivateName("torch._C._dynamo.eval_frame", "", "forgets what was compiled for one function"),
    "CleanupManager": PrivateName("torch._dynamo.utils", "CleanupManager", "names torch adds to modules it compiles"),
    "pgo": PrivateName("torch._dynamo.pgo", "", "sizes seen so far, set aside during explain()"),
    "triton_driver": PrivateName("triton.runtime", "driver", "takes the driver that stands in for a GPU in tests"),
    "triton_interpreter": PrivateName("triton.runtime.interpreter", "", "runs generated kernels on the CPU in tests"),
    "triton_ir": PrivateName("triton._C.libtriton", "ir", "reads a compiled kernel again, in tests"),
    "triton_nvidia": PrivateName("triton._C.libtriton", "nvidia", "shares out its shared memory again"),
    "triton_passes": PrivateName("triton._C.libtriton", "passes", "what comes before that"),
}


def __getattr__(name: str) -> Any:
    """Import a private name on first use and keep it."""
    entry = PRIVATE.get(name)
    if entry is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(entry.module)
    value = getattr(module, entry.attribute) if entry.attribute else module
    globals()[name] = value
    return value


def torch_release() -> tuple[int, int]:
    """Major and minor version of the installed torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def triton_release() -> tuple[int, int]:
    """Major and minor version of the installed Triton."""
    major, minor = importlib.import_module("triton").__version__.split(".")[:2]
    return int(major), int(minor)


def triton_known() -> bool:
    """Whether kernels for Hopper have been compiled with the installed Triton."""
    return TRITON_FIRST <= triton_release() <= TRITON_LAST


def check_torch() -> None:
    """Raise E101 unless the installed torch is one whose private names this release was tried with."""
    first, last = (".".join(map(str, version)) for version in (TORCH_FIRST, TORCH_LAST))
    above = f"{TORCH_LAST[0]}.{TORCH_LAST[1] + 1}"
    check(
        TORCH_FIRST <= torch_release() <= TORCH_LAST,
        "E101",
        got=f"torch {torch.__version__}, Python {platform.python_version()}",
        rule=f'backend="dsv4" works with torch {first} to {last}',
        why="it builds Inductor IR, whose interface changes between releases; the ops alone work with any torch",
        fix=f'pip install "torch>={first},<{above}"',
    )


def triton_version() -> str:
    """Version of the installed Triton without importing it; "none" when there is none."""
    loaded = sys.modules.get("triton")
    if loaded is not None:
        return str(loaded.__version__)
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "none"


@functools.cache
def device_architecture(device: torch.device) -> str:
    """What compiled code for `device` depends on: "cpu", "cuda sm_90", "cuda gfx942"."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip is not None:
        return f"cuda {torch.cuda.get_device_properties(device).gcnArchName.split(':')[0]}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda sm_{major}{minor}"


def storage_identity(tensor: torch.Tensor) -> int:
    """The same number for all views of one tensor, of fake tensors too, which have no address."""
    return int(tensor.untyped_storage()._cdata)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What `tensor` is a view of; None for what is none, and for a view that was made in inference mode."""
    base: torch.Tensor | None = tensor._base
    return base


def has_device_kernel(op: OpOverload, device: torch.device) -> bool:
    """Whether a kernel of its own is registered for `op` on `device`, beside the reference that serves all devices."""
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def recover_from_failed_capture(device: torch.device, pool: Any) -> None:
    """Undo what a capture that could not be ended leaves behind: allocations into `pool`, and a generator that waits.

    torch ends both only after CUDA has ended the capture without an error.
    """
    with suppress(RuntimeError):  # the allocator has left the pool
        torch._C._cuda_endAllocateToPool(device.index, pool)
    with suppress(RuntimeError):
        generator = torch.cuda.default_generators[device.index]
        generator.graphsafe_set_state(generator.clone_state())


@contextmanager
def without_cudagraph_trees(refuse: Callable[[], None]) -> Iterator[None]:
    """Call `refuse` where Inductor's own CUDA graphs are replayed inside the block, from whatever was compiled so."""
    module = sys.modules.get("torch._inductor.cudagraph_trees")
    if module is None:  # nothing has been compiled so
        yield
        return
    manager: Any = module.CUDAGraphTreeManager
    replay = manager._run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        refuse()
        return replay(self, *args, **kwargs)

    manager._run = run
    try:
        yield
    finally:
        manager._run = replay


@contextmanager
def ue8m0_in_cpp() -> Iterator[None]:
    """Inside the block Inductor's C++ knows UE8M0 scales: up to torch 2.13 it has the type, but no name for it."""
    names: dict[torch.dtype, str] = __getattr__("DTYPE_TO_CPP")
    missing = torch.float8_e8m0fnu not in names
    if missing:
        names[torch.float8_e8m0fnu] = "at::Float8_e8m0fnu"
    try:
        yield
    finally:
        if missing:
            del names[torch.float8_e8m0fnu]


def run_graph_pass(graph_pass: Any, graph: torch.fx.Graph) -> None:
    """Call a user's graph pass. Since 2.12 a pass may ask whether the graph is for inference, as ours always are."""
    aware: Any = getattr(__getattr__("custom_graph_pass"), "CustomInferenceAwareGraphPass", ())
    if isinstance(graph_pass, aware):
        graph_pass(graph, is_inference=True)
    else:
        graph_pass(graph)


def codegen_of(device: torch.device) -> str:
    """The language Inductor generates for `device`: "cpp", "triton" or another of its backends."""
    return str(getattr(__getattr__("inductor_config"), f"{device.type}_backend", "triton"))


def traced_functions() -> list[CodeType]:
    """Code of every function that Dynamo has looked at and that still exists."""
    found = (reference() for reference in __getattr__("convert_frame").input_codes.seen)
    return [code for code in found if code is not None]


def compiled_versions(code: CodeType) -> int:
    """How many compiled versions Dynamo holds for a function."""
    return len(__getattr__("eval_frame")._debug_get_cache_entry_list(code))


def forget_compiled(code: CodeType) -> None:
    """Drop every compiled version of a function, and the note that it cannot be traced."""
    __getattr__("eval_frame").reset_code(code)


def generated_functions() -> set[int]:
    """Ids of the code objects that Dynamo has generated and keeps global names for."""
    return set(__getattr__("CleanupManager").instance.values)


def remove_globals_of(generated: set[int]) -> None:
    """Remove the names of compiled graphs that generated code left in users' modules. It must not run any more."""
    manager = __getattr__("CleanupManager").instance
    for identity in generated & set(manager.values):
        manager._remove_id(identity)


def trace_again(codes: Iterable[CodeType]) -> None:
    """Drop the note that these functions cannot be traced; compiled versions stay."""
    module = __getattr__("eval_frame")
    default = module._FrameAction.DEFAULT
    for code in codes:
        module.set_code_exec_strategy(code, module._FrameExecStrategy(default, default))


def current_compile_id() -> str:
    """torch's name of the compilation under way, "0/1" for the second version of the first function, or ""."""
    return str(__getattr__("CompileContext").current_compile_id() or "")


def variables_of_traced_frame() -> dict[str, Any]:
    """Variables of the call that Dynamo is about to compile: globals as G, locals by name. Empty outside a compilation.

    Called from a handler of torch's log, so the caller that knows the frame is further up on the stack.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        traced: Any = frame.f_locals.get("frame")
        if frame.f_code.co_filename.endswith("guards.py") and hasattr(traced, "f_locals"):
            return {"G": traced.f_globals, **traced.f_locals}
        frame = frame.f_back
    return {}
