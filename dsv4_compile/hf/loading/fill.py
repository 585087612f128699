"""Reading of weights into their places on the device, in threads.

Pieces that are stored as they will be used, all of an official checkpoint but small ones, are split into reads of at
most `CHUNK` bytes, in the order of the files; each thread takes the next ones. A read goes into the parameter's memory
on a CPU, and through pinned memory of the thread to a GPU, while its next read is under way. Pieces that are converted
or dequantised are left to the calling thread, since torch starts threads for them.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ... import progress
from ...checkpoints.header import DTYPES, Source, Stored
from ...checkpoints.reader import Index, Reader, read_ahead, rows_of
from ...errors import check
from ...loading import check_scales
from ...reference.moe.expert_weights import dequantize_expert
from .placement import Piece, Placement, targets
from .staging import CHUNK, Staging

_MEGA, _GIGA = 10**6, 10**9
_NOTE_SECONDS = 2.0
"""Seconds between two reports of the rate, so that a log gets few lines."""
_MOST_THREADS = 16
"""Threads that read: their pinned memory is 256 MiB, and fewer saturate a disk or the memory of a host."""
_INTEGERS = (torch.uint8, torch.int8)


class Filled(NamedTuple):
    """Figures of a fill: bytes, wall time, and the threads with the seconds that all of them read and placed."""

    nbytes: int
    seconds: float
    threads: int
    read_seconds: float
    place_seconds: float

    def __str__(self) -> str:
        busy = max(self.read_seconds + self.place_seconds, 1e-9)
        rate = self.nbytes / _GIGA / max(self.seconds, 1e-9)
        share = round(100 * self.read_seconds / busy)
        return f"{rate:.2f} GB/s, {self.threads} threads: {share}% read, {100 - share}% place"


class _Region(NamedTuple):
    """Bytes of a stored tensor: `rows` rows from `offset` on, and of each row of `height` bytes those of a slice."""

    offset: int
    rows: int
    height: int
    begin: int
    end: int


class _Read(NamedTuple):
    """Rows, or bytes of one long row, of a piece that one thread reads at once."""

    piece: Piece
    region: _Region
    target: int
    """First byte in the piece's place."""


class _OfFile(NamedTuple):
    """Pieces of one file: those left to the calling thread, and reads of the others."""

    slow: list[Piece]
    reads: list[_Read]


_Part = tuple[list[Piece], list[list[_Read]]]
"""Pieces of a file for the calling thread, and batches for the others."""


class _Done(NamedTuple):
    """Figures of a batch or a piece: file, bytes, seconds of reading and of placing."""

    file: Path
    nbytes: int
    read_seconds: float
    place_seconds: float


