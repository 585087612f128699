"""Tests of `import dsv4_compile` in interpreters that have imported torch alone: what it loads, and no side effects."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from tests.warm import ROOT, WarmPython


@pytest.fixture(scope="module")
def after_torch() -> Iterator[Callable[[str], str]]:
    """Run code in a process that has imported torch, where warnings are errors, and return what it prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DSV4_"))}
    warm = WarmPython(("torch",), env | {"PYTHONPATH": str(ROOT)}, 120)

    def run(code: str) -> str:
        strict = f"import warnings; warnings.simplefilter('error')\n{code}"
        done = warm.run("tests.backend.program", str(ROOT), strict)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    yield run
    warm.close()


def test_import_registers_the_ops_and_loads_no_third_party_module(after_torch: Callable[[str], str]) -> None:
    code = """
import sys
import torch
before = set(sys.modules)
import dsv4_compile
print(*sorted(name for name in set(sys.modules) - before if name.split(".")[0] != "dsv4_compile"))
print(hasattr(torch.ops.dsv4, "fused_q_kv_rmsnorm"))
"""
    foreign, registered = after_torch(code).split("\n")[:2]
    heavy = ("triton", "transformers", "torch._inductor", "torch._dynamo", "depyf", "rich", "kernels")
    assert [name for name in foreign.split() if name.startswith(heavy)] == []
    assert registered == "True"


def test_import_changes_no_torch_setting_and_gives_no_warning(after_torch: Callable[[str], str]) -> None:
    code = """
import torch
import torch._dynamo.config as dynamo
import torch._inductor.config as inductor
def settings():
    return (
        dynamo.save_config(), inductor.save_config(), torch.get_default_dtype(), torch.get_num_threads(),
        torch.get_float32_matmul_precision(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.random.get_rng_state().tolist(),
    )
before = settings()
import dsv4_compile
assert settings() == before
print(torch.cuda.is_initialized())
"""
    assert after_torch(code) == "False\n"


def test_import_works_without_triton_and_transformers(after_torch: Callable[[str], str]) -> None:
    code = """
import sys
sys.modules["triton"] = sys.modules["transformers"] = sys.modules["safetensors"] = None
import dsv4_compile
print(dsv4_compile.DeepseekV4Config.__name__)
"""
    assert after_torch(code) == "DeepseekV4Config\n"


def test_import_opens_no_socket(after_torch: Callable[[str], str]) -> None:
    code = """
import sys
def forbid(event, args):
    assert not event.startswith("socket."), event
sys.addaudithook(forbid)
import dsv4_compile
print("quiet")
"""
    assert after_torch(code) == "quiet\n"


def test_light_modules_import_no_compiler(after_torch: Callable[[str], str]) -> None:
    code = """
import sys
import dsv4_compile.config, dsv4_compile.cache, dsv4_compile.doctor, dsv4_compile.cli
print(*(name for name in ("triton", "transformers", "torch._inductor", "torch._dynamo") if name in sys.modules))
"""
    assert after_torch(code).strip() == ""
