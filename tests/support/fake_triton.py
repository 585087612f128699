"""Triton without a GPU: a driver that compiles for any target, and an interpreter that rounds as hardware does.

An installed driver and the rounding stay for the rest of the process.
"""

from __future__ import annotations

import collections
import functools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

from dsv4_compile._compat import triton_driver, triton_interpreter
from tests.support.shared_memory import barriers_given_away

HOPPER = GPUTarget("cuda", 90, 32)
TARGETS: dict[str, GPUTarget] = {
    "sm_90": HOPPER,
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
"""The GPUs that tests compile code for."""
WAIT = "griddepcontrol.wait"
"""PTX instruction that makes a kernel with PDL wait for the previous one."""


class _Utils:
    """Properties of an H200, which Inductor asks for when it picks block sizes."""

    properties: ClassVar[dict[str, int]] = {
        "max_shared_mem": 232448,
        "max_num_regs": 65536,
        "multiprocessor_count": 132,
        "warpSize": 32,
        "mem_clock_rate": 1,
        "mem_bus_width": 1,
    }

    def get_device_properties(self, device: int) -> dict[str, int]:
        return self.properties

    def load_binary(self, *args: Any) -> Any:
        raise RuntimeError("a fake driver cannot run a kernel")


class FakeDriver:
    """The part of Triton's driver interface that compiling needs. The active torch device is the CPU."""

    utils = _Utils()
    launcher_cls = None

    def __init__(self, target: GPUTarget = HOPPER) -> None:
        self.target = target

    @staticmethod
    def is_active() -> bool:
        """Return True: there is nothing to detect."""
        return True

    def get_current_target(self) -> GPUTarget:
        """Return the GPU that code is generated for."""
        return self.target

    def get_active_torch_device(self) -> torch.device:
        """Return the device of the tensors of a generated kernel."""
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """Return the torch module of that device."""
        return torch.cpu

    def get_current_device(self) -> int:
        """Return the only device."""
        return 0

    def set_current_device(self, device: int) -> None:
        """Do nothing: there is one device."""

    def get_current_stream(self, device: int | None = None) -> int:
        """Return the only stream."""
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        """Return the compute capability of the target; (9, 0) for a target that has none."""
        arch = self.target.arch
        return divmod(arch, 10) if isinstance(arch, int) else (9, 0)


def install(target: GPUTarget = HOPPER) -> None:
    """Make Triton believe in `target`, for the rest of this process."""
    triton_driver.set_active(FakeDriver(target))


class _Llvm:
    """LLVM without what AMD's compiler makes for debugging alone, as expensive as the code itself."""

    def __init__(self, llvm: Any) -> None:
        self._llvm = llvm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llvm, name)

    def translate_to_mir(self, *args: Any) -> str:
        return ""

    def dump_sched_dag(self, *args: Any) -> None:
        pass


@contextmanager
def code_alone(target: GPUTarget) -> Iterator[None]:
    """Skip, in the block, all output of the compiler for `target` except the code."""
    if target.backend != "hip":
        yield
        return
    from triton.backends.amd import compiler

    with mock.patch.object(compiler, "llvm", _Llvm(compiler.llvm)):
        yield


@contextmanager
def compiled_for(target: GPUTarget) -> Iterator[list[Any]]:
    """Let every launch in the block compile its kernel for `target` instead of running it; nothing stays installed.

    Launchers are called as on a GPU, with tensors on the CPU, so the compiled kernels have the types,
    alignments, constants and options of a launch. Yields the compiled kernels in order.

    AssertionError for a kernel with PDL that never waits for the previous one, since the next one would not wait for
    either; for one that reuses the shared memory of an mbarrier; and for one with `short_operands`.
    """
    compiled: list[Any] = []
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        # A kernel remembers the target it first saw as that of the device.
        device_caches, self.device_caches = self.device_caches, collections.defaultdict(self.create_binder)
        try:
            compiled.append(launch(self, *args, grid=grid, warmup=True, **kwargs))
        finally:
            self.device_caches = device_caches
        early, code = getattr(compiled[-1].metadata, "launch_pdl", False), compiled[-1].asm
        assert not early or WAIT in code["ptx"], f"{compiled[-1].metadata.name} has PDL and does not wait"
        reused = barriers_given_away(compiled[-1])
        assert not reused, f"{compiled[-1].metadata.name} reuses the memory of an mbarrier: {reused}"
        short = short_operands(compiled[-1])
        assert not short, f"{compiled[-1].metadata.name} multiplies operands that repeat along K: {short}"
        return compiled[-1]

    with (
        mock.patch.object(triton_driver, "_active", FakeDriver(target)),
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(CompiledKernel, "__getitem__", lambda self, grid: lambda *args: None),
        code_alone(target),
    ):
        yield compiled


