"""Every name of vLLM that the plug-in uses, and the versions that have them.

No other file imports vLLM. Names are imported on first use (`from ._compat import AttentionBackend`), so importing this
file imports nothing of vLLM. Written against 0.32.0 on a CPU, which `make test-vllm` runs; the files of 0.33.0 were
compared name by name.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..._compat import forget_compiled

ARCHITECTURE = "DeepseekV4ForCausalLM"
FIRST, LAST = (0, 32), (0, 33)
"""Versions whose CPU model the plug-in was written for."""
RANGE = f"vLLM {FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]} on a CPU"

MODEL = "models/deepseek_v4/cpu/model.py"
GPU_MODEL = "models/deepseek_v4/nvidia/model.py"
SPEC_FIELDS = frozenset({"tokens_per_state", "state_content_bytes", "max_tp_shards"})
"""Fields of a cache's spec that 0.32 has and 0.26 has not."""

NAMES: dict[str, tuple[str, str]] = {
    "AttentionBackend": ("vllm.v1.attention.backend", "AttentionBackend"),
    "AttentionCGSupport": ("vllm.v1.attention.backend", "AttentionCGSupport"),
    "AttentionLayerBase": ("vllm.model_executor.layers.attention_layer_base", "AttentionLayerBase"),
    "AttentionMetadataBuilder": ("vllm.v1.attention.backend", "AttentionMetadataBuilder"),
    "CompilationMode": ("vllm.config", "CompilationMode"),
    "InductorPass": ("vllm.compilation.passes.inductor_pass", "InductorPass"),
    "KVCacheLayout": ("vllm.v1.kv_cache_layout", "KVCacheLayout"),
    "MLAAttentionSpec": ("vllm.v1.kv_cache_interface", "MLAAttentionSpec"),
    "MODELS_CONFIG_MAP": ("vllm.model_executor.models.config", "MODELS_CONFIG_MAP"),
    "ModelRegistry": ("vllm", "ModelRegistry"),
    "MultipleOf": ("vllm.v1.attention.backend", "MultipleOf"),
    "SlidingWindowMLASpec": ("vllm.v1.kv_cache_interface", "SlidingWindowMLASpec"),
    "current_platform": ("vllm.platforms", "current_platform"),
    "extract_layer_index": ("vllm.model_executor.models.utils", "extract_layer_index"),
    "get_forward_context": ("vllm.forward_context", "get_forward_context"),
    "init_logger": ("vllm.logger", "init_logger"),
    "model": ("vllm.models.deepseek_v4.cpu.model", ""),
    "reset_compile_wrapper": ("vllm.compilation.wrapper", "reset_compile_wrapper"),
    "set_current_vllm_config": ("vllm.config", "set_current_vllm_config"),
}
"""Module and attribute of each name; an empty attribute means the module itself."""

ATTENTION_CLASS = "DeepseekV4CPUAttention"
"""Global of the model's module that its decoder layer builds attention from."""
BREAKABLE, AOT = "VLLM_USE_BREAKABLE_CUDAGRAPH", "VLLM_USE_AOT_COMPILE"
NEEDED = {BREAKABLE: "compiles nothing of DeepSeek-V4", AOT: "takes no backend but its own"}
"""Variables of vLLM that must be 0, and what it does otherwise."""


def log(message: str, *values: Any) -> None:
    """Write a line into vLLM's log, which shows loggers of its own names only."""
    __getattr__("init_logger")("vllm.dsv4_compile").info(message, *values)


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = NAMES[name]
    loaded = importlib.import_module(module)
    value = getattr(loaded, attribute) if attribute else loaded
    if name != "current_platform":  # vLLM resolves it on first use
        globals()[name] = value
    return value


@dataclass(frozen=True, slots=True)
class Installed:
    """A vLLM as it lies there: version, device type of its platform, model files, and fields of its cache specs."""

    version: str
    device: str
    files: frozenset[str]
    spec_fields: frozenset[str]

    @classmethod
    def here(cls) -> Installed:
        """Look at the installed vLLM, without importing its model."""
        import vllm

        spec = __getattr__("SlidingWindowMLASpec")
        root = Path(vllm.__file__).parent
        return cls(
            version=str(vllm.__version__),
            device=str(__getattr__("current_platform").device_type),
            files=frozenset(file for file in (MODEL, GPU_MODEL) if (root / file).is_file()),
            spec_fields=frozenset(vars(spec).get("__dataclass_fields__", ())),
        )

    def why_unsupported(self) -> str:
        """Return why the plug-in does not run in this vLLM, or "": by what it has, not by its number."""
        if self.device != "cpu":
            model = "its model there" if GPU_MODEL in self.files else "a model that it may have there"
            return f"device {self.device!r}: {model} has fused hyper-connections of its own and is not compiled"
        if MODEL not in self.files:
            return f"no vllm/{MODEL}"
        missing = sorted(SPEC_FIELDS - self.spec_fields)
        return f"specs of caches without {', '.join(missing)}" if missing else ""


@contextmanager
def attention_layers(module: Any, layer: type[torch.nn.Module]) -> Iterator[None]:
    """Let decoder layers that vLLM builds inside the block have `layer` for their attention."""
    before = getattr(module, ATTENTION_CLASS)
    setattr(module, ATTENTION_CLASS, layer)
    try:
        yield
    finally:
        setattr(module, ATTENTION_CLASS, before)


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
