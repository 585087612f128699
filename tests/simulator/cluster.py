"""Thread block clusters on the CPU: their programs are threads that send each other words."""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dsv4_compile.kernels.hopper.cluster_mailbox import BARRIER_BYTES, MAILBOX_ALIGN
from tests.simulator import gluon as base
from tests.simulator.gluon import Kernel
from tests.simulator.values import Value

_this = threading.local()


def program_id(axis: int) -> Value:
    """Return the number of the program of this thread, or of the only one."""
    number = getattr(_this, "program", None)
    return Value(torch.tensor(Kernel.program[axis] if number is None else number, dtype=torch.int32))


class Cluster:
    """CTAs of a cluster: their shared memories, NaN at first, their mailboxes, and the bytes that each still expects.

    A GPU may run clusters in any `order`.
    """

    order: Callable[[range], Iterable[int]] = staticmethod(iter)

    def __init__(self, size: int, room: int, partitions: int) -> None:
        self.memory = torch.full((size, room // 4), torch.nan)
        self.messages: list[Tensor | None] = [None] * size
        self.opened: set[int] = set()
        self.expected = [0] * size
        self.changed = threading.Condition()
        self.meeting = threading.Barrier(size * partitions, timeout=base.SECONDS / 4)


def allocate_mailbox(size: int) -> int:
    """Allocate a mailbox of whole words after its barrier, at most one per program."""
    if size > 0:
        assert size % MAILBOX_ALIGN == 0 and _this.cluster.messages[_this.rank] is None
        _this.cluster.messages[_this.rank] = torch.full(((size - BARRIER_BYTES) // 4,), torch.nan)
    return int(size > 0)


def open_mailbox(mailbox: int, messages: Value | int) -> None:
    cluster = _this.cluster
    assert mailbox == 1 and int(messages) <= 4 * cluster.messages[_this.rank].numel()
    with cluster.changed:
        cluster.expected[_this.rank] += int(messages)
        cluster.opened.add(_this.rank)
        cluster.changed.notify_all()


def wait_mailboxes_open() -> None:
    cluster = _this.cluster
    with cluster.changed:
        everybody = len(cluster.expected)
        assert cluster.changed.wait_for(lambda: len(cluster.opened) == everybody, timeout=base.SECONDS / 4)
    _this.may_send = True


def cluster_barrier(release: bool) -> None:
    """Wait for the cluster; stores are visible to others only after a barrier with release."""
    _this.released |= release
    _this.cluster.meeting.wait()


def _fours(x: Tensor) -> Tensor:
    """Return `[n, 4]` of `[columns, tokens]`: the two columns of two tokens that a thread holds of an MMA result."""
    return x.unflatten(0, (-1, 2, 8)).unflatten(-1, (-1, 2)).permute(0, 2, 3, 1, 4).reshape(-1, 4)


def send_messages(mailbox: int, program: Value, offset: Value, wanted: Value, values: Value) -> None:
    """Send four words to the place of the first. No word may be sent twice."""
    cluster = _this.cluster
    everything = torch.broadcast_tensors(program.data, offset.data, wanted.data, values.data)
    to, at, live, words = map(_fours, everything)
    assert mailbox == 1 and _this.may_send and (at[:, 0] % 16 == 0).all()
    with cluster.changed:
        for rank in to[:, 0][live[:, 0] != 0].unique().tolist():
            mine = (to[:, 0] == rank) & (live[:, 0] != 0)
            assert (to[mine] == rank).all() and live[mine].all()
            where, messages = (at[mine, :1] // 4 + torch.arange(4)).flatten().long(), cluster.messages[rank]
            assert messages[where].isnan().all() and len(where.unique()) == len(where)
            messages[where] = words[mine].flatten()
            cluster.expected[rank] -= 4 * len(where)
        cluster.changed.notify_all()


def wait_messages(mailbox: int) -> None:
    cluster = _this.cluster
    assert mailbox == 1
    with cluster.changed:
        assert cluster.changed.wait_for(lambda: cluster.expected[_this.rank] == 0, timeout=base.SECONDS / 4)


def read_messages(mailbox: int, offset: Value) -> Value:
    """Read four words from the place of the first."""
    assert mailbox == 1 and _this.cluster.expected[_this.rank] == 0
    places = _fours(torch.arange(offset.data.numel()).view(offset.data.shape))
    where = (_fours(offset.data)[:, :1] // 4 + torch.arange(4)).long()
    assert (where[:, 0] % 4 == 0).all()
    words = torch.empty(offset.data.numel())
    words[places] = _this.cluster.messages[_this.rank][where]
    return Value(words.view(offset.data.shape))


def store_fetched_words(values: Value, offset: Value) -> None:
    where, words = torch.broadcast_tensors(offset.data // 4, values.data)
    _this.cluster.memory[_this.rank][where.long()] = words
    _this.released = False


def store_fetched_pairs(values: Value, offset: Value) -> None:
    """Store pairs of neighbours at the offset of the first."""
    where, words = torch.broadcast_tensors(offset.data // 4, values.data)
    first = where[:, ::2]
    assert (first % 2 == 0).all()
    store_fetched_words(Value(words), Value(4 * torch.stack((first, first + 1), -1).flatten(1)))


def specialize(partitions: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    """Run partitions as `gluon.specialize`, in the cluster of their program."""
    mine = dict(vars(_this))

    def of_the_program(function: Any) -> Any:
        def run(*args: Any) -> None:
            vars(_this).update(mine)
            function(*args)

        return run

    base.specialize([(of_the_program(function), args) for function, args in partitions], warps, registers)


def fetch_words(program: int, offset: Value, wanted: Value) -> Value:
    assert _this.released
    words = _this.cluster.memory[int(program)][torch.where(wanted.data != 0, offset.data // 4, 0).long()]
    return Value(torch.where(wanted.data != 0, words, 0.0))


def launch_clusters(kernel: Kernel, programs: int, size: int, room: int, *args: Any, **constants: Any) -> None:
    """Run clusters one by one. Raise the first exception of a program."""
    assert programs % size == 0 and 1 < size <= 8 and constants.pop("launch_pdl")
    assert set(list(inspect.signature(kernel.function).parameters)[len(args) :]) == constants.keys()
    partitions = 3 if "CONSUMER_REGISTERS" in constants else 1
    errors: list[BaseException] = []

    def run(cluster: Cluster, rank: int, program: int) -> None:
        _this.cluster, _this.rank, _this.program = cluster, rank, program
        _this.released, _this.may_send = True, False
        try:
            with torch.no_grad():
                kernel.function(*map(base.argument, args), **constants)
        except BaseException as error:
            errors.append(error)
            cluster.meeting.abort()

    for first in Cluster.order(range(0, programs, size)):
        cluster = Cluster(size, room, partitions)
        threads = [threading.Thread(target=run, args=(cluster, i, first + i)) for i in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        assert cluster.expected == [0] * size


MAILBOX = allocate_mailbox, open_mailbox, wait_mailboxes_open, send_messages, wait_messages, read_messages
WORDS = {f.__name__: f for f in (*MAILBOX, cluster_barrier, store_fetched_words, store_fetched_pairs, fetch_words)}


def clustered(launcher: types.ModuleType) -> Any:
    """Return a context that makes `launcher` launch clusters."""
    (kernel,) = (x for name, x in vars(launcher).items() if re.fullmatch(r"gemm_sm90_\w+_kernel", name))
    functions = [kernel.function]
    stack = contextlib.ExitStack()
    for name in ("compute_tile", "combine_in_cluster", "store_fetched"):
        value = functions[-1].__globals__.get(name)
        functions += [value.function] if value else []
    for function in functions:
        known = function.__globals__
        stack.enter_context(mock.patch.dict(known, {k: v for k, v in WORDS.items() if k in known}))
    stack.enter_context(mock.patch.object(launcher, "launch_clusters", launch_clusters))
    return stack
