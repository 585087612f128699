"""Not a test: compile one op into IR on the GPU, compare it with the reference there, and list what it launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dsv4_compile.backend import dsv4
from dsv4_compile.bench.gate import disagreement, outputs
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.testing import samples  # noqa: F401  (importing the package registers the ops)

Call = Callable[..., Any]
"""Calls the op it is given on tensors, and adds the other arguments."""


def as_ir(op: str, call: Call) -> Callable[..., Any]:
    """`call` of the public op, compiled; E302 where it has no IR."""
    public = getattr(torch.ops.dsv4, op)

    def step(*args: Any) -> Any:
        return call(public, *args)

    return torch.compile(step, backend=dsv4, fullgraph=True, options={f"dsv4.impl.{op}": "ir"})


@torch.inference_mode()
def assert_equals_reference(
    op: str,
    call: Call,
    make: Callable[[int], Sequence[Any]],
    sizes: Sequence[int],
    *,
    dynamic: Sequence[int],
    written: Sequence[int] = (),
) -> None:
    """Fail unless IR gives what the reference gives for every size, with one graph for all sizes above 1.

    Args:
        make: arguments of `call` for a number of tokens; equal at each call.
        dynamic: which of them have a row per token. written: which of them the op writes.
    """
    compiled = as_ir(op, call)
    for tokens in sizes:
        args, expected_args = make(tokens), make(tokens)
        if tokens > 1:
            for index in dynamic:
                torch._dynamo.mark_dynamic(args[index], 0)
        got = outputs(compiled, args, written)
        want = outputs(lambda *a: call(REFERENCES[op], *a), expected_args, written)
        torch.cuda.synchronize()
        assert disagreement(got, want) == "", f"{tokens} tokens"


@torch.inference_mode()
def launches(op: str, call: Call, args: Sequence[Any]) -> list[str]:
    """Names of everything that runs on the GPU in one call of the compiled op, copies included."""
    compiled = as_ir(op, call)
    compiled(*args)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        compiled(*args)
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
