"""What holds for every op of the package, whoever wrote it. A new op is found here without being listed."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import ops
from dsv4_compile.errors import InputError
from dsv4_compile.ops.common.arguments import ARGUMENTS
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.testing import assert_bitwise, check_op
from dsv4_compile.testing.samples import op_samples, samples

NAMES = sorted(OPS)
PREFIX = "dsv4_compile.ops."
CASES = [
    pytest.param(name, index, id=f"{name}-{index}") for name, args in samples().items() for index in range(len(args))
]
ANY_RANK = {("fp8_linear", "x"), ("mx_linear", "x")}
"""Arguments that may have any number of dims in front."""
DIFFERENTIABLE = (torch.bfloat16, torch.float16, torch.float32)


def stem(name: str) -> str:
    """The module of `dsv4_compile.ops`, "family.file", that defines the op."""
    names = [module.name.removeprefix(PREFIX) for module in pkgutil.walk_packages(ops.__path__, PREFIX)]
    modules = [name for name in names if "." in name and not name.startswith("common.")]
    owners = [m for m in modules if getattr(importlib.import_module(f"dsv4_compile.ops.{m}"), name, None) is OPS[name]]
    assert len(owners) == 1, f"{name} is defined in {owners}"
    return owners[0]


def defaults(name: str, function: Any) -> dict[str, Any]:
    """Default of each argument of a reference, `inspect.Parameter.empty` where there is none."""
    takes = ARGUMENTS.get(name, function)
    return {parameter.name: parameter.default for parameter in inspect.signature(takes).parameters.values()}


def floats(args: tuple[Any, ...]) -> list[int]:
    return [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.dtype in DIFFERENTIABLE]


def test_every_op_has_samples_and_every_sample_an_op() -> None:
    assert set(samples()) == set(OPS)


@pytest.mark.parametrize(("name", "index"), CASES)
def test_op_keeps_its_promises(name: str, index: int) -> None:
    # torch's part is the slow one, and each op's own tests run it on more inputs.
    check_op(OPS[name], [op_samples(name)[index]], utilities=index == 0)


@pytest.mark.parametrize("name", NAMES)
def test_op_has_a_reference_with_a_docstring_and_tests(name: str) -> None:
    module = stem(name)
    function = getattr(importlib.import_module(f"dsv4_compile.reference.{module}"), name)
    documentation = inspect.getdoc(function) or ""
    assert len(documentation.split()) > 5
    assert [*defaults(name, function)] == [a.name for a in OPS[name]._schema.arguments]
    family, file = module.split(".")
    tests = (Path(__file__).parent / family).glob(f"test_{file}*.py")
    assert any(name in path.read_text() for path in tests)


@pytest.mark.parametrize("name", NAMES)
def test_reference_defaults_are_the_schema_defaults(name: str) -> None:
    function = getattr(importlib.import_module(f"dsv4_compile.reference.{stem(name)}"), name)
    for argument in OPS[name]._schema.arguments:
        default = defaults(name, function)[argument.name]
        assert (default is not inspect.Parameter.empty) == argument.has_default_value()
        assert not argument.has_default_value() or default == argument.default_value


@pytest.mark.parametrize("name", [name for name in NAMES if floats(op_samples(name)[0])])
def test_op_refuses_to_be_differentiated(name: str) -> None:
    args = op_samples(name)[0]
    for i in floats(args):
        with_grad = [x.detach().requires_grad_() if j == i else x for j, x in enumerate(args)]
        with pytest.raises(InputError, match="E206"):
            OPS[name](*with_grad)
    with torch.no_grad():
        OPS[name](*with_grad)


@pytest.mark.parametrize("name", NAMES)
def test_op_refuses_every_tensor_of_another_rank_or_dtype_and_none_in_its_place(name: str) -> None:
    args = op_samples(name)[0]
    for index, (argument, value) in enumerate(zip(OPS[name]._schema.arguments, args, strict=False)):
        if not isinstance(value, Tensor):
            continue
        wrong: list[Any] = [torch.zeros(value.shape, dtype=torch.complex64)]
        wrong += [value[None, None]] * ((name, argument.name) not in ANY_RANK)
        wrong += [None] * (str(argument.type) == "Tensor")
        for bad in wrong:
            with pytest.raises(InputError):
                OPS[name](*args[:index], bad, *args[index + 1 :])


def test_samples_are_the_same_at_each_call_and_share_nothing() -> None:
    for first, second in zip(samples().values(), samples().values(), strict=True):
        for a, b in zip(first, second, strict=True):
            for x, y in zip(a, b, strict=True):
                if isinstance(x, Tensor):
                    assert_bitwise(x, y, strides=True)
                    assert x.numel() == 0 or x.data_ptr() != y.data_ptr()
