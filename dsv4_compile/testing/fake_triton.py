"""Triton without a GPU: a driver that is enough to generate and compile code for any target, and an interpreter that
rounds as hardware does. Both stay for the rest of the process.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import numpy as np
import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget

from .._compat import triton_driver, triton_interpreter

HOPPER = GPUTarget("cuda", 90, 32)
TARGETS: dict[str, GPUTarget] = {
    "sm_90": HOPPER,
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
"""The GPUs whose code is compiled ahead of time in tests."""


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
        """Always: there is nothing to detect."""
        return True

    def get_current_target(self) -> GPUTarget:
        """The GPU that code is generated for."""
        return self.target

    def get_active_torch_device(self) -> torch.device:
        """Where the tensors of a generated kernel live."""
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """The torch module of that device."""
        return torch.cpu

    def get_current_device(self) -> int:
        """The only device."""
        return 0

    def set_current_device(self, device: int) -> None:
        """There is one device."""

    def get_current_stream(self, device: int | None = None) -> int:
        """The only stream."""
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        """Compute capability of the target; (9, 0) for a target that has none."""
        arch = self.target.arch
        return divmod(arch, 10) if isinstance(arch, int) else (9, 0)


def install(target: GPUTarget = HOPPER) -> None:
    """Make Triton believe in `target`, for the rest of this process."""
    triton_driver.set_active(FakeDriver(target))


@functools.cache
def round_like_hardware() -> None:
    """Make the interpreter convert between float formats and multiply bfloat16 matrices as GPUs do.

    Left alone, Triton 3.6 to 3.9 truncates float32 to bfloat16, loses the carry into the exponent of fp8, reads the NaN
    of fp8 as a number, and multiplies the bits of bfloat16 matrices as integers.
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
    multiply = builder.create_dot

    def widen(operand: Any) -> Any:
        if str(operand.dtype) != "bf16":
            return operand
        values = convert(operand.data, operand.dtype, tl.float32, None).view(np.float32)
        return triton_interpreter.TensorHandle(values, tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, widen(a), widen(b), *rest)

    triton_interpreter._convert_float = convert
    builder.create_dot = create_dot
