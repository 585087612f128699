"""Which ops have an Inductor lowering, and the choice between the implementations of an op.

A public op, `dsv4::X`, never gets a lowering: under backend="inductor" it stays opaque. For every lowering here there
is a twin, `dsv4_ir::X`, with the same schema, and the backend's graph pass rewrites a node to the twin when IR is
chosen. So the choice is visible in the graph, and nothing this package registers changes what others compile, except
to mend torch (storage_offsets.py).
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .._compat import OpOverload, fallback_handler, has_device_kernel, make_fallback, register_lowering
from ..errors import CompileError, fail
from ..ops.common import kernels
from ..ops.common.arguments import packed, tensors_in
from ..ops.common.define import EAGER, LOWERED, OPS, REFERENCES
from ..ops.common.invariance import CLAIMS, STEP, TOKENS
from ..ops.common.kernels import KERNELS, launch, refusal
from ..options import Options
from ..selection import measured
from ..selection.decisions import Call, Decision
from ..selection.proven import is_proven, why_unproven
from . import invariant
from .calls_on_cpu import Function, call_on_cpu
from .storage_offsets import count_slices_from_their_base, keep_storage_offsets

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lowering:
    """An op's lowering: whether it takes a call (a Decision for "ir" or "eager"), and the function that builds the IR.

    `yields` says why `auto` leaves a call to a kernel that takes it, whatever was measured, or "".
    """

    can_lower: Callable[[Call], Decision]
    lower: Callable[..., Any]
    yields: Callable[[Call], str]


TRACED = "dsv4_compile.lowering.traced"
"""Module that registers the lowerings of all ops that are `Traced`."""
LOWERINGS: dict[str, Lowering] = {}
COMPILES_LONG = "C++ of it takes longer to compile than it saves"
"""Why `auto` leaves an op on a CPU to its reference, or its form for CPUs: see examples/benchmarks/cpu_models.py."""
_libraries: list[torch.library.Library] = []  # a library that nobody holds takes its ops with it
_warned: set[tuple[str, str]] = set()


def lowers(
    op: str, can_lower: Callable[[Call], Decision], yields: Callable[[Call], str] = lambda call: ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the lowering of `op` for the calls that `can_lower` accepts."""

    def register(lower: Callable[..., Any]) -> Callable[..., Any]:
        LOWERINGS[op] = Lowering(can_lower, lower, yields)
        register_lowering(twin(op, "ir"), type_promotion_kind=None)(packed(op, lower))
        return lower

    return register


@functools.cache
def load() -> None:
    """Register every lowering and every twin, once per process. Imports Inductor.

    All twins, at once: a graph from torch's compile cache calls them without any lowering having run here. Opaque ones
    get their lowering here too: where Inductor makes it, torch 2.11 prints the arguments with all they are computed
    from, which takes hours in a graph of many ops.
    """
    keep_storage_offsets()
    count_slices_from_their_base()
    for op in OPS:
        function = Function("dsv4_compile.ops.common.define", "ON_CPU", f"{{}}.{op}")
        call_on_cpu(twin(op, "eager"), function)
    for op in KERNELS:
        make_fallback(twin(op, "triton"))
    for op in CLAIMS:
        for level in (STEP, TOKENS):
            forms = Function("dsv4_compile.ops.common.invariance", f"{level.upper()}_ON_CPU", f"{{}}.{op}")
            call_on_cpu(twin(op, invariant.PREFIX + level), forms)
    for module in {how if isinstance(how, str) else TRACED for how in LOWERED.values()}:
        importlib.import_module(module)


