"""How ops are defined: the check runs in front of reference and fake, and gradients are refused."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4_compile.errors import InputError
from dsv4_compile.ops.common.define import OPS, REFERENCES, checked, for_tensors
from dsv4_compile.ops.preprocess.fused_q_kv_rmsnorm import fused_q_kv_rmsnorm


def test_check_runs_before_the_implementation() -> None:
    calls: list[str] = []
    run = checked(lambda x, y=2: calls.append(f"check {x} {y}"), lambda x, y=2: calls.append("run") or x + y)
    assert run(1) == 3
    assert calls == ["check 1 2", "run"]


def test_without_a_check_the_implementation_is_returned_unwrapped() -> None:
    assert checked(None, abs) is abs


@pytest.mark.parametrize("mode", [torch.inference_mode, FakeTensorMode])
def test_reference_and_fake_refuse_the_same_arguments(mode: type) -> None:
    with mode(), pytest.raises(InputError, match=r"\[E201\].*\n.*q_weight covers"):
        fused_q_kv_rmsnorm(torch.ones(2, 8), torch.ones(2, 4), torch.ones(7), torch.ones(4), 1e-6)


NORMS = torch.ones(2, 8), torch.ones(2, 4), torch.ones(8), torch.ones(4), 1e-6


@pytest.mark.parametrize("mode", [torch.inference_mode, FakeTensorMode])
@pytest.mark.parametrize("place", [0, 3])
def test_none_for_a_tensor_is_refused_by_name(mode: type, place: int) -> None:
    names = [argument.name for argument in OPS["fused_q_kv_rmsnorm"]._schema.arguments]
    with mode(), pytest.raises(InputError, match=rf"rule  {names[place]} is a tensor\n.*: None for {names[place]}"):
        REFERENCES["fused_q_kv_rmsnorm"](*NORMS[:place], None, *NORMS[place + 1 :])


def test_tensors_of_two_devices_are_refused_with_the_first_that_is_elsewhere() -> None:
    elsewhere = *NORMS[:2], NORMS[2].to("meta"), *NORMS[3:]
    with pytest.raises(InputError, match=r"qr on cpu, q_weight on meta\n  fix   move q_weight to cpu"):
        fused_q_kv_rmsnorm(*elsewhere)
    with pytest.raises(InputError, match="E201"):
        fused_q_kv_rmsnorm(*NORMS[:3], kv_weight=NORMS[3].to("meta"), eps=1e-6)


def test_a_fault_of_a_check_itself_is_not_hidden() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        for_tensors("fused_q_kv_rmsnorm", lambda *args: args[0].nothing)(*NORMS)


def test_an_argument_that_requires_grad_is_refused() -> None:
    weight = torch.ones(8, requires_grad=True)
    arguments = (torch.ones(2, 8), torch.ones(2, 4), weight, torch.ones(4), 1e-6)
    with pytest.raises(InputError, match="E206"):
        fused_q_kv_rmsnorm(*arguments)
    with torch.no_grad():
        assert not fused_q_kv_rmsnorm(*arguments)[0].requires_grad
