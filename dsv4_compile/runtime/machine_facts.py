"""Versions and machine that compiled code is made for, as plain values that are compared one by one."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
from pathlib import Path
from typing import Any

import torch

from .._compat import device_architecture, triton_version


def made_for(device: torch.device, source: str) -> dict[str, Any]:
    """Return the facts, apart from the model, that code for `device` depends on.

    Args:
        source: hash of this package's source files.
    """
    facts: dict[str, Any] = {
        "torch": str(torch.__version__),
        "triton": triton_version(),
        "transformers": importlib.metadata.version("transformers"),
        "python": platform.python_version(),
        "dsv4_compile": source,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": str(device),
    }
    if device.type == "cpu":
        return facts | {"cpu": _cpu()}
    properties = torch.cuda.get_device_properties(device)
    runtime = torch.version.hip or torch.version.cuda
    return facts | {"gpu": {"name": properties.name, "architecture": device_architecture(device), "runtime": runtime}}


def _cpu() -> dict[str, Any]:
    """Return the instructions of this CPU: C++ kernels are compiled with -march=native."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else platform.processor()
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    instructions = " ".join(sorted((flags[1] if flags else text).split()))
    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "instructions": hashlib.sha256(instructions.encode()).hexdigest()[:16],
    }


def vector_instructions() -> list[str]:
    """Return the vector instructions of C++ that Inductor generates, as the compiler's flags. The first call compiles.

    torch compiles and runs a program for each kind that the CPU names, and remembers the result in this process.
    """
    from .._compat import cpu_vec_isa

    return [f"{isa}: {isa.build_arch_flags()}" for isa in cpu_vec_isa.valid_vec_isa_list()]


def expect_vector_instructions(recorded: list[str]) -> bool:
    """Let torch take these vector instructions without compiling programs; return False where the CPU names others.

    An equal CPU has compiled and run the programs with the same versions.
    """
    from .._compat import cpu_vec_isa

    if cpu_vec_isa.valid_vec_isa_list.cache_info().currsize:
        return vector_instructions() == recorded
    base: Any = cpu_vec_isa.VecISA
    check = base.check_build
    base.check_build = lambda *_: True
    try:
        equal = vector_instructions() == recorded
    finally:
        base.check_build = check
    if not equal:
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
    return equal
