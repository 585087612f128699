"""Tests of the threads that read weights: equal bytes for any number of threads and size of a read, and failures."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from dsv4_compile import DSV4Error, hf
from dsv4_compile.checkpoints.reader import Reader
from dsv4_compile.hf.loading import fill as module
from dsv4_compile.hf.loading import load as loading
from dsv4_compile.hf.loading.staging import Staging
from tests.hf import official


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return official.make(tmp_path_factory.mktemp("official"))[0]


def load(folder: Path, **options: Any) -> dict[str, Tensor]:
    model = hf.load(folder, max_batch_size=1, max_seq_len=64, device="cpu", **options)
    return {name: tensor.view(torch.uint8) if tensor.dim() else tensor for name, tensor in model.state_dict().items()}


def with_reads(monkeypatch: pytest.MonkeyPatch, threads: int, chunk: int) -> None:
    """Let `hf.load` read in so many threads, and at most so many bytes at once."""
    monkeypatch.setattr(loading, "fill", lambda *arguments: module.fill(*arguments, threads=threads, chunk=chunk))


@pytest.mark.parametrize("options", [{}, {"dequantize": True}, {"dtype": torch.float32}], ids=str)
def test_threads_and_the_size_of_a_read_change_no_byte(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    with_reads(monkeypatch, 1, 1 << 30)
    expected = load(folder, **options)
    for threads, chunk in ((1, 512), (3, 4096), (8, 1000 * 8)):
        with_reads(monkeypatch, threads, chunk)
        found = load(folder, **options)
        assert [name for name, want in expected.items() if not torch.equal(found[name], want)] == []


def test_columns_of_a_matrix_are_read_in_rows(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from dsv4_compile.checkpoints.header import read_header
    from dsv4_compile.hf.loading.placement import Piece

    whole = torch.arange(50 * 40, dtype=torch.int32).float().view(50, 40)
    save_file({"x": whole}, tmp_path / "x.safetensors")
    tensors, source, _ = read_header(tmp_path, tmp_path / "x.safetensors")
    assert source is not None
    for part in ((), (slice(3, 9),), (slice(None), slice(5, 9)), (slice(7, 50), slice(0, 40))):
        piece = Piece(tensors["x"], "y", (), part)
        target = torch.empty_like(whole[part])
        region = module._region_of(piece, target)
        assert region is not None
        for chunk in (64, 1000, 1 << 20):
            target.fill_(-1)
            work = object.__new__(module._Work)
            work._chunk = chunk
            staging = Staging(torch.device("cpu"), chunk)
            with Reader(source) as reader:
                for read in module._split(piece, region, chunk):
                    size = read.region.rows * (read.region.end - read.region.begin)
                    place = target.view(-1).view(torch.uint8)[read.target : read.target + size]
                    work._read(read, reader, staging, staging.room(place))
            assert torch.equal(target, whole[part])


def test_files_are_read_by_several_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, read = threading.Barrier(2, timeout=60), Reader.fill
    names: set[str] = set()

    def meet(reader: Reader, *arguments: Any) -> Tensor:
        name = threading.current_thread().name
        if name.startswith("dsv4-read_") and name not in names:
            names.add(name)
            both.wait()  # goes on when two threads read
        return read(reader, *arguments)

    monkeypatch.setattr(Reader, "fill", meet)
    with_reads(monkeypatch, 2, 4096)
    load(folder)
    assert len(names) == 2


def test_a_failure_in_a_thread_ends_the_load_and_closes_every_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_files: set[Reader] = set()
    enter, leave, read = Reader.__enter__, Reader.close, Reader.fill

    def entered(reader: Reader) -> Reader:
        open_files.add(reader)
        return enter(reader)

    def left(reader: Reader, *, compare: bool = True) -> None:
        open_files.discard(reader)
        leave(reader, compare=compare)

    def fail(reader: Reader, *arguments: Any) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            raise DSV4Error("E209", got="a disk that fails")
        return read(reader, *arguments)

    monkeypatch.setattr(Reader, "__enter__", entered)
    monkeypatch.setattr(Reader, "close", left)
    monkeypatch.setattr(Reader, "fill", fail)
    with pytest.raises(DSV4Error, match="a disk that fails"):
        load(folder)
    assert not open_files
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dsv4-read_")]


def test_the_log_says_where_the_seconds_went(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dsv4_compile.hf"):
        load(folder)
    line = next(record.getMessage() for record in caplog.records if "allocation" in record.getMessage())
    for word in ("GB on cpu; headers", "weights", "GB/s", "% read", "% place", "conversion"):
        assert word in line


class FakeEvent:
    """Event that notes its calls."""

    said: ClassVar[list[str]] = []

    def record(self, stream: Any) -> None:
        self.said.append("record")

    def synchronize(self) -> None:
        self.said.append("wait")


def test_pinned_memory_is_written_again_only_after_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each half is waited for before it is filled again, and no two rooms of a half overlap."""
    empty = torch.empty

    def unpinned(*sizes: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return empty(*sizes, **options)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "stream")
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch, "empty", unpinned)
    FakeEvent.said.clear()
    staging = Staging(torch.device("cuda"), 1000)
    rooms = [staging.room(empty(300, dtype=torch.uint8)) for _ in range(8)]
    assert FakeEvent.said == ["record", "wait"] * 2
    begins = [room.data_ptr() - rooms[0].data_ptr() for room in rooms[:3]]
    assert begins == [0, 320, 640]
    assert [room.data_ptr() for room in rooms[6:]] == [room.data_ptr() for room in rooms[:2]]
    assert len({room.data_ptr() for room in rooms[:6]}) == 6
