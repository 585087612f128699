"""Implementations that `dsv4.batch_invariant` keeps to: those with a claim, see `ops/common/invariance.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..cpu import native
from ..errors import fail
from ..ops.common.define import OPS, REFERENCES
from ..ops.common.invariance import (
    AS_IT_IS,
    CLAIMS,
    STEP,
    STEP_ON_CPU,
    TOKENS_ON_CPU,
    Invariance,
    is_large,
    row_places,
    watchers,
)
from ..ops.common.kernels import launch
from ..selection.decisions import Call, Decision

_GEMMS_ON_CPU = ("grouped_linear", "moe_experts")
"""Ops with C++ kernels for few rows and GEMMs of a library for many."""
PREFIX = "invariant_"
"""Begin of the name of an implementation: `invariant_step` or `invariant_tokens`."""


def choose(call: Call, demand: str | None, launchable: Decision, unproven: str) -> Decision:
    """Return an implementation of `call` with a claim. Raises E303 if there is none.

    Args:
        demand: the implementation that `dsv4.impl.<op>` demands, or None.
        launchable: what the kernel says to the call.
        unproven: why `auto` does not use the kernel, or "".
    """
    claims = CLAIMS.get(call.op, Invariance())
    if call.device.type == "cpu":
        impl, why = "eager", "" if claims.exact or claims.on_cpu else "its form for CPUs claims no independence of rows"
        reason = _on_cpu(claims)
    elif claims.exact:
        # Integers and copies: any implementation gives the same bits.
        usable = launchable.impl == "triton" and not unproven
        impl, why, reason = "triton" if usable else "eager", "", "batch-invariant: integers and copies"
    elif claims.elementwise and not claims.kernel:
        impl, why, reason = "eager", "", "batch-invariant: single elements by separate operations"
    else:
        impl, reason = "triton", f"batch-invariant: its kernel, {claims.kernel}"
        why = (claims.kernel and unproven) or (launchable.reason if launchable.impl != "triton" else "")
        if not claims.kernel:
            why = claims.why or "its kernel and its reference claim no independence of rows"
    if not why and demand not in (None, impl):
        why = f"dsv4.impl.{call.op} demands {demand!r}, which claims no independence of rows"
    if why:
        location = f" for the call at {call.where}" if call.where else ""
        fail("E303", got=f"torch.ops.dsv4.{call.op} on {call.device.type}{location}", why=why)
    return call.choose(impl, reason)


def dependence(call: Call, decision: Decision) -> str:
    """Return why a row's bits may depend on other rows with `decision`, made without the option; "" if not."""
    claims = CLAIMS.get(call.op, Invariance())
    if claims.exact or (decision.impl == "triton" and claims.kernel == AS_IT_IS):
        return ""
    if decision.impl == "ir":
        return "generated code sums as Inductor chooses by sizes"
    if call.device.type == "cpu":
        return _dependence_on_cpu(call, claims)
    if decision.impl == "eager":
        return "" if claims.elementwise else "the reference sums by libraries"
    pinned = "tiles and splits follow from the number of rows; dsv4.batch_invariant pins them"
    return pinned if claims.kernel else claims.why or "its kernel claims nothing; E303 with the option"


def _dependence_on_cpu(call: Call, claims: Invariance) -> str:
    if not claims.on_cpu:
        return "its form for CPUs claims nothing; E303 with the option"
    if call.op in _GEMMS_ON_CPU:
        return "many rows are multiplied by a library; dsv4.batch_invariant keeps to C++ kernels"
    tensors = [value for value in call.arguments.values() if isinstance(value, torch.Tensor)]
    floats = all(tensor.dtype is torch.float32 for tensor in tensors if tensor.dtype.is_floating_point)
    if claims.on_cpu == AS_IT_IS and floats and call.arguments.get("cache_format", "plain") == "plain":
        return ""
    return "torch sums in an order that follows from sizes; dsv4.batch_invariant runs each row alone"


def _on_cpu(claims: Invariance) -> str:
    if claims.exact:
        return "batch-invariant: integers and copies"
    by_kernel = claims.on_cpu == AS_IT_IS and native.takes()
    return f"batch-invariant: {'C++ kernels, or ' if by_kernel else ''}each row alone"


def implementation(op: str, level: str) -> Callable[..., Any]:
    """Return what `dsv4_invariant_<level>::<op>` runs."""
    reference, places = REFERENCES[op], row_places(op, OPS[op]._schema.arguments)
    forms, exact = STEP_ON_CPU if level == STEP else TOKENS_ON_CPU, CLAIMS[op].exact

    def run(*args: Any, **kwargs: Any) -> Any:
        device = next(value.device for value in args if isinstance(value, torch.Tensor))
        if device.type == "cpu":
            return getattr(forms, op)(*args, **kwargs)
        pinned = not exact and not is_large(level, args[places[0]].shape[0])
        result = launch(op, reference, None, device, args, kwargs, invariant=level if pinned else "")
        for watcher in watchers:
            watcher(op, args, result)
        return result

    return run
