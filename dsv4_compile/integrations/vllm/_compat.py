"""Every name of vLLM that the plug-in uses, and the versions that have them.

No other file imports vLLM. Names are imported on first use (`from ._compat import AttentionBackend`), so importing this
file imports nothing of vLLM. Written against 0.32.0 on a CPU, which `make test-vllm` runs, and 0.26.0 on a GPU; the
files of 0.33.0 on a CPU and of 0.32.0 on a GPU were compared name by name.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..._compat import forget_compiled

ARCHITECTURE = "DeepseekV4ForCausalLM"


@dataclass(frozen=True, slots=True)
class ModelFile:
    """vLLM's model of DeepSeek-V4 for one type of device.

    module: its module. attention: the global that a decoder layer builds its attention from: a class, or with `selects`
    a function that returns one for a configuration. fused: globals that are functions of a different compiler, each
    with an op of the same name in `torch.ops.vllm`, which Dynamo traces.
    """

    module: str
    attention: str
    selects: bool = False
    fused: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The file, relative to vLLM's package."""
        return "/".join(self.module.split(".")[1:]) + ".py"

    @property
    def names(self) -> frozenset[str]:
        """Globals that the plug-in looks for."""
        return frozenset({"DeepseekV4Model", ARCHITECTURE, self.attention, *self.fused})


LAYER = "DeepseekV4DecoderLayer"
"""Global that vLLM's model builds its layers from, in every version that the plug-in was written for."""
BROADCAST = "mhc_pre_broadcast_tilelang"
"""Hyper-connection before the first layer: the one function of `fused` without an op in vLLM."""
MODELS = {
    "cpu": ModelFile("vllm.models.deepseek_v4.cpu.model", "DeepseekV4CPUAttention"),
    "cuda": ModelFile(
        "vllm.models.deepseek_v4.nvidia.model",
        "_select_dsv4_attn_cls",
        selects=True,
        fused=(
            "hc_head_fused_kernel_tilelang",
            "mhc_fused_post_pre_tilelang",
            "mhc_post_tilelang",
            "mhc_pre_tilelang",
            BROADCAST,
        ),
    ),
}
"""Models by the type of device that vLLM runs on."""
RANGE = "vLLM 0.32 or 0.33 on a CPU, or 0.26 on an NVIDIA GPU"

STATE_FIELDS = frozenset({"tokens_per_state", "state_content_bytes", "max_tp_shards"})
RATIO_FIELDS = frozenset({"compress_ratio", "kv_quant_mode"})
"""Fields of a cache's spec in 0.32, and in 0.26."""
COMMON_FIELDS = frozenset({"alignment", "cache_dtype_str", "model_version", "sliding_window"})
"""Fields of a cache's spec in every version."""

NAMES: dict[str, tuple[str, str]] = {
    "AttentionBackend": ("vllm.v1.attention.backend", "AttentionBackend"),
    "AttentionCGSupport": ("vllm.v1.attention.backend", "AttentionCGSupport"),
    "AttentionLayerBase": ("vllm.model_executor.layers.attention_layer_base", "AttentionLayerBase"),
    "AttentionMetadataBuilder": ("vllm.v1.attention.backend", "AttentionMetadataBuilder"),
    "CompilationMode": ("vllm.config", "CompilationMode"),
    "CUDAGraphMode": ("vllm.config", "CUDAGraphMode"),
    "InductorPass": ("vllm.compilation.passes.inductor_pass", "InductorPass"),
    "MLAAttentionSpec": ("vllm.v1.kv_cache_interface", "MLAAttentionSpec"),
    "MODELS_CONFIG_MAP": ("vllm.model_executor.models.config", "MODELS_CONFIG_MAP"),
    "ModelRegistry": ("vllm", "ModelRegistry"),
    "MultipleOf": ("vllm.v1.attention.backend", "MultipleOf"),
    "SlidingWindowMLASpec": ("vllm.v1.kv_cache_interface", "SlidingWindowMLASpec"),
    "current_platform": ("vllm.platforms", "current_platform"),
    "extract_layer_index": ("vllm.model_executor.models.utils", "extract_layer_index"),
    "get_forward_context": ("vllm.forward_context", "get_forward_context"),
    "get_tp_group": ("vllm.distributed.parallel_state", "get_tp_group"),
    "get_kv_quant_mode": ("vllm.v1.kv_cache_interface", "get_kv_quant_mode"),
    "init_logger": ("vllm.logger", "init_logger"),
    "reset_compile_wrapper": ("vllm.compilation.wrapper", "reset_compile_wrapper"),
    "set_current_vllm_config": ("vllm.config", "set_current_vllm_config"),
    "support_torch_compile": ("vllm.compilation.decorators", "support_torch_compile"),
    "tensor_model_parallel_all_reduce": ("vllm.distributed", "tensor_model_parallel_all_reduce"),
    "TorchCompileWithNoGuardsWrapper": ("vllm.compilation.wrapper", "TorchCompileWithNoGuardsWrapper"),
}
"""Module and attribute of each name that all versions have."""

