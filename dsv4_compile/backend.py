"""Backend of torch.compile: `torch.compile(model, backend="dsv4")`.

It runs Inductor's compile_fx with one more graph pass (see `passes`). No private name of torch is imported before a
graph is compiled.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import GraphModule

from ._compat import check_torch
from .ops.common.define import OPS
from .options import Options

_PASS_SLOT = "post_grad_custom_post_pass"
_INLINE_LIMIT = "realize_opcount_threshold"
_INLINE_LIMIT_IN_CPP = 8
"""Most operations of a value that generated C++ recomputes for each reader. With Inductor's default of 50 (30 before
torch 2.13), nested conditions on slots grow to thousands of operations an element, half of Inductor's time on a model.
The user's option of this name, or a lower setting, takes precedence. Triton code keeps the default."""

_EXACT_ROUNDING = {
    "emulate_precision_casts": True,
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
}
"""Inductor settings of `dsv4.batch_invariant`: code of two graphs rounds the same values at the same places."""

_WHOLE = ("triton.cudagraphs", "cpp_wrapper", "fx_wrapper", "freezing")
"""Inductor settings that need the whole graph: they capture it, or make one program of it."""


def dsv4(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Compile `gm` with Inductor, with its dsv4 ops implemented as `options` say. One thread compiles at a time.

    Args:
        gm: the graph that Dynamo captured.
        example_inputs: its fake inputs.
        mode: a mode of torch.compile.
        options: see `dsv4_compile.options`.
        kwargs: passed on to compile_fx.

    Raises:
        DSV4Error: E101 unsupported torch, E301 unknown option, E302 implementation not available, E420 graphs on a
            device that has none, E424 two kinds of capture, E430 late work with dsv4.strict. Dynamo wraps the error and
            keeps its text.
    """
    check_torch()
    from ._compat import compile_lock
    from .runtime import layer_programs
    from .runtime.repeated_layers import write_out

    if layer_programs.has_marks(gm):
        with compile_lock:
            return layer_programs.build(gm, lambda piece, inputs: _compile(piece, inputs, mode, options, kwargs))
    written = write_out(gm, example_inputs)
    with compile_lock:  # torch.compile holds it; who calls the backend may not
        return written.as_traced(_compile(written.gm, written.example_inputs, mode, options, kwargs))


def _compile(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
    kwargs: Mapping[str, Any],
) -> Any:
    """Compile as `dsv4` does, in the only thread that compiles."""
    from ._compat import codegen_of, compile_fx, compile_fx_inner, functorch_config, inductor_config
    from .lowering import registry
    from .passes import ChooseImplementations, Regional
    from .passes.lent import lent_to_inductor
    from .runtime import compiled_in_use, early_builds
    from .runtime.backends import Capturing
    from .runtime.start_times import spending

    registry.load()
    parsed = Options.parse(mode, options, ops=OPS)
    if parsed.strict != "off":
        # In an upper layer, because it explains guards as `debug.compile_log` does.
        strict = importlib.import_module("dsv4_compile.debug.strict")
        strict.check_compile()
    patches = dict(parsed.inductor)
    user = patches.get(_PASS_SLOT, getattr(inductor_config, _PASS_SLOT))
    devices = _devices(gm, example_inputs)
    if parsed.impl == "auto" and any(device.type == "cuda" for device in devices):
        # In an upper layer, because it compares kernels with their references on the samples of the tests.
        importlib.import_module("dsv4_compile.testing.self_check").ensure(devices)
    patches[_PASS_SLOT] = ChooseImplementations(parsed, _as_sequence(user), devices)
    if {codegen_of(device) for device in devices} == {"cpp"}:
        limit = getattr(inductor_config, _INLINE_LIMIT)
        patches.setdefault(_INLINE_LIMIT, _INLINE_LIMIT_IN_CPP if limit is None else min(limit, _INLINE_LIMIT_IN_CPP))
        importlib.import_module("dsv4_compile.cpu.native").build()
    if parsed.batch_invariant != "off":
        patches |= _EXACT_ROUNDING
    capturing = Capturing.plan(parsed, gm, devices)
    patches |= capturing.inductor
    caching: Any = nullcontext()
    compiled_in_use.note_options(mode, options)
    missing = compiled_in_use.watched(compile_fx_inner, mode, options)
    if missing is not None:
        kwargs = {"inner_compile": missing, **kwargs}
    if parsed.regions != "off" and not any(patches.get(name) for name in _WHOLE):
        kwargs = {**kwargs, "inner_compile": Regional(missing or compile_fx_inner, parsed.regions).compile}
        # Else torch caches what it has cached by a key of Inductor's own: no graph of several kinds.
        caching = functorch_config.patch(bundled_autograd_cache=True)
    building = early_builds.for_graph(parsed.early_builds, devices)
    with spending("compile"), building, lent_to_inductor(), caching:
        compiled = compile_fx(gm, example_inputs, config_patches=patches, **kwargs)
    return capturing.wrap(compiled if parsed.strict == "off" else strict.watched(compiled))


def reset() -> None:
    """Forget shown warnings and shared captures. torch.compiler.reset() calls this."""
    from .lowering import registry
    from .runtime.backends import shared_graphs
    from .runtime.warmup import begin_anew

    registry.forget_warnings()
    shared_graphs.cache_clear()
    begin_anew()


dsv4.reset = reset  # type: ignore[attr-defined]


def _writes_layers_out(options: Mapping[str, Any]) -> bool:
    """Return whether graphs may have marks of `runtime.repeated_layers`: see `repeated_layers.writes_out`."""
    return bool(options.get("dsv4.regions") != "off")


dsv4.writes_layers_out = _writes_layers_out  # type: ignore[attr-defined]


def _compiles_layers_apart(options: Mapping[str, Any]) -> bool:
    """Return whether graphs may have marks of `runtime.layer_programs`: no setting needs the whole graph."""
    parsed = Options.parse(None, options, ops=OPS)
    whole = parsed.cudagraph != "off" or any(parsed.inductor.get(name) for name in _WHOLE)
    return parsed.regions != "off" and not whole


dsv4.compiles_layers_apart = _compiles_layers_apart  # type: ignore[attr-defined]


def _as_sequence(passes: Any) -> Sequence[Any]:
    if passes is None:
        return ()
    return passes if isinstance(passes, (list, tuple)) else (passes,)


def _devices(gm: GraphModule, example_inputs: Sequence[Any]) -> set[torch.device]:
    """Return the devices of the graph's inputs, parameters and buffers."""
    tensors = (value for value in (*example_inputs, *gm.parameters(), *gm.buffers()) if isinstance(value, torch.Tensor))
    return {tensor.device for tensor in tensors}
