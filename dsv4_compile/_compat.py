"""Private names of torch, Triton and transformers that this package uses, and the versions that it was tested with.

No other file uses a private name of torch. Names of the compiler are imported on first use (`from ._compat import ir`),
so importing the package loads neither Inductor nor Triton.

CI has torch 2.13.0 with Triton 3.7.1. All tests that need no GPU also ran with torch 2.11.0 and Triton 3.6.0, 2.14.1
and 3.8.0, and 2.15.0 and 3.9.0, on Python 3.11 (the last on 3.13). Nothing ran with torch 2.12.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from types import CodeType, FrameType
from typing import Any

import torch

from .errors import check

OpOverload = torch._ops.OpOverload
"""One signature of an op, the target of a graph node."""
OpOverloadPacket = torch._ops.OpOverloadPacket
"""All signatures of an op under one name, a target in traced graphs."""
assert_async = torch._assert_async
"""Function that fails on the device, without synchronisation, unless a tensor is true."""
copy_all: Any = torch._foreach_copy_
"""Function of lists of tensors, to and from: copies in one launch, where dtypes and layouts allow it."""
functional_collectives: Any = torch.ops._c10d_functional
"""Collectives that torch.compile traces."""
onednn_linear: Any = None
"""Function of x `[T, K]` and a weight `[N, K]`, float32: oneDNN's GEMM. None where torch is built without oneDNN."""
if torch.backends.mkldnn.is_available():
    _pointwise = torch.ops.mkldnn._linear_pointwise.default
    onednn_linear = lambda x, weight: _pointwise(x, weight, None, "none", [], "")  # noqa: E731
below_autograd = torch._C._AutoDispatchBelowAutograd
"""Context that dispatches ops as if no input required grad."""

TORCH_FIRST = (2, 11)
TORCH_LAST = (2, 15)
TRITON_FIRST = (3, 6)
TRITON_LAST = (3, 9)
"""Range of Triton versions. Hopper kernels use Gluon, which is experimental: 3.8 and 3.9 renamed parts of it."""
TRANSFORMERS_FIRST = (5, 17)
TRANSFORMERS_LAST = (5, 24)
CACHE_NAMES = ("cache", "past_key_values")
"""Names of the cache in calls and results of transformers, newest first: 5.24 has renamed it."""
VERSION = "_version"
"""Number that grows when a tensor is written in place; inference tensors have none."""
WRAPPED_BACKEND = "_torchdynamo_orig_backend"
"""Attribute of Dynamo's wrapper of a backend."""
EXPERTS_GATE = "_apply_gate"
"""Method of transformers' experts that multiplies gate and up."""


@dataclass(frozen=True, slots=True)
class PrivateName:
    """Module and purpose of a private name. An empty `attribute` means the module itself."""

    module: str
    attribute: str
    purpose: str


