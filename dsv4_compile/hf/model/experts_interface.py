"""`experts_implementation="dsv4"` of transformers: experts of any of its models as `torch.ops.dsv4.moe_experts`.

The op reads a module's weights where they are. What it does not compute raises E208 before anything runs: experts
without gate, with biases, a norm, transposed or interleaved weights, or an activation other than SwiGLU, whose clamp
is found by running the module's gate on a few numbers.
"""

from __future__ import annotations

import functools
from math import inf
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
from transformers.integrations.moe import ExpertsInterface

from ..._compat import EXPERTS_GATE
from ...errors import fail
from ...layout import WEIGHT_TILE
from ...reference.moe.moe_experts import clamped_swiglu

NAME = "dsv4"
"""The name that `experts_implementation` takes."""
FLAGS: dict[str, tuple[Any, str]] = {
    "has_gate": (True, "no gate"),
    "has_bias": (False, "biases"),
    "has_post_expert_norm": (False, "a norm of their results"),
    "is_transposed": (False, "transposed weights"),
    "is_concatenated": (True, "rows of gate and up in turn"),
}
"""Attributes that transformers gives every module of experts: the value that the op supports, and the other one in
words."""
_GATE_UP = ((-6.0, -0.75, 0.5, 1.25, 4.0, 9.0), (-8.0, 0.25, -0.5, 1.5, 0.75, -3.0))
"""Numbers that a gate is tried on: each of gate and up is below, within and above `_LIMIT` on either side."""
_LIMIT = 1.0


class Gate(NamedTuple):
    """How a class of experts multiplies gate and up.

    Attributes:
        limit: attribute of a module with the limit of the clamp, None for no clamp; "" if there is no such attribute.
        unset: attributes that are None where the gate is a SwiGLU.
        unsupported: why it is none, or "".
    """

    limit: str = ""
    unset: tuple[str, ...] = ()
    unsupported: str = ""


class _StandIn:
    """Stand-in for a module of experts, which notes the attributes that its gate reads."""

    def __init__(self, act_fn: Any, limit: float | None) -> None:
        self.act_fn, self._limit = act_fn, limit
        self.limits: dict[str, None] = {}
        self.others: dict[str, None] = {}

    def __getattr__(self, name: str) -> float | None:
        if name.endswith("limit"):
            self.limits[name] = None
            return self._limit
        self.others[name] = None
        return None


# Traced code computes no numbers. A class as the key lets layers of one kind share a compiled function.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def gate_of(experts: type, activation: type) -> Gate:
    """Return how modules of the class `experts` with an activation of this class multiply gate and up."""
    return _gate_of(experts, activation)


@functools.cache
def _gate_of(experts: type, activation: type) -> Gate:
    unsupported = f"an activation other than SwiGLU ({activation.__name__})"
    try:
        stand_in = _StandIn(activation(), _LIMIT)
        got = _run(experts, stand_in)
    except Exception:
        return Gate(unsupported=unsupported)
    if len(stand_in.limits) > 1:
        return Gate(unsupported=f"several limits ({', '.join(stand_in.limits)})")
    limit = next(iter(stand_in.limits), "")
    if not torch.allclose(got, clamped_swiglu(_gate_up(), _LIMIT if limit else inf)):
        return Gate(unsupported=unsupported)
    gate = Gate(limit, tuple(stand_in.others))
    if not limit:
        return gate
    try:
        free = _run(experts, _StandIn(activation(), None))
    except Exception:
        return gate  # a module of this class always has a limit
    same = torch.allclose(free, clamped_swiglu(_gate_up(), inf))
    return gate if same else Gate(unsupported=f"another activation where {limit} is None")


def _classes(module: Any) -> tuple[type, type]:
    return type(module), type(getattr(module, "act_fn", None))


def _gate_up() -> Tensor:
    # The defaults for new tensors are others while a model is loaded.
    return torch.tensor([sum(_GATE_UP, ())], dtype=torch.float32, device="cpu")


def _run(experts: type, module: _StandIn) -> Tensor:
    """Return what the gate of the class `experts` makes of `_gate_up` with the attributes of `module`."""
    return cast(Tensor, getattr(experts, EXPERTS_GATE)(module, _gate_up()))


def why_unsupported(module: Any, gate: Gate) -> str:
    """Return why the op does not compute what a module of experts with this gate computes, or ""."""
    for name, (value, what) in FLAGS.items():
        if getattr(module, name, value) is not value:
            return what
    if getattr(module, "activation_scheme", "dynamic") == "static":
        return "static input scales"
    block = getattr(module, "block_size", None)
    if block is not None and tuple(block) != (WEIGHT_TILE, WEIGHT_TILE):
        return f"scales of blocks of {' x '.join(map(str, block))}, not {WEIGHT_TILE} x {WEIGHT_TILE}"
    if gate.unsupported:
        return gate.unsupported
    for name in gate.unset:
        if getattr(module, name) is not None:
            return f"a gate with {name}"
    return ""


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts `[T, D]`, in the dtype of `hidden_states`.

    All is float32 between the stored weights and the result, quantised weights included, whose inputs transformers
    would quantise too. As in transformers under expert parallelism, ids beyond the module's experts add nothing.

    Args:
        module: experts of transformers, with `gate_up_proj` `[E, 2 I, D]` and `down_proj` `[E, D, I]` in float32,
            bfloat16, float16, e4m3 or MXFP4, the latter two with their `_scale_inv`.
        hidden_states: floating `[T, D]`.
        top_k_index: int `[T, K]`.
        top_k_weights: floating `[T, K]`.

    Raises E208 for other experts, E206 where gradients are wanted, and E201 for shapes and dtypes.
    """
    gate = gate_of(*_classes(module))
    if why := why_unsupported(module, gate):
        _refuse(type(module).__name__, why)
    limit = getattr(module, gate.limit, None) if gate.limit else None
    out: Tensor = torch.ops.dsv4.moe_experts(
        hidden_states,
        top_k_index,
        top_k_weights.float(),
        module.gate_up_proj,
        module.down_proj,
        getattr(module, "gate_up_proj_scale_inv", None),
        getattr(module, "down_proj_scale_inv", None),
        limit=inf if limit is None else float(limit),
    )
    return out


# Dynamo does not trace an error's construction, and runs this as it is; torch 2.11 does so for strings, not modules.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _refuse(kind: str, why: str) -> None:
    fail(
        "E208",
        got=f"{kind} with {why}",
        rule=f'experts_implementation="{NAME}" computes SwiGLU experts without biases, gate rows before up rows',
        fix='model.set_experts_implementation("grouped_mm")',
    )


def register_experts() -> None:
    """Let `experts_implementation="dsv4"` name these experts in every model of transformers, quantised or not.

    Importing `dsv4_compile.hf` calls this.
    """
    for interface in (ExpertsInterface, FP8ExpertsInterface):
        interface.register(NAME, experts_forward)