BREAKABLE, AOT = "VLLM_USE_BREAKABLE_CUDAGRAPH", "VLLM_USE_AOT_COMPILE"
NEEDED = {BREAKABLE: "compiles nothing of DeepSeek-V4", AOT: "takes no backend but its own"}
"""Variables of vLLM that must be 0, and the effect of other values."""


def log(message: str, *values: Any) -> None:
    """Write a line into vLLM's log, which shows only loggers named after vLLM."""
    __getattr__("init_logger")("vllm.dsv4_compile").info(message, *values)


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = NAMES[name]
    value = getattr(importlib.import_module(module), attribute)
    if name != "current_platform":  # vLLM resolves it on first use
        globals()[name] = value
    return value


def device_type() -> str:
    """Return the type of device that vLLM runs on, such as "cuda"."""
    return str(__getattr__("current_platform").device_type)


def model_file() -> ModelFile:
    """Return vLLM's model for its device, which `Installed.why_unsupported` has found."""
    return MODELS[device_type()]


def base_model() -> Any:
    """Import the module of vLLM's model."""
    return importlib.import_module(model_file().module)


@dataclass(frozen=True, slots=True)
class Installed:
    """A vLLM as it lies there: version, type of device, globals of its model for that, and fields of cache specs.

    `names` is None where the file of the model is missing.
    """

    version: str
    device: str
    names: frozenset[str] | None
    spec_fields: frozenset[str]

    @classmethod
    def here(cls) -> Installed:
        """Look at the installed vLLM, without importing its model."""
        import vllm

        device = device_type()
        file = Path(vllm.__file__).parent / MODELS[device].path if device in MODELS else None
        return cls(
            version=str(vllm.__version__),
            device=device,
            names=globals_of(file) if file is not None and file.is_file() else None,
            spec_fields=_spec_fields(),
        )

    def why_unsupported(self, whole: bool = False) -> str:
        """Return why the plug-in does not run in this vLLM, or "": by its contents, not by its version number.

        whole: with this package's decoder layers.
        """
        if self.device not in MODELS:
            return f"device {self.device!r}: the plug-in was written for {' and '.join(MODELS)}"
        model = MODELS[self.device]
        if self.names is None:
            return f"no vllm/{model.path}"
        if missing := (model.names | ({LAYER} if whole else set())) - self.names:
            return f"vllm/{model.path} without {', '.join(sorted(missing))}"
        if missing := COMMON_FIELDS - self.spec_fields:
            return f"specs of caches without {', '.join(sorted(missing))}"
        either = [", ".join(sorted(fields - self.spec_fields)) for fields in (STATE_FIELDS, RATIO_FIELDS)]
        return f"specs of caches without {' and without '.join(either)}" if all(either) else ""


def globals_of(file: Path) -> frozenset[str]:
    """Return the names of classes, functions and imports at the top of a Python file."""
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
    return frozenset(names)


def _spec_fields() -> frozenset[str]:
    return frozenset(vars(__getattr__("SlidingWindowMLASpec")).get("__dataclass_fields__", ()))


def row_fields(tokens: int, packed: int | None) -> dict[str, Any]:
    """Return what a spec says of a cache's rows, in the fields that this vLLM has.

    Args:
        tokens: of the sequence that a row holds.
        packed: bytes of a row of `fp8_ds_mla`, None for rows of as many elements as their vector has dims.
    """
    shared = {"cache_dtype_str": "fp8_ds_mla", "model_version": "deepseek_v4"} if packed is not None else {}
    if _spec_fields() >= STATE_FIELDS:
        content = {"state_content_bytes": packed} if packed is not None else {}
        return shared | content | {"tokens_per_state": tokens, "max_tp_shards": 1}
    mode = {"kv_quant_mode": __getattr__("get_kv_quant_mode")("fp8_ds_mla")} if packed is not None else {}
    return shared | mode | {"compress_ratio": tokens}


