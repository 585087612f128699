"""check_op must notice each kind of broken op. Every faulty op here breaks exactly one promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.ops.common import define as _define
from dsv4_compile.testing import check_op, opcheck, padded, refuse_synchronization
from dsv4_compile.testing.samples import op_samples

LIB = torch.library.Library("dsv4_opcheck_test", "DEF")


def make(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> torch._ops.OpOverload:
    name = schema.split("(", 1)[0]
    LIB.define(schema)
    LIB.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dsv4_opcheck_test::{name}", fake, lib=LIB)
    return getattr(torch.ops.dsv4_opcheck_test, name).default


def rows(count: int = 3) -> Tensor:
    return torch.randn(count, 4)


def test_a_sound_op_passes_and_keeps_its_arguments() -> None:
    def run(x: Tensor, cache: Tensor) -> Tensor:
        cache.copy_(x)
        return x * 2

    op = make("sound(Tensor x, Tensor(a!) cache) -> Tensor", run, lambda x, cache: torch.empty_like(x))
    x, cache = rows(), padded(rows())
    before = cache.clone()
    check_op(op, [(x, cache), (rows(0), rows(0)), (rows(1), rows(1))])
    assert torch.equal(cache, before)


@pytest.mark.parametrize("fault", ["dtype", "shape", "strides"])
def test_a_wrong_fake_is_noticed(fault: str) -> None:
    fakes = {
        "dtype": lambda x: torch.empty_like(x, dtype=torch.bfloat16),
        "shape": lambda x: x.new_empty(x.shape[0] + 1, x.shape[1]),
        "strides": lambda x: x.new_empty(x.shape[1], x.shape[0]).t(),
    }
    op = make(f"fake_{fault}(Tensor x) -> Tensor", lambda x: x * 2, fakes[fault])
    with pytest.raises(AssertionError, match="promises"):
        check_op(op, [(rows(),)], utilities=False)


def test_float8_arguments_pass_and_allclose_is_put_back() -> None:
    allclose = torch.allclose
    op = make("float8(Tensor x) -> Tensor", lambda x: x.float(), lambda x: x.new_empty(x.shape, dtype=torch.float32))
    check_op(
        op, [(rows().to(torch.float8_e4m3fn),), (torch.full((2,), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu),)]
    )
    assert torch.allclose is allclose


def test_strides_of_single_rows_are_free() -> None:
    op = make(
        "single(Tensor x) -> Tensor", lambda x: x.t().contiguous().t() * 1, lambda x: x.new_empty(4, x.shape[0]).t()
    )
    check_op(op, [(rows(5),), (rows(1),), (rows(0),)])


def test_a_result_that_is_an_argument_is_noticed() -> None:
    op = make("alias(Tensor x) -> Tensor", lambda x: x[:1], lambda x: x.new_empty(1, x.shape[1]))
    with pytest.raises(AssertionError, match="shares memory with an argument"):
        check_op(op, [(rows(),)], utilities=False)


def test_results_that_share_memory_are_noticed() -> None:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y[:1], y[1:]

    op = make(
        "shared(Tensor x) -> (Tensor, Tensor)", run, lambda x: (x.new_empty(1, 4), x.new_empty(x.shape[0] - 1, 4))
    )
    with pytest.raises(AssertionError, match="earlier result"):
        check_op(op, [(rows(),)], utilities=False)


def test_an_undeclared_mutation_is_noticed() -> None:
    op = make("mutates(Tensor x) -> Tensor", lambda x: x.add_(1).clone(), torch.empty_like)
    with pytest.raises(AssertionError, match="'x' is not declared as mutated, but changed"):
        check_op(op, [(rows(),)], utilities=False)
    with pytest.raises(Exception, match="mutat"):
        check_op(op, [(rows(),)])


def test_a_write_between_the_rows_of_a_mutated_argument_is_noticed() -> None:
    def run(cache: Tensor) -> None:
        cache.as_strided((cache.shape[0], cache.shape[1] + 1), cache.stride()).fill_(1.0)

    op = make("spills(Tensor(a!) cache) -> ()", run, lambda cache: None)
    with pytest.raises(AssertionError, match="'cache' memory around its elements changed"):
        check_op(op, [(padded(rows()),)], utilities=False)


@pytest.fixture
def define() -> Iterator[Callable[..., torch._ops.OpOverload]]:
    """Define an op of the package's namespace with a reference that check_op can enter; forget it after the test."""
    names: list[str] = []

    def add(name: str, reference: Callable[..., Any]) -> torch._ops.OpOverload:
        names.append(name)
        return _define.define(name, reference=reference, fake=torch.empty_like)

    yield add
    for name in names:
        del _define.OPS[name], _define.REFERENCES[name]


def test_an_output_that_is_not_written_is_noticed(define: Callable[..., torch._ops.OpOverload]) -> None:
    def run(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out[:-1] = x[:-1]
        return out

    op = define("test_only_unwritten", run)
    with pytest.raises(AssertionError, match="poisoned memory"):
        check_op(op, [(rows(),)], utilities=False)


def test_a_reference_that_waits_for_the_device_is_noticed(define: Callable[..., torch._ops.OpOverload]) -> None:
    def run(x: Tensor) -> Tensor:
        return x * x.sum().item()

    op = define("test_only_waits", run)
    with pytest.raises(AssertionError, match="makes the stream wait"):
        check_op(op, [(rows(),)], utilities=False)


@pytest.mark.parametrize(
    "waits",
    [
        lambda x, mask: x.sum().item(),
        lambda x, mask: bool(mask.any()),
        lambda x, mask: x[mask],
        lambda x, mask: x[mask.to(torch.int8).argmax()],
        lambda x, mask: mask.nonzero(),
        torch.masked_select,
        lambda x, mask: x.index_put_((mask,), x.new_zeros(())),
        lambda x, mask: torch.repeat_interleave(mask.int()),
        lambda x, mask: x + torch.tensor([1.0, 2.0, 3.0], device=x.device),
        lambda x, mask: x.unique(),
        lambda x, mask: torch.equal(x, x),
    ],
)
def test_host_synchronisation_is_refused(waits: Callable[[Tensor, Tensor], Any]) -> None:
    with pytest.raises(AssertionError, match=r"wait|blocking"), refuse_synchronization():
        waits(torch.arange(3.0), torch.tensor(True).expand(3))


def test_selection_and_gathers_are_allowed() -> None:
    x, mask = torch.arange(3.0), torch.tensor(True).expand(3)
    with refuse_synchronization():
        y = torch.where(mask, x, 0.0)[mask.to(torch.int8).argmax(0, keepdim=True)]
        y += torch.tensor(2.0)
    assert y.item() == 2.0


def test_a_kernel_runs_twice_and_need_not_have_the_bytes_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, args = opcheck.EAGER["inv_rope"], op_samples("inv_rope")[0]
    monkeypatch.setitem(opcheck.EAGER, "inv_rope", lambda *args: honest(*args) * (1 + 2.0**-7))
    with pytest.raises(AssertionError, match="second run over poisoned memory"):
        check_op(_define.OPS["inv_rope"], [args], utilities=False)
    monkeypatch.setattr(opcheck, "runs_kernel", lambda op, device: (op, device.type) == ("inv_rope", "cpu"))
    check_op(_define.OPS["inv_rope"], [args], utilities=False)