PRIVATE: dict[str, PrivateName] = {
    "compile_fx": PrivateName("torch._inductor.compile_fx", "compile_fx", "compiles a graph for the backend"),
    "compile_fx_inner": PrivateName("torch._inductor.compile_fx", "compile_fx_inner", "compiles a part of a graph"),
    "aot_autograd_result": PrivateName("torch._functorch._aot_autograd.aot_autograd_result", "", "graphs to be cached"),
    "TracingContext": PrivateName("torch._guards", "TracingContext", "what a compilation reports to AOTAutograd"),
    "inductor_config": PrivateName("torch._inductor.config", "", "option names, types and codegen choices"),
    "compile_tasks": PrivateName("torch._inductor.runtime.compile_tasks", "", "chooses the ptxas that Triton runs"),
    "cache_dir_utils": PrivateName("torch._inductor.runtime.cache_dir_utils", "", "folder for what is compiled here"),
    "CacheArtifactManager": PrivateName("torch.compiler._cache", "CacheArtifactManager", "reads artifacts without use"),
    "codecache": PrivateName("torch._inductor.codecache", "", "headers that are compiled before generated C++"),
    "cpp_builder": PrivateName("torch._inductor.cpp_builder", "", "names the C++ compiler, or says that none works"),
    "joint_graph": PrivateName("torch._inductor.fx_passes.joint_graph", "", "removes `x * 1` and `x + 0`"),
    "output_code": PrivateName("torch._inductor.output_code", "", "loads a graph that was compiled before"),
    "triton_compat": PrivateName("torch._inductor.runtime.triton_compat", "", "hash of Triton's sources in cache keys"),
    "cpu_vec_isa": PrivateName("torch._inductor.cpu_vec_isa", "", "vector instructions that generated C++ uses"),
    "list_mode_options": PrivateName("torch._inductor", "list_mode_options", "settings of torch.compile(mode=...)"),
    "custom_graph_pass": PrivateName("torch._inductor.custom_graph_pass", "", "classes of graph passes"),
    "CustomGraphPass": PrivateName("torch._inductor.custom_graph_pass", "CustomGraphPass", "a graph pass with a uuid"),
    "ir": PrivateName("torch._inductor.ir", "", "nodes that lowerings build"),
    "lowerings": PrivateName("torch._inductor.lowering", "lowerings", "ops that have a lowering already"),
    "register_lowering": PrivateName("torch._inductor.lowering", "register_lowering", "adds a lowering for an op"),
    "make_fallback": PrivateName("torch._inductor.lowering", "make_fallback", "lowers an op to a call of it"),
    "fallback_handler": PrivateName("torch._inductor.lowering", "fallback_handler", "calls an op from a lowering"),
    "ops": PrivateName("torch._inductor.virtualized", "ops", "scalar operations inside an IR node"),
    "V": PrivateName("torch._inductor.virtualized", "V", "graph that is being lowered"),
    "make_fx": PrivateName("torch.fx.experimental.proxy_tensor", "make_fx", "traces a reference to lower it"),
    "select_decomp_table": PrivateName("torch._inductor.decomposition", "select_decomp_table", "its decompositions"),
    "clone_preserve_strides": PrivateName("torch._prims_common", "clone_preserve_strides", "fake of a written cache"),
    "ReductionHint": PrivateName("torch._inductor.runtime.hints", "ReductionHint", "asks for one pass over a row"),
    "auto_functionalize": PrivateName("torch._higher_order_ops.auto_functionalize", "", "counts slices of a storage"),
    "FloorDiv": PrivateName("torch.utils._sympy.functions", "FloorDiv", "integer division in index expressions"),
    "ModularIndexing": PrivateName("torch.utils._sympy.functions", "ModularIndexing", "remainder in index expressions"),
    "function_modes": PrivateName("torch.overrides", "", "modes that a thread is in, which Dynamo guards"),
    "default_device": PrivateName("torch.utils._device", "", "the mode of a default device, and that device"),
    "mark_static": PrivateName("torch._dynamo", "mark_static", "keeps the dims of a cache static"),
    "mark_static_address": PrivateName("torch._dynamo", "mark_static_address", "marks a cache that keeps its address"),
    "maybe_mark_dynamic": PrivateName("torch._dynamo", "maybe_mark_dynamic", "marks a dim as dynamic"),
    "symmetric_memory": PrivateName("torch.distributed._symmetric_memory", "", "buffers that peers read"),
    "resolve_group": PrivateName("torch.distributed.distributed_c10d", "_resolve_process_group", "group of a name"),
    "FakeStore": PrivateName("torch.testing._internal.distributed.fake_pg", "FakeStore", "one rank without the others"),
    "default_store": PrivateName("torch.distributed.distributed_c10d", "_get_default_store", "where ranks leave beats"),
    "FakeTensorMode": PrivateName("torch._subclasses.fake_tensor", "FakeTensorMode", "runs an op's fake alone"),
    "pytree": PrivateName("torch.utils._pytree", "", "flattens nested arguments and results"),
    "TorchDispatchMode": PrivateName("torch.utils._python_dispatch", "TorchDispatchMode", "sees every op that runs"),
    "GraphLowering": PrivateName("torch._inductor.graph", "GraphLowering", "hook for the generated code"),
    "inductor_debug": PrivateName("torch._inductor.debug", "", "graph nodes that each generated kernel is made of"),
    "AsyncCompile": PrivateName("torch._inductor.async_compile", "AsyncCompile", "builds kernel sources"),
    "DTYPE_TO_CPP": PrivateName("torch._inductor.codegen.cpp_utils", "DTYPE_TO_CPP", "names of dtypes in C++"),
    "dtype_propagation": PrivateName("torch._inductor.dtype_propagation", "", "dtypes of results, quicker in tests"),
    "dtype_rules": PrivateName("torch._inductor.utils", "op_dtype_propagation_rules", "what these depend on, in tests"),
    "dynamo_guards": PrivateName("torch._dynamo.guards", "", "times its guards, but not in tests"),
    "symbolic_convert": PrivateName("torch._dynamo.symbolic_convert", "", "knows the current trace and its backend"),
    "sizevars": PrivateName("torch._inductor.sizevars", "", "simplifies indices, less often in tests"),
    "dynamo_config": PrivateName("torch._dynamo.config", "", "settings of tracing, which explain() overrides"),
    "functorch_config": PrivateName("torch._functorch.config", "", "disables a cache of compiled graphs"),
    "counters": PrivateName("torch._dynamo.utils", "counters", "torch's counts, restored after explain()"),
    "ReinplaceCounters": PrivateName("torch._dynamo.utils", "ReinplaceCounters", "mutations that became copies"),
    "CompileContext": PrivateName("torch._guards", "CompileContext", "id of the current compilation"),
    "TensorGuards": PrivateName("torch._C._dynamo.guards", "TensorGuards", "compares many tensors in one call"),
    "module_hooks": PrivateName("torch.nn.modules.module", "", "hooks of all modules"),
    "lookup_backend": PrivateName("torch._dynamo", "lookup_backend", "function of a backend's name"),
    "compile_lock": PrivateName("torch._dynamo.convert_frame", "compile_lock", "held by the thread that compiles"),
    "compile_callbacks": PrivateName("torch._dynamo.callback", "callback_handler", "calls as a graph compiles"),
    "convert_frame": PrivateName("torch._dynamo.convert_frame", "", "functions that were traced"),
    "RecompileLimit": PrivateName("torch._dynamo.exc", "FailOnRecompileLimitHit", "raised for one graph too many"),
    "RestartAnalysis": PrivateName("torch._dynamo.exc", "RestartAnalysis", "raised when a graph is traced again"),
    "TorchDynamoException": PrivateName("torch._dynamo.exc", "TorchDynamoException", "wraps errors of a trace"),
    "eval_frame": PrivateName("torch._C._dynamo.eval_frame", "", "drops the compiled versions of one function"),
    "CleanupManager": PrivateName("torch._dynamo.utils", "CleanupManager", "names that torch adds to compiled modules"),
    "pgo": PrivateName("torch._dynamo.pgo", "", "sizes seen so far, restored after explain()"),
    "OperatorIssue": PrivateName("torch._inductor.exc", "OperatorIssue", "writes the arguments of an op"),
    "triton_driver": PrivateName("triton.runtime", "driver", "driver, replaced by a fake GPU in tests"),
    "triton_interpreter": PrivateName("triton.runtime.interpreter", "", "runs generated kernels on the CPU in tests"),
    "triton_ir": PrivateName("triton._C.libtriton", "ir", "parses a compiled kernel in tests"),
    "triton_nvidia": PrivateName("triton._C.libtriton", "nvidia", "allocates its shared memory in tests"),
    "triton_passes": PrivateName("triton._C.libtriton", "passes", "passes before that allocation, in tests"),
}