def short_operands(compiled: Any) -> list[str]:
    """Return the types of MMA operands with a K smaller than the elements of four lanes.

    Triton (3.6, 3.7) repeats them among the lanes, and multiplies some elements twice and others never: it took a wide
    `kWidth` because the operand was decoded from bytes and, with `tl.join`, from less. K of 1 is a scale to broadcast.
    """
    text = compiled.asm.get("ttgir", "")
    narrow = set(re.findall(r"^(#mma\d*) = #ttg.nvidia_mma<{versionMajor = 2,", text, re.MULTILINE))
    operands = re.findall(
        r"(tensor<(?:\d+x)*?(\d+)x(\d+)x\w+, #ttg.dot_op<{opIdx = (\d), parent = (#mma\d*), kWidth = (\d+)}>>)", text
    )
    return sorted(
        {
            operand
            for operand, rows, columns, index, parent, width in operands
            if parent in narrow and 1 < int(columns if index == "0" else rows) < 4 * int(width)
        }
    )


def resources(compiled: Any) -> dict[str, int]:
    """Return resources per thread of a kernel compiled for NVIDIA, named as by `cuobjdump`; STACK is spills."""
    output = _output_of(compiled, triton.knobs.nvidia.cuobjdump.path, "-res-usage")
    return {name: int(count) for name, count in re.findall(r"([A-Z]+):(\d+)", output)}


def instructions(compiled: Any) -> list[str]:
    """Return the SASS of a kernel compiled for NVIDIA, as `nvdisasm` writes it, without addresses and labels."""
    output = _output_of(compiled, triton.knobs.nvidia.nvdisasm.path, "-c")
    return [code.replace("`", "") for code in re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", output, re.MULTILINE)]


def _output_of(compiled: Any, *command: str) -> str:
    """Return the output of one of the NVIDIA tools in Triton for a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code(compiled))
        file.flush()
        return subprocess.run(
            [*command, file.name], capture_output=True, encoding="utf-8", errors="replace", check=True
        ).stdout


def machine_code(compiled: Any) -> bytes:
    """Return the binary of a compiled kernel."""
    binary: bytes = compiled.asm["hsaco" if "hsaco" in compiled.asm else "cubin"]
    return binary


@functools.cache
def round_like_hardware() -> None:
    """Make the interpreter convert between float formats and calculate in bfloat16 as GPUs do.

    Left alone, Triton 3.6 to 3.9 truncates float32 to bfloat16, loses the carry into the exponent of fp8, reads the NaN
    of fp8 as a number, and adds, compares and multiplies the bits of bfloat16 as integers, in matrices too. What a
    comparison of 64-bit scalars says becomes 64 bits in a tensor, which 3.9 then does not take for a mask.
    """
    formats = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    formats |= {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
    original = triton_interpreter._convert_float

    def convert(bits: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if str(source) not in formats or str(target) not in formats:
            return original(bits, source, target, rounding_mode)
        kind = getattr(np, f"uint{source.primitive_bitwidth}")
        values = torch.from_numpy(np.ascontiguousarray(bits).view(kind)).view(formats[str(source)])
        rounded = values.to(formats[str(target)])
        return rounded.view(unsigned[rounded.element_size()]).numpy().reshape(bits.shape)

    builder = triton_interpreter.InterpreterBuilder
    multiply, elementwise, splat = builder.create_dot, builder.binary_op, builder.create_splat

    def widen(operand: Any) -> Any:
        if str(operand.dtype) != "bf16":
            return operand
        values = convert(operand.data, operand.dtype, tl.float32, None).view(np.float32)
        return triton_interpreter.TensorHandle(values, tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, widen(a), widen(b), *rest)

    def binary_op(self: Any, a: Any, b: Any, operation: Any) -> Any:
        if str(a.dtype) != "bf16":
            return elementwise(self, a, b, operation)
        result = elementwise(self, widen(a), widen(b), operation)
        if result.data.dtype != np.float32:
            return result
        return triton_interpreter.TensorHandle(convert(result.data, tl.float32, tl.bfloat16, None), tl.bfloat16)

    def create_splat(self: Any, tensor: Any, scalar: Any) -> Any:
        if scalar.data.dtype != np.bool_:
            return splat(self, tensor, scalar)
        return triton_interpreter.TensorHandle(np.full(tensor.shape, scalar.data), tl.int1)

    triton_interpreter._convert_float = convert
    builder.create_dot, builder.binary_op, builder.create_splat = create_dot, binary_op, create_splat