@functools.cache
def twin(op: str, impl: str) -> OpOverload:
    """The op `dsv4_<impl>::<op>`: the schema and fake of the public op, computed without a kernel, or by its kernel."""
    public, library = OPS[op], torch.library.Library(f"dsv4_{impl}", "FRAGMENT")
    _libraries.append(library)
    tags = [torch.Tag.pt2_compliant_tag]
    if impl != "ir":
        tags.append(torch.Tag.needs_exact_strides)
    library.define(str(public._schema).removeprefix("dsv4::"), tags=tags)
    library.impl(op, _implementation(op, impl), "CompositeExplicitAutograd")
    torch.library.register_fake(f"dsv4_{impl}::{op}", public, lib=library)
    return getattr(getattr(torch.ops, f"dsv4_{impl}"), op).default


def _implementation(op: str, impl: str) -> Callable[..., Any]:
    if impl.startswith(invariant.PREFIX):
        return invariant.implementation(op, impl.removeprefix(invariant.PREFIX))
    return _launch(op) if impl == "triton" else EAGER[op]


def _launch(op: str) -> Callable[..., Any]:
    """The kernel of `op`, imported with Triton at the first call; proven or not, somebody has asked for it."""
    reference = REFERENCES[op]

    def run(*args: Any, **kwargs: Any) -> Any:
        device = next(tensors_in(args)).device
        return launch(op, reference, None, device, args, kwargs)

    return run


def call_reference(op: str, *args: Any) -> Any:
    """Inside a lowering: the reference of `op`, opaque to Inductor."""
    return fallback_handler(twin(op, "eager"), add_to_fallback_set=False)(*args)


def can_lower(call: Call) -> dict[str, Decision]:
    """Return the Decision of each implementation on `call`: for itself, or for "eager" with the reason it cannot."""
    lowering = LOWERINGS.get(call.op)
    return {
        "ir": lowering.can_lower(call) if lowering else call.choose("eager", "no Inductor lowering"),
        "triton": _can_launch(call),
        "eager": call.choose("eager", "the reference was asked for"),
    }


def _ours(call: Call) -> bool:
    """Whether this package has a kernel for `call`."""
    return call.op in KERNELS and call.device.type == "cuda"


def _can_launch(call: Call) -> Decision:
    """Return what the hand-written kernel says to `call`: ours, or one that somebody registered for the device."""
    if not _ours(call) and not has_device_kernel(OPS[call.op], call.device):
        return call.choose("eager", "its kernel runs on GPUs" if call.op in KERNELS else "it has no kernel")
    refuses = refusal(call.op)
    # A mutated cache is no argument of a functional graph.
    arguments = {declared.name: call.arguments.get(declared.name) for declared in OPS[call.op]._schema.arguments}
    reason = refuses(**arguments) if refuses is not None else ""
    return call.choose("eager", reason) if reason else call.choose("triton", f"kernel for {call.architecture}")


def _by_request_only(call: Call, impl: str) -> str:
    """Why `auto` passes over an available implementation, or ""."""
    foreign = impl == "triton" and call.op not in KERNELS
    if not foreign and not is_proven(impl, call.op, call.architecture):
        return f"{why_unproven(impl, call.op, call.architecture)}; dsv4.impl={impl} uses it all the same"
    if impl == "ir" and call.codegen == "cpp" and COMPILES_LONG:
        return f"{COMPILES_LONG}; dsv4.impl=ir uses it all the same"
    alone = impl != "ir" or _can_launch(call).impl != "triton" or _by_request_only(call, "triton")
    yields = "" if alone else LOWERINGS[call.op].yields(call)
    return f"{yields}; dsv4.impl=ir uses it all the same" if yields else ""


def decide(call: Call, options: Options) -> Decision:
    """Choose the implementation of `call`. Raises E302 when a demanded one is not available."""
    decision = _choose(call, options)
    preferred = options.batch_invariant == "off" and call.op not in options.demands
    if preferred and options.impl not in ("auto", decision.impl):
        _warn_once(decision, options.impl)
    return decision


def foresee(call: Call, options: Options) -> Decision:
    """Return what `decide` would say of a call that no graph holds; "eager" where a demand could not be met."""
    try:
        return _choose(call, options)
    except CompileError as unavailable:
        return call.choose("eager", unavailable.why)


