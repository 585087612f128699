"""Ops with hand-written kernels, and the dispatch of a call to one without importing Triton before.

A kernel module has a launcher of the op's name and arguments. If it does not support every call, its function
`why_unsupported_<op>`, of the same arguments, returns the reason, or "", from host-side facts alone. Unsupported calls
run the reference: the backend records the reason, and one that shows only at run time is a warning (W603). Calls on a
GPU where the kernel is not proven run the reference too, unless dsv4.impl names the kernel.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from ..._compat import device_architecture
from ...errors import fail, warn
from ...selection import decisions
from ...selection.proven import is_proven
from .arguments import packed, tensors_in
from .invariance import CLAIMS, PINNED, TOKENS

KERNELS: dict[str, str] = {}
"""Module of the launcher of every op that has a kernel, by the full name that the op's `define` gives."""
_warned: set[tuple[str, str]] = set()
"""Ops with the reason why a call ran the reference."""


@functools.cache
def launcher(op: str) -> Callable[..., Any]:
    """Return the launcher of `op`. Imports Triton; E101 if there is none."""
    return packed(op, getattr(kernel_module(op), op))


@functools.cache
def invariant_launcher(op: str, level: str = TOKENS) -> Callable[..., Any]:
    """Return the launcher of `op` that gives a row the same bits in calls of every size. It must claim one.

    One that takes the value of `dsv4.batch_invariant` as `level` may have plans for few rows at "step".
    """
    if CLAIMS[op].kernel != PINNED:
        return launcher(op)
    function = getattr(kernel_module(op), f"invariant_{op}")
    run = packed(op, function)
    return functools.partial(run, level=level) if "level" in inspect.signature(function).parameters else run


@functools.cache
def refusal(op: str) -> Callable[..., str] | None:
    """Return `why_unsupported` of the kernel of `op`; None if it has no kernel, or one that supports every call."""
    if op not in KERNELS:
        return None
    module = kernel_module(op)
    why_unsupported = getattr(module, f"why_unsupported_{op}", None) or getattr(module, f"{op}_refuses", None)
    return None if why_unsupported is None else packed(op, why_unsupported)


def runs_kernel(op: str, device: torch.device) -> bool:
    """Return whether supported calls of `op` on `device` run its kernel."""
    return device.type == "cuda" and op in KERNELS and is_proven("triton", op, device_architecture(device))


@functools.cache
def launch_cache(op: str, invariant: str = "") -> Any:
    """Return the launcher of `op` with its launch cache, a `kernels.host.launch_cache.LaunchCache`."""
    cached = importlib.import_module("dsv4_compile.kernels.host.launch_cache").LaunchCache
    return cached(invariant_launcher(op, invariant) if invariant else launcher(op))


def dispatcher(op: str, reference: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """Return the GPU implementation of `op`: its kernel if it is proven and supports the call, else `reference`.

    `check` looks at nothing but the key of the launch cache, so a cached call has passed it.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        device = next((tensor.device for tensor in tensors_in(args)), None)
        if device is not None and runs_kernel(op, device):
            return launch(op, reference, check, device, args, kwargs)
        check(*args, **kwargs)
        return reference(*args, **kwargs)

    return run


def launch(
    op: str,
    reference: Callable[..., Any],
    check: Callable[..., None] | None,
    device: torch.device,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    invariant: str = "",
) -> Any:
    """Run the kernel of `op`, or `reference` for an unsupported call; `dispatcher` calls this if it is proven.

    With `invariant`, a value of `dsv4.batch_invariant`, a call that the kernel does not support raises E303.
    """
    cached = launch_cache(op, invariant)
    match = None if kwargs else cached.look_up(args)
    if match is None or match.entry is None:
        if check is not None:
            check(*args, **kwargs)
        refuses = refusal(op)
        if refuses is not None and (reason := refuses(*args, **kwargs)):
            if invariant:
                fail("E303", got=f"torch.ops.dsv4.{op}", why=f"its kernel is unsupported: {reason}")
            _report(op, reason)
            return reference(*args, **kwargs)
    # Triton launches on the current device, whatever device its arguments are on.
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        return cached(*args, **kwargs) if match is None else cached.run(match, args)


def forget_warnings() -> None:
    """Let calls that ran the reference be reported again."""
    _warned.clear()


def _report(op: str, reason: str) -> None:
    """Warn, once for each reason, that a call of `op` runs the reference, and tell who collects decisions."""
    if decisions.collecting():
        decisions.record(decisions.Decision(op, "eager", f"at run time: {reason}"))
    if (op, reason) not in _warned:
        _warned.add((op, reason))
        warn("W603", got=f"torch.ops.dsv4.{op}: {reason}", why="the limit depends on what a graph does not fix")


def kernel_module(op: str) -> Any:
    """Return the module of the kernel of `op`. Imports Triton; E101 if there is none."""
    try:
        return importlib.import_module(KERNELS[op])
    except ImportError as missing:
        fail(
            "E101",
            got=f"no Triton for torch.ops.dsv4.{op} on a GPU: {missing}",
            fix='install the Triton that belongs to this torch, or compile with options={"dsv4.impl": "eager"}',
        )
