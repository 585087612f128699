"""The bounds-checking interpreter finds planted faults, each at the access that makes it, and nothing else."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_compile.testing import padded, strided
from tests.support.bounds import BoundsError, checked, random_program_order

interpreted = pytest.mark.interpreted


@triton.jit
def copy_kernel(out, x, n, x_stride, out_stride, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i * out_stride, tl.load(x + i * x_stride, mask=i < n), mask=i < n)


@triton.jit
def _read(p, offset):
    return tl.load(p + offset)


@triton.jit
def move_kernel(out, x, offset, shift, STORE: tl.constexpr):
    value = _read(x, offset)
    if STORE:
        tl.store(out + shift, value)


@triton.jit
def program_kernel(last, counts):
    program = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(last, program)
    tl.atomic_add(counts + program, 1)


@triton.jit
def words_kernel(out, x, offset):
    tl.store(out, tl.load((x + offset).to(tl.pointer_type(tl.int32))))


@triton.jit
def nudged_kernel(out, x):
    byte = (x.to(tl.int64) + 1).to(tl.pointer_type(tl.int8), bitcast=True)
    tl.store(out, tl.load(byte.to(tl.pointer_type(tl.float32), bitcast=True)))


@triton.jit
def either_kernel(out, x, y, offset):
    i = tl.arange(0, 4)
    tl.store(out + i, tl.load(tl.where(i < 2, x + i, y + i + offset)))


@triton.jit
def count_kernel(counts, x, n):
    i = tl.arange(0, 4)
    tl.atomic_add(counts + tl.load(x + i), 1, mask=i < n)


@triton.jit
def tuple_kernel(out, inputs, offset):
    tl.store(out, tl.load(inputs[1] + offset))


def copy(x: Tensor, out: Tensor, n: int, x_stride: int | None = None) -> None:
    copy_kernel[(triton.cdiv(n, 4),)](out, x, n, x.stride(0) if x_stride is None else x_stride, out.stride(0), BLOCK=4)


@interpreted
@pytest.mark.parametrize("spread", [Tensor.clone, padded, strided])
def test_a_correct_kernel_passes_and_runs(spread: Any) -> None:
    x, out = spread(torch.arange(10.0)), torch.zeros(10)
    with checked(mutated=("out",)) as launched:
        copy(x, out, 10)
    assert launched == ["copy_kernel"]
    assert out.tolist() == list(range(10))


@interpreted
def test_one_element_past_the_end_is_found() -> None:
    x, out = torch.zeros(12)[:10], torch.zeros(12)
    message = (
        r"(?s)load in copy_kernel, program \(2, 0, 0\), .*test_bounds\.py:\d+: 1 of 3 .* 'x', float32 \(10,\).* 40"
    )
    with pytest.raises(BoundsError, match=message), checked(mutated=("out",)):
        copy(x, out, 11)


@interpreted
def test_a_store_past_the_end_is_found() -> None:
    with pytest.raises(BoundsError, match=r"store in copy_kernel.*'out', float32"), checked(mutated=("out",)):
        copy(torch.zeros(12), torch.zeros(12)[:10], 12)


@interpreted
def test_a_gap_between_elements_is_out_of_bounds() -> None:
    x = torch.zeros(20)[::2]
    with pytest.raises(BoundsError, match=r"miss argument 'x', float32 \(10,\) with strides \(2,\)"), checked(("out",)):
        copy(x, torch.zeros(10), 10, x_stride=1)


@interpreted
def test_the_padding_of_a_page_is_out_of_bounds() -> None:
    pages = torch.zeros(3, 12)[:, :8]
    for offset in (0, 7, 12, 31):
        with checked(("out",)):
            move_kernel[(1,)](torch.zeros(1), pages, offset, 0, STORE=True)
    for offset in (8, 11, 32, -1):
        with pytest.raises(BoundsError, match="load"), checked(("out",)):
            move_kernel[(1,)](torch.zeros(1), pages, offset, 0, STORE=True)


@interpreted
def test_memory_of_another_argument_is_out_of_bounds() -> None:
    both = torch.zeros(8)
    with pytest.raises(BoundsError, match=r"load.*'x'"), checked(("out",)):
        move_kernel[(1,)](both[:4], both[4:], -1, 0, STORE=True)
    with pytest.raises(BoundsError, match=r"store.*'out'"), checked(("out", "x")):
        move_kernel[(1,)](both[:4], both[4:], 0, 4, STORE=True)


@interpreted
def test_a_store_to_an_undeclared_argument_is_found() -> None:
    with pytest.raises(BoundsError, match=r"store .*'out'.* not declared as mutated"), checked():
        move_kernel[(1,)](torch.zeros(1), torch.zeros(1), 0, 0, STORE=True)
    with checked():
        move_kernel[(1,)](torch.zeros(1), torch.zeros(1), 0, 0, STORE=False)


@interpreted
def test_atomics_are_checked_like_stores() -> None:
    def count(x: list[int], n: int, *mutated: str) -> Tensor:
        counts = torch.zeros(6, dtype=torch.int32)
        with checked(mutated):
            count_kernel[(1,)](counts[:4], torch.tensor(x), n)
        return counts

    assert count([0, 3, 3, 9], 3, "counts").tolist() == [1, 0, 0, 2, 0, 0]
    with pytest.raises(BoundsError, match=r"atomic .*1 of 4 accesses"):
        count([0, 3, 3, 4], 4, "counts")
    with pytest.raises(BoundsError, match=r"atomic .*not declared"):
        count([0, 1, 2, 3], 4)


@interpreted
def test_a_wide_access_needs_all_its_bytes_and_its_alignment() -> None:
    out, x = torch.zeros(1, dtype=torch.int32), torch.arange(12, dtype=torch.uint8)[:10]
    with checked(("out",)):
        words_kernel[(1,)](out, x, 4)
    assert out.item() == 0x07060504
    for offset in (8, 2):
        with pytest.raises(BoundsError, match="accesses of 4 bytes miss argument 'x', uint8"), checked(("out",)):
            words_kernel[(1,)](out, x, offset)


@interpreted
def test_an_element_at_an_odd_byte_is_found() -> None:
    with (
        pytest.raises(BoundsError, match=r"1 of 1 accesses of 4 bytes miss argument 'x'.* byte 1 from"),
        checked(("out",)),
    ):
        nudged_kernel[(1,)](torch.zeros(1), torch.zeros(4))


@interpreted
def test_one_access_may_read_two_arguments_and_each_has_its_bounds() -> None:
    x, y, out = torch.arange(2.0), torch.arange(10.0, 14.0), torch.zeros(4)
    with checked(("out",)):
        either_kernel[(1,)](out, x, y, 0)
    assert out.tolist() == [0, 1, 12, 13]
    with pytest.raises(BoundsError, match=r"1 of 2 .* miss argument 'y'"), checked(("out",)):
        either_kernel[(1,)](out, x, y, 1)


@interpreted
def test_an_empty_tensor_has_no_elements() -> None:
    with pytest.raises(BoundsError, match="load"), checked(("out",)):
        move_kernel[(1,)](torch.zeros(1), torch.zeros(0), 0, 0, STORE=True)


@interpreted
def test_tensors_of_a_tuple_are_arguments() -> None:
    inputs = torch.zeros(2), torch.ones(3)
    out = torch.zeros(1)
    with checked(("out",)):
        tuple_kernel[(1,)](out, inputs, 2)
    assert out.item() == 1.0
    with pytest.raises(BoundsError, match=r"'inputs\[1\]'"), checked(("out",)):
        tuple_kernel[(1,)](out, inputs, 3)


class Inputs(NamedTuple):
    first: Tensor
    second: Tensor


@interpreted
def test_tensors_of_a_named_tuple_are_called_by_their_names() -> None:
    inputs = Inputs(torch.zeros(2), torch.ones(3))
    with pytest.raises(BoundsError, match=r"'inputs\.second'"), checked(("out",)):
        tuple_kernel[(1,)](torch.zeros(1), inputs, 3)


@interpreted
def test_nothing_is_checked_after_the_block() -> None:
    both = torch.arange(8.0)
    out = both[:4]
    with checked():
        pass
    move_kernel[(1,)](out, both[4:], -1, 0, STORE=True)
    assert out[0].item() == 3.0


@interpreted
def test_random_order_runs_every_program_once_and_ends_with_any() -> None:
    last, counts, ends = torch.zeros(1, dtype=torch.int32), torch.zeros(12, dtype=torch.int32), set[int]()
    with checked(("last", "counts")), random_program_order():
        for _ in range(30):
            program_kernel[(2, 3, 2)](last, counts)
            ends.add(int(last))
    assert counts.tolist() == [30] * 12
    assert len(ends) > 4


def test_without_the_interpreter_it_refuses() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"), checked():
        pass
