"""The first byte of a tensor is read from its address, or from its offset where it has no memory."""

from __future__ import annotations

import warnings

import torch

from dsv4_compile._compat import FakeTensorMode
from dsv4_compile.kernels.host.addresses import first_byte
from dsv4_compile.kernels.host.launch_cache import ALIGN, key_of
from tests.kernels.handed_over import handed_over


def test_an_address_counts_and_not_the_offset() -> None:
    x = torch.zeros(200, dtype=torch.uint8)
    for byte in (0, 1, 8, 63):
        assert first_byte(handed_over(x, byte)) == byte
        # A view of an unaligned tensor may begin at an aligned address.
        assert first_byte(handed_over(x, byte)[ALIGN - byte :]) == 0
    assert first_byte(handed_over(x, 8).view(torch.float32)[3:]) == 20


def test_a_tensor_without_memory_begins_at_its_offset() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where the address of a fake is read
        with FakeTensorMode() as mode:
            fakes = torch.empty(200, dtype=torch.bfloat16), torch.empty(200, dtype=torch.bfloat16, device="meta")
        assert [first_byte(fake[3:]) for fake in fakes] == [6, 6]
        assert first_byte(mode.from_tensor(handed_over(torch.zeros(9, dtype=torch.uint8), 1))) == 0


def test_the_launch_cache_tells_apart_what_begins_elsewhere() -> None:
    x = torch.zeros(200, dtype=torch.uint8)
    first, second = handed_over(x, 8), handed_over(x, 16)
    assert key_of((first,)) != key_of((second,)) and first_byte(first) != first_byte(second)