def _choose(call: Call, options: Options) -> Decision:
    if options.batch_invariant != "off":
        launchable = _can_launch(call)
        proven = options.impl != "auto" or launchable.impl != "triton"
        why = "" if proven else _by_request_only(call, "triton")
        return invariant.choose(call, options.demands.get(call.op), launchable, why)
    choices = can_lower(call)
    available = [impl for impl, choice in choices.items() if choice.impl == impl]
    demand = options.demands.get(call.op)
    if demand is not None:
        if demand not in available:
            fail(
                "E302",
                got=f"dsv4.impl.{call.op}={demand!r}" + (f" for the call at {call.where}" if call.where else ""),
                why=choices[demand].reason,
                fix=f"use one of {', '.join(available)}, or auto",
            )
        return choices[demand]
    if options.impl == "auto":
        unproven = {impl: _by_request_only(call, impl) for impl in available if impl != "eager"}
        usable = [choices[impl] for impl, objection in unproven.items() if not objection]
        if usable:
            return _fastest(call, usable)
        return call.choose("eager", "; ".join(unproven.get(i) or choices[i].reason for i in ("ir", "triton")))
    return choices[options.impl]


def _fastest(call: Call, usable: Sequence[Decision]) -> Decision:
    """Return the first of `usable`, or the fastest by measurements on this architecture at a size like the call's."""
    us = _measured(call, [choice.impl for choice in usable]) if len(usable) > 1 else None
    if us is None:
        return usable[0]
    times = ", ".join(f"{choice.impl} {us[choice.impl]:.1f} us" for choice in usable)
    best = min(usable, key=lambda choice: us[choice.impl])
    return replace(best, reason=f"{best.reason}; measured at such a size: {times}")


def microseconds(call: Call, decision: Decision, within: float = math.inf) -> float | None:
    """Return the measured time of `call` with the implementation decided for it, at the size nearest to its own.

    That size is at most `within` times as large or as small; None where nobody measured one.
    """
    us = _measured(call, [decision.impl], within)
    return None if us is None else us[decision.impl]


def _measured(call: Call, impls: Sequence[str], within: float = math.inf) -> Mapping[str, float] | None:
    """Microseconds of each of `impls`, None where not all were measured.

    Of a dynamic dim counts the size it was traced with, if torch knows.
    """
    shape = next(tensors_in(call.arguments.values())).shape
    sizes = [size if isinstance(size, int) else size.node.hint for size in shape]
    if None in sizes:
        return None
    return measured.nearest(call.op, call.architecture, math.prod(sizes), sizes[0] if sizes else None, impls, within)


def target_of(decision: Decision, call: Call, level: str = "off") -> OpOverload:
    """The op that a node must call to get the implementation decided for it, at a value of `dsv4.batch_invariant`.

    A twin, where the kernel is ours: the public op asks first for gradients, which a graph has none of, and for proof.
    On a CPU too, where the graph calls what the twin stands for without torch's dispatcher.
    """
    public = OPS[call.op]
    if level != "off" and (call.device.type == "cpu" or decision.impl == "triton"):
        return twin(call.op, invariant.PREFIX + level)
    if decision.impl == "eager" and call.device.type != "cpu" and not has_device_kernel(public, call.device):
        return public
    if decision.impl == "triton" and not _ours(call):
        return public
    return twin(call.op, decision.impl)


def forget_warnings() -> None:
    """Let preferences that cannot be honoured, and calls that ran a reference, be reported again."""
    _warned.clear()
    kernels.forget_warnings()


def _warn_once(decision: Decision, preference: str) -> None:
    key = (decision.op, preference)
    if key not in _warned:
        _warned.add(key)
        log.warning("dsv4.impl=%r is not available for %s: %s", preference, decision.op, decision.reason)