def block_layouts() -> tuple[Any, ...]:
    """Return the layouts with pages of unlike caches side by side in a block. Only 0.32 and later ask."""
    layouts = importlib.import_module("vllm.v1.kv_cache_layout").KVCacheLayout
    return layouts.BLHNC, layouts.BLNHC


def attention_layers(module: Any, layer: type[torch.nn.Module]) -> AbstractContextManager[None]:
    """Let decoder layers that vLLM builds inside the block have `layer` for their attention."""
    file = model_file()
    return replaced(module, file.attention, (lambda config: layer) if file.selects else layer)


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Let a global of vLLM's model be `value` inside the block."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def compilable(model: Any) -> Any:
    """Return a class of vLLM's model that vLLM compiles: `model`, or a subclass that its decorator has marked."""
    if issubclass(model, __getattr__("TorchCompileWithNoGuardsWrapper")):
        return model
    marked = type(model.__name__, (model,), {"__module__": model.__module__, "__doc__": model.__doc__})
    return __getattr__("support_torch_compile")(marked)


def make_traceable(module: Any) -> None:
    """Replace functions of a different compiler in the model's module by calls of vLLM's ops, which Dynamo traces."""
    for name in model_file().fused:
        setattr(module, name, _broadcast if name == BROADCAST else getattr(torch.ops.vllm, name))


def _broadcast(x: torch.Tensor, fn: torch.Tensor, *args: Any, fn_broadcast: Any = None, **kwargs: Any) -> Any:
    """Expand embeddings `[T, hidden_size]` to streams and mix them: what vLLM's function does in one kernel."""
    streams = x.unsqueeze(1).expand(-1, fn.shape[1] // x.shape[1], -1).contiguous()
    return streams, *torch.ops.vllm.mhc_pre_tilelang(streams, fn, *args, **kwargs)


def prepare_compilation(wanted: bool) -> list[str]:
    """Set the variables of vLLM that a compiled model needs; return what contradicts them, a reason each."""
    if not wanted:
        return []
    wrong = [f"{name}={os.environ[name]}, with which vLLM {NEEDED[name]}" for name in NEEDED if _is_on(name)]
    if not wrong:
        for name in NEEDED:
            os.environ[name] = "0"
    return wrong


def _is_on(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def eager(config: Any) -> bool:
    """Return whether a vLLM configuration asks for no compilation at all."""
    mode = config.compilation_config.mode
    return bool(config.model_config.enforce_eager) or mode == __getattr__("CompilationMode").NONE


def choose_backend(config: Any, backend: str) -> None:
    """Let vLLM compile with `backend`, in one graph that it traces once, where the user has left the choice to it."""
    compilation = config.compilation_config
    if compilation.mode is None:
        compilation.mode = __getattr__("CompilationMode").DYNAMO_TRACE_ONCE
        compilation.backend = backend
    traced_once = compilation.mode == __getattr__("CompilationMode").DYNAMO_TRACE_ONCE
    if device_type() == "cuda" and traced_once and compilation.cudagraph_mode is None:
        compilation.cudagraph_mode = __getattr__("CUDAGraphMode").FULL  # vLLM's own choice needs its own backend


@contextmanager
def compile_threads() -> Iterator[None]:
    """Let Inductor and early builds use every core inside the block, where vLLM has set one thread for its own sake.

    On a CPU they stay one: vLLM's workers share the cores with OpenMP.
    """
    from ..._compat import inductor_config

    if device_type() == "cpu":
        yield
        return
    with inductor_config.patch(compile_threads=os.cpu_count() or 1):
        yield


def compile_again(model: Any) -> None:
    """Let the next call of a compiled model of vLLM compile it."""
    forget_compiled(model.original_code_object())  # vLLM keeps no guards: the old code would be used
    with __getattr__("set_current_vllm_config")(model.vllm_config):
        __getattr__("reset_compile_wrapper")(model)


def add_graph_pass(config: Any, graph_pass: Any) -> None:
    """Add a post-grad pass to the Inductor settings of a vLLM configuration."""
    config.compilation_config.inductor_compile_config["post_grad_custom_post_pass"] = graph_pass


def backend_name(config: Any) -> str:
    """Return the backend that a vLLM configuration, or a model of it, is compiled with."""
    return str(config.compilation_config.backend)


def set_backend(config: Any, backend: str) -> None:
    """Let vLLM compile with the function of this dotted name."""
    config.compilation_config.backend = backend
