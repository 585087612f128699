"""Definition of an op: schema, reference implementation, fake, and an error for gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from ..._compat import OpOverload, below_autograd
from ...errors import fail
from ...selection.costs import MODELS, CostModel
from .arguments import ARGUMENTS, LISTS, packed, tensors_in
from .invariance import Invariance, claim
from .kernels import KERNELS, dispatcher
from .schema import infer_schema

LIBRARY = torch.library.Library("dsv4", "DEF")
OPS: dict[str, OpOverload] = {}
"""Every op of this package by name."""
REFERENCES: dict[str, Callable[..., Any]] = {}
"""The checked reference of every op by name, for lowerings and tools that trace it."""
EAGER: dict[str, Callable[..., Any]] = {}
"""Implementation of every op by name where it has no kernel: its reference, or on a CPU its form for CPUs."""


class Traced(NamedTuple):
    """Lower an op to the IR that tracing its reference gives.

    `static` names tensors whose dims after the first must be static. `yields` says why `auto` leaves a call to the
    op's kernel where both are proven; "" lets measurements decide.
    """

    static: Collection[str] = ()
    yields: str = ""


LOWERED: dict[str, str | Traced] = {}
"""Lowering of every op that has one: the module of lowering/ that builds its IR, or how its reference is traced."""


class OnCpu:
    """Form for CPUs, or reference, of every op under its name, unchecked: for graphs, which are checked when traced."""


ON_CPU = OnCpu()


def for_tensors(name: str, check: Callable[..., None] | None) -> Callable[..., None]:
    """Return `check` of the op `name` preceded by those of all ops: no tensor is None, all are on one device."""

    def run(*args: Any, **kwargs: Any) -> None:
        first = None
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, torch.Tensor):
                device = value.device
                if first is None:
                    first = device
                elif device != first:
                    _refuse_tensors(name, args, kwargs)
            elif type(value) in LISTS and value and isinstance(value[0], torch.Tensor):
                for x in value:
                    if x.device != first:
                        _refuse_tensors(name, args, kwargs)
        if check is not None:
            try:
                check(*args, **kwargs)
            except AttributeError:
                _refuse_tensors(name, args, kwargs)
                raise

    return run


def _refuse_tensors(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise E201 for the first None where a tensor belongs, or tensor that is not where the first one is."""
    declared, op = OPS[name]._schema.arguments, f"torch.ops.dsv4.{name}"
    values = dict(zip((argument.name for argument in declared), args, strict=False)) | kwargs
    for argument in declared:
        if str(argument.type) == "Tensor" and values.get(argument.name) is None:
            fail("E201", got=f"{op}: None for {argument.name}", rule=f"{argument.name} is a tensor")
    tensors = [(argument_name, x.device) for argument_name, value in values.items() for x in tensors_in((value,))]
    first, device = tensors[0]
    for argument_name, other in tensors:
        if other != device:
            rule, fix = "all tensors of a call are on one device", f"move {argument_name} to {device}"
            fail("E201", got=f"{op}: {first} on {device}, {argument_name} on {other}", rule=rule, fix=fix)


def checked(check: Callable[..., None] | None, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Return `implementation` with `check` before it."""
    if check is None:
        return implementation

    def run(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return implementation(*args, **kwargs)

    return run


def _by_device(on_cpu: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls `on_cpu` with tensors on a CPU, and `reference` with others."""

    def run(*args: Any, **kwargs: Any) -> Any:
        first = next(tensors_in((*args, *kwargs.values())))
        return (on_cpu if first.device.type == "cpu" else reference)(*args, **kwargs)

    return run


def define(
    name: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    check: Callable[..., None] | None = None,
    arguments: type[Any] | None = None,
    on_cpu: Callable[..., Any] | None = None,
    kernel: str | None = None,
    lowering: str | Traced | None = None,
    cost: CostModel | None = None,
    mutates: Collection[str] = (),
    invariant: Invariance | None = None,
) -> OpOverload:
    """Define `torch.ops.dsv4.<name>` with the signature of its reference and return its overload.

    This is the only registration of an op. The reference serves every device; on GPUs where it is proven, its kernel
    runs instead.

    Args:
        fake: returns exact shapes, dtypes and strides.
        check: runs before reference, fake and kernel, and raises for wrong arguments by host-side facts alone.
        arguments: a NamedTuple with the op's arguments and defaults. Given, reference, fake, check, launcher and
            `why_unsupported_<name>` take one value of it; without it they take the arguments themselves.
        on_cpu: a form of the reference for CPUs, of `cpu/`, which may branch on values. It runs there in its place.
        kernel: full name of the module with the op's launcher, for CUDA and ROCm devices.
        lowering: full name of the module that builds the op's Inductor IR, or `Traced`.
        cost: bytes and flops of a call.
        mutates: names of the tensors that the op writes.
        invariant: which implementations give a row the same bits in calls of every size; None claims nothing.

    Inputs that require grad, with gradients enabled, raise E206: there is no backward.
    """
    schema = infer_schema(name, reference, arguments, mutates)
    if arguments is not None:
        ARGUMENTS[name] = arguments
        reference, fake = packed(name, reference), packed(name, fake)
        check = None if check is None else packed(name, check)
        on_cpu = None if on_cpu is None else packed(name, on_cpu)
    check = for_tensors(name, check)
    setattr(ON_CPU, name, reference if on_cpu is None else on_cpu)
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    REFERENCES[name] = checked(check, reference)
    EAGER[name] = REFERENCES[name] if on_cpu is None else checked(check, _by_device(on_cpu, reference))
    LIBRARY.impl(name, EAGER[name], "CompositeExplicitAutograd")
    if lowering is not None:
        LOWERED[name] = lowering
    if cost is not None:
        MODELS[name] = cost
    if kernel is not None:
        KERNELS[name] = kernel
        LIBRARY.impl(name, dispatcher(name, reference, check), "CUDA")
    torch.library.register_fake(f"dsv4::{name}", checked(check, fake), lib=LIBRARY)
    op = getattr(torch.ops.dsv4, name).default

    def refuse_gradients(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            for value in tensors_in((*args, *kwargs.values())):
                if value.requires_grad:
                    fail("E206", got=f"torch.ops.dsv4.{name} with an argument that requires grad")
        with below_autograd():
            return op(*args, **kwargs)

    LIBRARY.impl(name, refuse_gradients, "Autograd")
    OPS[name] = op
    if invariant is not None:
        claim(name, invariant, getattr(ON_CPU, name), op._schema.arguments)
    return op