def __getattr__(name: str) -> Any:
    """Import a private name on first use and keep it."""
    if (entry := PRIVATE.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(entry.module)
    value = getattr(module, entry.attribute) if entry.attribute else module
    globals()[name] = value
    return value


def free_pinned() -> None:
    """Return pinned memory without users to the system. Builds of torch without a GPU have none to return."""
    release = getattr(torch._C, "_host_emptyCache", None)
    if release is not None:
        release()


def torch_release() -> tuple[int, ...]:
    """Return major and minor version of the installed torch."""
    return tuple(map(int, torch.__version__.split(".")[:2]))


def triton_release() -> tuple[int, ...]:
    """Return major and minor version of the installed Triton."""
    return tuple(map(int, importlib.import_module("triton").__version__.split(".")[:2]))


def triton_known() -> bool:
    """Return whether Hopper kernels were tested with the installed Triton."""
    return TRITON_FIRST <= triton_release() <= TRITON_LAST


def check_torch() -> None:
    """Raise E101 unless the installed torch is a version that this release was tested with."""
    first, last = (".".join(map(str, version)) for version in (TORCH_FIRST, TORCH_LAST))
    check(
        TORCH_FIRST <= torch_release() <= TORCH_LAST,
        "E101",
        got=f"torch {torch.__version__}, Python {platform.python_version()}",
        rule=f'backend="dsv4" works with torch {first} to {last}',
        why="it builds Inductor IR, whose interface changes between releases; the ops alone work with any torch",
        fix=f'pip install "torch>={first},<{TORCH_LAST[0]}.{TORCH_LAST[1] + 1}"',
    )


def triton_version() -> str:
    """Return the version of the installed Triton without importing it, or "none"."""
    loaded = sys.modules.get("triton")
    if loaded is not None:
        return str(loaded.__version__)
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "none"


@functools.cache
def device_architecture(device: torch.device) -> str:
    """Return the architecture that code for `device` is compiled for: "cpu", "cuda sm_90", "cuda gfx942"."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip is not None:
        return f"cuda {torch.cuda.get_device_properties(device).gcnArchName.split(':')[0]}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda sm_{major}{minor}"


def storage_identity(tensor: torch.Tensor) -> int:
    """Return a number that all views of one tensor share, also for fake tensors, which have no address."""
    return int(tensor.untyped_storage()._cdata)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that `tensor` is a view of, or None if it is none or was made in inference mode."""
    base: torch.Tensor | None = tensor._base
    return base


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that grows when `tensor` is written in place; inference tensors have none, and give -1."""
    return -1 if tensor.is_inference() else int(tensor._version)


def lie_at(tensors: list[torch.Tensor], addresses: list[int]) -> bool:
    """Return whether each tensor begins at its address, in one call where torch is built with CUDA."""
    if compare := getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None):
        return bool(compare(tensors, addresses, list(range(len(tensors)))))
    return list(map(torch.Tensor.data_ptr, tensors)) == addresses


def has_device_kernel(op: OpOverload, device: torch.device) -> bool:
    """Return whether `op` has a kernel for `device`, not only the reference for all devices."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), torch._C._dispatch_key_for_device(device.type))


def recover_from_failed_capture(device: torch.device, pool: Any) -> None:
    """Clean up after a capture that could not be ended: stop allocations into `pool`, and reset the generator.

    torch does both only after CUDA ends a capture without an error.
    """
    with suppress(RuntimeError):  # already stopped
        torch._C._cuda_endAllocateToPool(device.index, pool)
    with suppress(RuntimeError):
        generator = torch.cuda.default_generators[device.index]
        generator.graphsafe_set_state(generator.clone_state())


_replay_lock = threading.Lock()
_before_replay: list[tuple[Any, Callable[[], None]]] = []
"""Calls before a replay, one for each open block of `without_cudagraph_trees`, with the original replay."""


@contextmanager
def without_cudagraph_trees(fail: Callable[[], None]) -> Iterator[None]:
    """Call `fail` before any replay of Inductor's own CUDA graphs inside the block; blocks of threads may overlap."""
    module = sys.modules.get("torch._inductor.cudagraph_trees")
    if module is None:  # not imported, so nothing to replay
        yield
        return
    manager: Any = module.CUDAGraphTreeManager

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        for _, refuse in tuple(_before_replay):
            refuse()
        return replay(self, *args, **kwargs)

    with _replay_lock:
        replay = _before_replay[0][0] if _before_replay else manager._run
        block = (replay, fail)
        _before_replay.append(block)
        manager._run = run
    try:
        yield
    finally:
        with _replay_lock:
            _before_replay.remove(block)
            if not _before_replay:
                manager._run = replay


def run_graph_pass(graph_pass: Any, graph: torch.fx.Graph) -> None:
    """Call a user's graph pass. Since torch 2.12 a pass may ask for `is_inference`, which is always true here."""
    aware: Any = getattr(__getattr__("custom_graph_pass"), "CustomInferenceAwareGraphPass", ())
    graph_pass(graph, **({"is_inference": True} if isinstance(graph_pass, aware) else {}))


def codegen_of(device: torch.device) -> str:
    """Return the language that Inductor generates for `device`: "cpp", "triton" or the name of a different backend."""
    return str(getattr(__getattr__("inductor_config"), f"{device.type}_backend", "triton"))


def kernel_origins() -> dict[str, list[str]]:
    """Return the nodes of Inductor's graph in each launch, `kernel:number`, if provenance tracking is on."""
    return dict(getattr(__getattr__("inductor_debug"), "_inductor_triton_kernel_to_post_grad_node_info", {}))


def traced_functions() -> list[CodeType]:
    """Return the code of every function that Dynamo has traced and that still exists."""
    codes = (reference() for reference in __getattr__("convert_frame").input_codes.seen)
    return [code for code in codes if code is not None]


def compiled_versions(code: CodeType) -> int:
    """Return the number of compiled versions that Dynamo holds for a function."""
    return len(__getattr__("eval_frame")._debug_get_cache_entry_list(code))


def forget_compiled(code: CodeType) -> None:
    """Drop every compiled version of a function, and the mark that it cannot be traced."""
    __getattr__("eval_frame").reset_code(code)


def generated_functions() -> set[int]:
    """Return the ids of generated code objects that Dynamo keeps global names for."""
    return set(__getattr__("CleanupManager").instance.values)


def remove_globals_of(generated: set[int]) -> None:
    """Remove the global names of generated code, which must not run any more, from users' modules."""
    manager = __getattr__("CleanupManager").instance
    for identity in generated & set(manager.values):
        manager._remove_id(identity)


def trace_again(codes: Iterable[CodeType]) -> None:
    """Drop the mark that these functions cannot be traced; compiled versions stay."""
    module = __getattr__("eval_frame")
    default = module._FrameAction.DEFAULT
    for code in codes:
        module.set_code_exec_strategy(code, module._FrameExecStrategy(default, default))


def current_compile_id() -> str:
    """Return torch's id of the current compilation, "0/1" for the second version of the first function, or ""."""
    return str(__getattr__("CompileContext").current_compile_id() or "")


def variables_of_traced_frame() -> dict[str, Any]:
    """Return the variables of the frame that Dynamo compiles: globals as G, locals by name. Empty outside.

    It is called from a handler of torch's log, so the frame is found in a caller on the stack.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        traced: Any = frame.f_locals.get("frame")
        if frame.f_code.co_filename.endswith("guards.py") and hasattr(traced, "f_locals"):
            return {"G": traced.f_globals, **traced.f_locals}
        frame = frame.f_back
    return {}


def cache_places() -> dict[str, list[str]]:
    """Return the parameters of calls and fields of results in transformers among which a cache is, by where."""
    from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM, DeepseekV4Model

    forwards: tuple[Any, ...] = (DeepseekV4Model.forward, DeepseekV4ForCausalLM.forward)
    calls = (*forwards, GenerationMixin.prepare_inputs_for_generation)
    results: tuple[Any, ...] = (MoeModelOutputWithPast, MoeCausalLMOutputWithPast, GenerateDecoderOnlyOutput)
    parameters = {call.__qualname__: list(inspect.signature(call).parameters) for call in calls}
    return parameters | {result.__name__: [field.name for field in fields(result)] for result in results}


def cache_name() -> str:
    """Return the one of `CACHE_NAMES` that the installed transformers uses in all places, or ""."""
    places = cache_places().values()
    return next((name for name in CACHE_NAMES if all(name in names for names in places)), "")


def check_transformers() -> None:
    """Raise E208 if the installed transformers calls the cache by a name that this release does not know."""
    first, last = (".".join(map(str, version)) for version in (TRANSFORMERS_FIRST, TRANSFORMERS_LAST))
    names_of_cache = [
        f"{module} has {next((name for name in CACHE_NAMES if name in names), ', '.join(names))}"
        for module, names in cache_places().items()
    ]
    check(
        bool(cache_name()),
        "E208",
        got=f"transformers {importlib.import_module('transformers').__version__}: {'; '.join(names_of_cache)}",
        rule=f"convert works with transformers {first} to {last}",
        why=f"it has renamed the cache, which was {' or '.join(CACHE_NAMES)}",
        fix=f"pip install 'transformers>={first},<{TRANSFORMERS_LAST[0]}.{TRANSFORMERS_LAST[1] + 1}'",
    )


def kept_in_float32(model: Any, name: str) -> bool:
    """Return whether transformers keeps a parameter or buffer of `model` in float32 for any dtype of the model."""
    return not set(model._keep_in_fp32_modules_strict or ()).isdisjoint(name.split("."))
