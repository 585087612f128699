"""Not a test: compiles the cases of one op into Triton in a separate process and prints reports as JSON.

TRITON_INTERPRET=1 python -m tests.lowering.generated <op> [case ...]
    runs these cases, or all, in the interpreter and compares them with the reference
python -m tests.lowering.generated <file>
    compiles kernels of its reports for every target GPU
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4_compile import backend
from dsv4_compile.selection import decisions
from dsv4_compile.testing import assert_bitwise
from tests.lowering.claims import TARGETS
from tests.quick_compiler import quicken_if_imported
from tests.support import fake_triton
from tests.support.inductor_triton import INTERPRETED, GeneratedKernel, generated_triton


@dataclass(frozen=True)
class Case:
    """A function of a NamedTuple of tensors, and the inputs to compile and call it with.

    Attributes:
        run: the function; gives a tensor or a tuple of tensors.
        make: inputs for a number of tokens.
        sizes: numbers of tokens. Of several, all are served by one graph.
        dynamic: names of the inputs with a dynamic first dim when there are several sizes.
        for_targets: compile its kernels for every target GPU too.
    """

    run: Callable[[Any], Any]
    make: Callable[[int], Any]
    sizes: tuple[int, ...]
    dynamic: tuple[str, ...] = ()
    for_targets: bool = False


def storage(x: Tensor) -> Tensor:
    """All bytes behind a tensor, those between its rows included."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


def copy(inputs: Any) -> Any:
    """Deep copy that keeps strides, offsets and the bytes between rows."""

    def one(x: Tensor) -> Tensor:
        flat = torch.empty(0, dtype=x.dtype).set_(storage(x).clone().untyped_storage())
        return flat.as_strided(x.shape, x.stride(), x.storage_offset())

    return type(inputs)(*map(one, inputs))


def ulps(actual: Tensor, expected: Tensor) -> float:
    """Largest distance: in representable values, or for float32 in roundings of the largest value.

    A rotation cancels, so single float32 results have no separate bound.
    """
    if actual.numel() == 0:
        return 0
    if actual.dtype is torch.float32:
        return ((actual - expected).abs().max() / expected.abs().max() / torch.finfo(torch.float32).eps).item()
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]

    def ordered_bits(x: Tensor) -> Tensor:
        bits = x.contiguous().view(integer).long()
        return torch.where((bits < 0) & x.dtype.is_floating_point, torch.iinfo(integer).min - bits, bits)

    return (ordered_bits(actual) - ordered_bits(expected)).abs().max().item()


def share_moved(actual: Tensor, expected: Tensor) -> float:
    """Share of the elements of 16 bits or less that differ, NaN and NaN not counted; of float32 ones none counts."""
    if actual.numel() == 0 or actual.dtype is torch.float32:
        return 0
    same = (actual == expected) | ((actual != actual) & (expected != expected))
    return (~same).float().mean().item()


def differences(actual: Any, expected: Any, **options: bool) -> list[str]:
    """What `assert_bitwise` says of each pair of tensors that differ."""
    messages = []
    for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        try:
            assert_bitwise(ours, theirs, label=str(number), **options)
        except AssertionError as difference:
            messages.append(str(difference))
    return messages


def as_tuple(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def call(case: Case, compiled: Callable[[Any], Any]) -> dict[str, Any]:
    """Call `compiled` with every size, and say how far outputs and memory are from those of the function itself."""
    result: dict[str, Any] = {"ulps": [], "moved": [], "outputs": [], "memory": []}
    with decisions.collect() as decided, torch.no_grad():
        for tokens in case.sizes:
            eager = case.make(tokens)
            lowered = copy(eager)
            if len(case.sizes) > 1:
                for name in case.dynamic:
                    torch._dynamo.mark_dynamic(getattr(lowered, name), 0)
            actual = as_tuple(compiled(lowered))
            expected = as_tuple(case.run(eager))
            result["ulps"].append([ulps(*pair) for pair in zip(actual, expected, strict=True)])
            result["moved"] += [share_moved(*pair) for pair in zip(actual, expected, strict=True)]
            result["outputs"] += differences(actual, expected, strides=True)
            result["memory"] += differences(map(storage, lowered), map(storage, eager))
    return result | {"impls": [decision.impl for decision in decided]}


def on_cpp(case: Case) -> dict[str, Any]:
    """The case compiled for the CPU."""
    torch.compiler.reset()
    return call(case, torch.compile(case.run, backend=backend.dsv4, fullgraph=True))


def report(case: Case) -> dict[str, Any]:
    """The case compiled into Triton and interpreted."""
    torch.compiler.reset()
    codes: list[str] = []
    with generated_triton(codes=codes) as kernels:
        result = call(case, torch.compile(case.run, backend=backend.dsv4, fullgraph=True))
    wrapper = codes[-1].split("def call(")[1]
    result |= {
        "graphs": len(codes),
        "kernels": [kernel.name for kernel in kernels],
        "files": [path for kernel in kernels if os.path.exists(path := inspect.getfile(kernel.function.fn))],
        "launches": wrapper.count(".run("),
        "extern": [line.strip() for line in wrapper.splitlines() if "torch.ops." in line and "#" not in line],
    }
    return result | {"sources": [(kernel.name, kernel.source) for kernel in kernels] if case.for_targets else None}


def binaries(sources: list[tuple[str, str]]) -> dict[str, list[int]]:
    """By target of `claims`, the sizes of the binaries of kernels with these names and sources."""
    kernels = [GeneratedKernel.of(*source) for source in sources]
    return {target: [len(kernel.compile(fake_triton.TARGETS[target])) for kernel in kernels] for target in TARGETS}


def main(what: str, *names: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    quicken_if_imported()
    if INTERPRETED:
        cases: dict[str, Case] = importlib.import_module(f"tests.lowering.{what}").CASES
        return {name: report(cases[name]) for name in names or cases}
    fake_triton.install()
    reports = json.loads(Path(what).read_text())
    return {name: binaries(report["sources"]) for name, report in reports.items() if report["sources"] is not None}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
