"""Locked host memory as tensors of a GPU, with a stand-in for the CUDA runtime."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from dsv4_compile.errors import DSV4Error
from dsv4_compile.runtime import host_memory

CUDA = torch.device("cuda", 0)


class Runtime:
    """Registers memory, and notes calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append((address, size, flags))
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        self.calls.append(address)


class View:
    """A tensor as torch makes it of an array: it holds the array, and has its memory."""

    def __init__(self, registered: Any) -> None:
        self.registered, self.tensor = registered, registered._memory

    def view(self, *sizes: Any) -> View:
        self.tensor = self.tensor.view(*sizes)
        return self


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    stub = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: stub)
    monkeypatch.setattr(torch.cuda, "check_error", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: stub.calls.append("wait"))
    monkeypatch.setattr(host_memory, "_tensor_of", lambda registered, _: View(registered))
    return stub


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 64), torch.float8_e4m3fn), ((5,), torch.float32), ((0, 4), torch.int8)]
)
def test_memory_is_of_the_asked_shape_and_in_separate_pages(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors = [host_memory.empty(shape, dtype) for _ in range(2)]
    for tensor in tensors:
        assert tuple(tensor.shape) == shape and tensor.dtype is dtype and tensor.device.type == "cpu"
        assert tensor.data_ptr() % 4096 == 0
        tensor.view(torch.uint8).fill_(7)
    if tensors[0].numel():
        assert abs(tensors[0].data_ptr() - tensors[1].data_ptr()) >= 4096


def test_memory_is_locked_until_its_last_tensor_is_gone(runtime: Runtime) -> None:
    table = host_memory.empty((3, 64), torch.float8_e4m3fn)
    address = table.data_ptr()
    view: Any = host_memory.on_gpu(table, CUDA)
    assert view.tensor.data_ptr() == address and view.tensor.shape == (3, 64)
    assert view.tensor.dtype is torch.float8_e4m3fn
    array = view.registered.__cuda_array_interface__
    assert array["shape"] == (192,) and array["typestr"] == "|u1" and array["data"] == (address, False)
    del table
    gc.collect()
    assert runtime.calls == [(address, 192, 3)]
    del view, array
    gc.collect()
    assert runtime.calls == [(address, 192, 3), "wait", address]


def test_memory_that_cannot_be_locked_is_an_error_with_its_size(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    with pytest.raises(DSV4Error, match=r"E210(.|\n)*0.00 GB of host memory(.|\n)*out of memory(.|\n)*ulimit -l"):
        host_memory.on_gpu(host_memory.empty((8,), torch.float32), CUDA)
    gc.collect()
    assert [call for call in runtime.calls if call == "wait"] == []
