"""Why a call cannot be lowered: the reasons that several ops share. A reason is one clause; "" means it can be."""

from __future__ import annotations

from ..selection.decisions import Call, Decision
from .ir.common import static

_FUSES = "Inductor IR, fuses with what comes before and after"
_FIRST_FP8 = 89  # compute capability: the lowest that Triton converts to e4m3 on
NO_PREDICATED_STORES = "the C++ backend cannot predicate stores"


def decision(call: Call, why_not: str) -> Decision:
    """The decision for IR, or for the reference if there is a reason against IR."""
    return call.choose("eager", why_not) if why_not else call.choose("ir", _FUSES)


def backend_lacks(call: Call, *, fp8: bool = False, predicated: bool = False) -> str:
    """Return what the backend of the call's device lacks of e4m3 rounding and predicated stores that the call needs."""
    if call.codegen not in ("cpp", "triton"):
        return f"lowered for C++ and Triton, not for {call.codegen}"
    if predicated and call.codegen == "cpp":
        return NO_PREDICATED_STORES
    _, _, capability = call.architecture.partition("sm_")
    if fp8 and capability and int(capability) < _FIRST_FP8:
        return f"Triton converts to e4m3 from sm_{_FIRST_FP8} on, this is {call.architecture}"
    return ""


def cannot_transform(call: Call) -> str:
    """Why a Hadamard transform cannot be lowered, where the call asks for one."""
    if call.arguments.get("hadamard") and call.codegen == "cpp":
        return "in C++ a Hadamard transform is faster as calls of torch"
    return ""


def cannot_rotate(call: Call, vector: str) -> str:
    """Why RoPE on the vectors of argument `vector` cannot be lowered."""
    dim, rope = call.arguments[vector].shape[-1], call.arguments["cos_sin_cache"].shape[-1]
    if not static(dim, rope):
        return "the head dim or the rope dim is dynamic"
    return "the head dim is odd" if dim % 2 else ""