def reading_threads() -> int:
    """Return how many threads read weights: one for each CPU that this process may use, at most 16."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cpus, _MOST_THREADS)


def fill(
    placement: Placement,
    sources: Mapping[Path, Source],
    device: torch.device,
    *,
    threads: int | None = None,
    chunk: int = CHUNK,
) -> Filled:
    """Read every piece of a checkpoint into its place.

    Args:
        threads: threads that read (None = `reading_threads()`); on a GPU each has `2 * chunk` bytes of pinned memory.
        chunk: most bytes of one read.
    """
    pieces = sorted(placement.pieces, key=lambda piece: (piece.stored.file, piece.stored.begin))
    work = _Work(placement, sources, device, chunk)
    by_file: dict[Path, _OfFile] = {}
    for piece in pieces:
        of_file = by_file.setdefault(piece.stored.file, _OfFile([], []))
        region = _region_of(piece, work.places[piece.target])
        if region is None:
            of_file.slow.append(piece)
        else:
            of_file.reads.extend(_split(piece, region, chunk))
    parts = [(of_file.slow, list(_batches(of_file.reads, chunk))) for of_file in by_file.values()]
    for slow, batches in parts:
        work.files.expect([stored.file for piece in slow for stored in filter(None, (piece.stored, piece.scale))])
        work.files.expect([batch[0].piece.stored.file for batch in batches])
    total = sum(_selected(piece.stored, piece.part) for piece in pieces)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # memory of the places may have had users on streams that threads do not follow
    with progress.stage("load", total // _MEGA) as stage:
        filled = _run(work, parts, threads or reading_threads(), stage)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # kernels that load weights early (PDL) rely on no copy being under way
        del work
        from ..._compat import free_pinned

        free_pinned()
    return filled


def _run(work: _Work, parts: Sequence[_Part], threads: int, stage: progress.Stage) -> Filled:
    """Give batches to threads, fill slow pieces here, and report; the first failure ends all."""
    done: queue.SimpleQueue[Future[_Done]] = queue.SimpleQueue()
    rate = _Rate(stage, threads)
    pool = ThreadPoolExecutor(threads, "dsv4-read")
    waiting = 0
    try:
        for slow, batches in parts:
            for batch in batches:
                pool.submit(work.fill_batch, batch).add_done_callback(done.put)
            waiting += len(batches)
            for piece in slow:
                rate.count(work.fill_slowly(piece))
            while waiting > threads:  # few files are open at a time, and few batches wait
                rate.count(done.get().result())
                waiting -= 1
        for _ in range(waiting):
            rate.count(done.get().result())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        work.files.discard()
    rate.report()
    return rate.filled()


def _selected(stored: Stored, part: Index) -> int:
    """Return the bytes of what `part` selects of a stored tensor."""
    sizes = [rows_of(index, size)[1] for index, size in zip(part, stored.shape, strict=False)]
    return math.prod((*sizes, *stored.shape[len(part) :])) * DTYPES[stored.dtype].itemsize


def _region_of(piece: Piece, parameter: Tensor) -> _Region | None:
    """Return the bytes that a piece takes, if they are used as they are stored and lie in rows; else None."""
    stored, part = piece.stored, piece.part
    dtype = DTYPES[stored.dtype]
    same = parameter.dtype is dtype or (dtype in _INTEGERS and parameter.itemsize == 1)
    if piece.scale is not None or not same or not stored.nbytes or not parameter[piece.into].is_contiguous():
        return None
    if not part:
        return _Region(0, 1, stored.nbytes, 0, stored.nbytes)
    begin, rows = rows_of(part[0], stored.shape[0])
    height = stored.nbytes // stored.shape[0]
    if len(part) == 1:
        return _Region(begin * height, 1, rows * height, 0, rows * height)
    if len(part) > 2 or len(stored.shape) > 2 or isinstance(part[0], int) or not isinstance(part[1], slice):
        return None
    first, columns = rows_of(part[1], stored.shape[1])
    return _Region(begin * height, rows, height, first * dtype.itemsize, (first + columns) * dtype.itemsize)


def _split(piece: Piece, region: _Region, chunk: int) -> Iterator[_Read]:
    """Yield reads of at most `chunk` bytes of a piece."""
    if region.rows == 1:
        for begin in range(region.begin, region.end, chunk):
            end = min(begin + chunk, region.end)
            yield _Read(piece, region._replace(begin=begin, end=end), begin - region.begin)
        return
    step = max(1, chunk // region.height)
    for row in range(0, region.rows, step):
        rows = min(step, region.rows - row)
        part = region._replace(offset=region.offset + row * region.height, rows=rows)
        yield _Read(piece, part, row * (region.end - region.begin))


def _batches(reads: Sequence[_Read], chunk: int) -> Iterator[list[_Read]]:
    """Yield neighbouring reads of one file, of at most `chunk` bytes together."""
    batch: list[_Read] = []
    size = 0
    for read in reads:
        nbytes = read.region.rows * read.region.height if read.region.rows > 1 else read.region.end - read.region.begin
        if batch and (size + nbytes > chunk or read.piece.stored.file != batch[0].piece.stored.file):
            yield batch
            batch, size = [], 0
        batch.append(read)
        size += nbytes
    if batch:
        yield batch


class _Files:
    """Open files of a checkpoint: each from its first use to its last, when it is checked that it has not changed."""

    def __init__(self, sources: Mapping[Path, Source]) -> None:
        self._sources = sources
        self._order = sorted(sources)
        self._uses: Counter[Path] = Counter()
        self._open: dict[Path, Reader] = {}
        self._lock = threading.Lock()

    def expect(self, files: Sequence[Path]) -> None:
        """Count one use for each of `files`."""
        self._uses.update(files)

    def reader(self, file: Path) -> Reader:
        """Return the reader of a file, and let the system read ahead in it and the next one if it is new."""
        with self._lock:
            if file not in self._open:
                self._open[file] = Reader(self._sources[file]).__enter__()
                after = self._order.index(file) + 1
                _start_reading([self._sources[other] for other in self._order[after - 1 : after + 1]])
            return self._open[file]

    def used(self, file: Path) -> None:
        """Count a use; after the last one the file is compared with what it was, and closed."""
        with self._lock:
            self._uses[file] -= 1
            reader = self._open.pop(file) if not self._uses[file] else None
        if reader is not None:
            reader.close()

    def discard(self) -> None:
        """Close what is still open, after a failure."""
        while self._open:
            self._open.popitem()[1].close(compare=False)


class _Work:
    """Filling of one model, piece by piece, by any thread."""

    def __init__(self, placement: Placement, sources: Mapping[Path, Source], device: torch.device, chunk: int) -> None:
        self.files = _Files(sources)
        self.places = {name: tensor.detach() for name, tensor in targets(placement.model)}
        self._device, self._chunk = device, chunk
        self._experts = placement.model.config.n_routed_experts
        self._of_thread = threading.local()

    def _staging(self) -> Staging:
        staging: Staging | None = getattr(self._of_thread, "staging", None)
        if staging is None:
            staging = self._of_thread.staging = Staging(self._device, self._chunk)
        return staging

    def fill_batch(self, batch: Sequence[_Read]) -> _Done:
        """Read a batch, and start the copies of it to the device."""
        file = batch[0].piece.stored.file
        reader, staging = self.files.reader(file), self._staging()
        nbytes, reading, placing = 0, 0.0, 0.0
        with staging.stream():
            for read in batch:
                size = read.region.rows * (read.region.end - read.region.begin)
                begin = time.perf_counter()
                place = self.places[read.piece.target][read.piece.into].view(-1).view(torch.uint8)
                target = place[read.target : read.target + size]
                room = staging.room(target)
                between = time.perf_counter()
                self._read(read, reader, staging, room)
                after = time.perf_counter()
                self._check(read.piece, room.view(DTYPES[read.piece.stored.dtype]))
                staging.place(room, target)
                reading += after - between
                placing += time.perf_counter() - after + between - begin
                nbytes += size
        self.files.used(file)
        return _Done(file, nbytes, reading, placing)

    def _read(self, read: _Read, reader: Reader, staging: Staging, room: Tensor) -> None:
        stored, (offset, rows, height, begin, end) = read.piece.stored, read.region
        if rows == 1:
            reader.fill(room, stored, offset + begin)
            return
        if rows * height <= self._chunk:
            whole = reader.fill(staging.scratch(rows * height), stored, offset)
        else:  # one row longer than a read
            whole = reader.fill(torch.empty(rows * height, dtype=torch.uint8, device="cpu"), stored, offset)
        # NumPy copies in this thread alone, where torch would start threads.
        room.numpy().reshape(rows, end - begin)[:] = whole.numpy().reshape(rows, height)[:, begin:end]

    def fill_slowly(self, piece: Piece) -> _Done:
        """Fill a piece that is converted, dequantised, or not in rows, in the calling thread."""
        begin = time.perf_counter()
        destination = self.places[piece.target][piece.into]
        files = [stored.file for stored in (piece.stored, piece.scale) if stored is not None]
        reader = self.files.reader(piece.stored.file)
        if piece.scale is None:
            integers = DTYPES[piece.stored.dtype] in _INTEGERS
            place = destination.view(DTYPES[piece.stored.dtype]) if integers else destination
            reader.copy(piece.stored, piece.part, place)
            self._check(piece, destination)
            between = after = time.perf_counter()
        else:
            value = reader.read(piece.stored, piece.part)
            scale = self.files.reader(piece.scale.file).read(piece.scale, piece.scale_part)
            between = time.perf_counter()
            check_scales(scale, str(piece.scale))
            weight = dequantize_expert(value.to(self._device), scale.to(self._device))[piece.kept]
            check(weight.shape == destination.shape, "E207", got=f"{piece.stored} of a wrong shape")
            destination.copy_(weight)
            after = time.perf_counter()
        for file in files:
            self.files.used(file)
        return _Done(piece.stored.file, _selected(piece.stored, piece.part), between - begin, after - between)

    def _check(self, piece: Piece, values: Tensor) -> None:
        """Raise E207 for scales that are no numbers, and for experts that do not exist in a routing table."""
        if piece.target.endswith("_scale_inv"):
            check_scales(values, str(piece.stored))
        elif not values.is_floating_point() and values.dtype is torch.int64:
            low, high = int(values.min()), int(values.max())
            good = low >= 0 and high < self._experts  # kernels would read beyond the weights
            got = f"{piece.stored} with experts {low} to {high}"
            check(good, "E207", got=got, why=f"there are {self._experts}")


def _start_reading(sources: list[Source]) -> None:
    """Start a thread that lets the operating system read files into its cache while others are copied."""
    if hasattr(os, "posix_fadvise"):
        thread = threading.Thread(target=read_ahead, args=(sources,), name="dsv4-read-ahead", daemon=True)
        thread.start()  # the call may wait for the disk


class _Rate:
    """Report of loading, from one thread: megabytes, GB/s and the latest file, at each file and every few seconds."""

    def __init__(self, work: progress.Stage, threads: int) -> None:
        self._work, self._threads = work, threads
        self._started = self._reported = time.monotonic()
        self._bytes = self._steps = 0
        self._seconds = [0.0, 0.0]
        self._files: dict[Path, None] = {}

    def count(self, done: _Done) -> None:
        """Count what one thread has done, and report it if it is time."""
        self._bytes += done.nbytes
        self._seconds[0] += done.read_seconds
        self._seconds[1] += done.place_seconds
        new = done.file not in self._files
        self._files[done.file] = None
        if new or time.monotonic() - self._reported > _NOTE_SECONDS:
            self.report()

    def filled(self) -> Filled:
        """Return the figures so far."""
        return Filled(self._bytes, time.monotonic() - self._started, self._threads, *self._seconds)

    def report(self) -> None:
        """Report what is done so far."""
        self._reported = time.monotonic()
        steps = self._bytes // _MEGA - self._steps
        self._steps += steps
        name = "".join(f", {file.name}" for file in [*self._files][-1:])
        self._work.advance(f"MB, {self.filled()}{name}", steps)
