"""The Triton that Inductor generates for a function, shown, run and compiled on a machine without a GPU.

    with generated_triton() as kernels:          # in a separate process
        torch.compile(fn, backend=dsv4)(*inputs)
    [k.name for k in kernels]

Tensors stay on the CPU and Inductor is told to generate Triton for it. Kernels do nothing when they are called, or run
in Triton's interpreter when the environment has TRITON_INTERPRET=1, which Triton reads when it is imported: hence a
separate process, with patches that stay.
"""

from __future__ import annotations

import itertools
import linecache
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import triton
import triton.language as tl
from triton.compiler import ASTSource

from dsv4_compile._compat import AsyncCompile, GraphLowering, inductor_config
from tests.support import fake_triton, quick_interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_POINTWISE_BLOCKS = {"XBLOCK": 256, "YBLOCK": 8, "ZBLOCK": 1}
_REDUCTION_BLOCKS = {"XBLOCK": 8, "YBLOCK": 8, "ZBLOCK": 1, "R0_BLOCK": 64}
_LANES = 2048
"""Elements that a program of a reduction handles in the interpreter, where a program costs much."""
_AXES = ("x", "y", "z")
_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class GeneratedKernel:
    """One Triton kernel of a compiled graph.

    Attributes:
        name: its name, which says what was fused into it.
        source: the Python source Inductor generated.
        function: the `@triton.jit` function.
        meta: Inductor's `triton_meta`; its "signature" types every argument.
    """

    name: str
    source: str
    function: Any
    meta: dict[str, Any]

    @staticmethod
    def of(name: str, source: str) -> GeneratedKernel:
        """Return the kernel of a source that Inductor generated, in this process or a different one."""
        return _execute(name, source, [])

    def run(self, *args: Any, stream: int | None = None) -> None:
        """Run in the interpreter, or do nothing; generated code calls this."""
        if not INTERPRETED:
            return
        blocks, sizes = self._blocks(), dict(zip(self.meta["signature"], args, strict=False))
        if "r0_numel" in sizes:
            blocks["XBLOCK"] = max(blocks["XBLOCK"], _LANES // triton.next_power_of_2(int(sizes["r0_numel"])))
        grid = tuple(
            -(-int(sizes[f"{axis}numel"]) // blocks[f"{axis.upper()}BLOCK"]) if f"{axis}numel" in sizes else 1
            for axis in _AXES
        )
        self.function[grid](*args, **blocks)

    def compile(self, target: Any) -> bytes:
        """Machine code for `target`, a value of `fake_triton.TARGETS`."""
        signature = dict(self.meta["signature"])
        constants = {**self._blocks(), **self.meta.get("constants", {})}
        source = ASTSource(fn=self.function, signature=signature, constexprs=constants)
        with fake_triton.code_alone(target):
            compiled = triton.compile(source, target=target, options={"num_warps": 4})
        binary: bytes = compiled.asm["hsaco" if target.backend == "hip" else "cubin"]
        return binary

    def _blocks(self) -> dict[str, int]:
        """The block sizes it is a function of."""
        names = self.meta["signature"]
        known = _REDUCTION_BLOCKS if "r0_numel" in names else _POINTWISE_BLOCKS
        return {name: size for name, size in known.items() if name in names}


class _Heuristics:
    """Stands in for Inductor's heuristics module in a generated source: keeps what the decorator is given."""

    def __init__(self, name: str, source: str, kernels: list[GeneratedKernel]) -> None:
        self._make = lambda function, meta: GeneratedKernel(name, source, function, meta)
        self._kernels = kernels

    def __getattr__(self, heuristic: str) -> Callable[..., Any]:
        def decorator(*args: Any, triton_meta: dict[str, Any], **kwargs: Any) -> Callable[[Any], GeneratedKernel]:
            def wrap(function: Any) -> GeneratedKernel:
                self._kernels.append(self._make(function, triton_meta))
                return self._kernels[-1]

            return wrap

        return decorator


class _Libdevice:
    """The functions of libdevice that generated code uses, for the interpreter, which has none of it."""

    @staticmethod
    def rsqrt(x: Any) -> Any:
        return tl.rsqrt(x)

    @staticmethod
    def exp(x: Any) -> Any:
        return tl.exp(x)


class _Helpers:
    """Inductor's helpers for generated code. The interpreter would compute theirs of a row one element at a time."""

    def __init__(self, helpers: Any) -> None:
        self._helpers = helpers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._helpers, name)

    @staticmethod
    def max2(x: Any, dim: int) -> Any:
        """The largest of a row; NaN when one is NaN."""
        is_nan = tl.max((x != x).to(tl.int32), dim)
        return tl.where(is_nan != 0, float("nan"), tl.max(x, dim))


@contextmanager
def generated_triton(*, codes: list[str] | None = None) -> Iterator[list[GeneratedKernel]]:
    """Let Inductor generate Triton for CPU tensors, and collect the kernels of every graph compiled in the block.

    Args:
        codes: receives the whole generated module of each graph, wrapper included.
    """
    fake_triton.install()
    if INTERPRETED:
        fake_triton.round_like_hardware()
        quick_interpreter.quicken()
    kernels: list[GeneratedKernel] = []

    def build(self: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> GeneratedKernel:
        return _execute(kernel_name, source_code, kernels)

    settings = {"cpu_backend": "triton", "compile_threads": 1, "force_disable_caches": True}
    save = staticmethod((codes if codes is not None else []).append)
    with (
        inductor_config.patch(settings),
        mock.patch.object(AsyncCompile, "triton", build),
        mock.patch.object(GraphLowering, "save_output_code", save),
    ):
        yield kernels


def _execute(name: str, source_code: str, kernels: list[GeneratedKernel]) -> GeneratedKernel:
    """Run a generated source, which adds its kernel to `kernels`."""
    source = source_code.replace("@triton_heuristics.", "@_heuristics.")
    path = _remember_source(name, source)
    heuristics = _Heuristics(name, source_code, kernels)
    namespace: dict[str, Any] = {"_heuristics": heuristics, "__name__": name, "__file__": path}
    exec(compile(source, path, "exec"), namespace)
    if INTERPRETED:
        namespace["libdevice"] = _Libdevice
        namespace["triton_helpers"] = _Helpers(namespace["triton_helpers"])
    kernel: GeneratedKernel = namespace[name]
    return kernel


def _remember_source(name: str, source: str) -> str:
    """Name of a file that is not written: Triton reads the text of a kernel back, from the lines Python remembers."""
    path = f"<dsv4 generated {next(_NUMBERS)}: {name}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    return path
