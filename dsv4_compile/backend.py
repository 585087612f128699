"""The torch.compile backend: `torch.compile(model, backend="dsv4")`.

It is Inductor's compile_fx with one graph pass added (see `passes`). Nothing private is imported before a graph is
compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from ._compat import check_torch
from .ops.common.define import OPS
from .options import Options

_PASS_SLOT = "post_grad_custom_post_pass"
_INLINED = "realize_opcount_threshold"
_INLINED_IN_CPP = 8
"""Operations of a value that C++ calculates anew for each of several readers. With Inductor's own 50 (30 before torch
2.13), slots and rows of keys, whose conditions read each other at every level, grew to 3500 operations an element
before duplicates were dropped: half of what Inductor spends on a model, the C++ compiler aside. An option of that name
decides, and a setting that is lower stays. Triton's kernels are left as they are."""


def dsv4(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Compile `gm` with Inductor, the dsv4 ops in it lowered as `options` say.

    Args:
        gm: the graph that Dynamo captured.
        example_inputs: its fake inputs.
        mode: a mode of torch.compile.
        options: see `dsv4_compile.options`.
        kwargs: passed on to compile_fx.

    Raises:
        DSV4Error: E101 torch out of range, E301 unknown option, E302 implementation not available, E420 graphs asked
            for on a device without, E424 two ways of capture at a time.
            Dynamo wraps it; its text is part of the message.
    """
    check_torch()
    from ._compat import codegen_of, compile_fx, inductor_config, ue8m0_in_cpp
    from .lowering import registry
    from .passes import ChooseImplementations
    from .runtime.backends import Capturing

    registry.load()
    parsed = Options.parse(mode, options, ops=OPS)
    patches = dict(parsed.inductor)
    user = patches.get(_PASS_SLOT, getattr(inductor_config, _PASS_SLOT))
    devices = _devices(gm, example_inputs)
    patches[_PASS_SLOT] = ChooseImplementations(parsed, _as_sequence(user), devices)
    if {codegen_of(device) for device in devices} == {"cpp"}:
        usual = getattr(inductor_config, _INLINED)
        patches.setdefault(_INLINED, _INLINED_IN_CPP if usual is None else min(usual, _INLINED_IN_CPP))
    capturing = Capturing.plan(parsed, gm, devices)
    patches |= capturing.inductor
    with ue8m0_in_cpp():
        return capturing.wrap(compile_fx(gm, example_inputs, config_patches=patches, **kwargs))


def reset() -> None:
    """Called by torch.compiler.reset(): what this process has been told about its compiled code is told again."""
    from .lowering import registry
    from .runtime.backends import shared_graphs

    registry.forget_warnings()
    shared_graphs.cache_clear()


dsv4.reset = reset  # type: ignore[attr-defined]


def _as_sequence(passes: Any) -> Sequence[Any]:
    if passes is None:
        return ()
    return passes if isinstance(passes, (list, tuple)) else (passes,)


def _devices(gm: GraphModule, example_inputs: Sequence[Any]) -> set[torch.device]:
    """Devices of the graph's inputs and parameters."""
    tensors = (value for value in (*example_inputs, *gm.parameters(), *gm.buffers()) if isinstance(value, torch.Tensor))
    return {tensor.device for tensor in tensors}
