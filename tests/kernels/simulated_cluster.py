"""Clusters on the CPU, for simulated_gluon.py: their programs are threads that read each other's words."""

from __future__ import annotations

import contextlib
import inspect
import threading
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from tests.kernels import simulated_gluon as base
from tests.kernels.simulated_gluon import Kernel, Value

_this = threading.local()


def program_id(axis: int) -> Value:
    """Of the program of this thread, or of the one that runs alone."""
    number = getattr(_this, "program", None)
    return Value(torch.tensor(Kernel.program[axis] if number is None else number, dtype=torch.int32))


class Cluster:
    """Programs that meet, and the shared memory of each, which holds NaN at first."""

    def __init__(self, size: int, shared: int) -> None:
        self.memory = torch.full((size, shared // 4), torch.nan)
        self.meeting = threading.Barrier(size, timeout=base.SECONDS / 4)


def put_words(values: Value, offset: Value) -> None:
    where, words = torch.broadcast_tensors(offset.data // 4, values.data)
    _this.cluster.memory[_this.rank][where.long()] = words


def words_of(program: int, offset: Value, wanted: Value) -> Value:
    words = _this.cluster.memory[int(program)][(offset.data // 4).long()]
    return Value(torch.where(wanted.data != 0, words, 0.0))


def cluster_arrive() -> None:
    assert not _this.arrived
    _this.arrived = True


def cluster_wait() -> None:
    assert _this.arrived
    _this.arrived = False
    _this.cluster.meeting.wait()


def launch_clusters(kernel: Kernel, programs: int, size: int, shared: int, *args: Any, **constants: Any) -> None:
    """Each cluster after the one in front of it. Raises what the first program to fail raises."""
    assert programs % size == 0 and 1 < size <= 8 and constants.pop("launch_pdl")
    assert set(list(inspect.signature(kernel.function).parameters)[len(args) :]) == constants.keys()
    errors: list[BaseException] = []

    def run(cluster: Cluster, rank: int, program: int) -> None:
        _this.cluster, _this.rank, _this.program, _this.arrived = cluster, rank, program, False
        try:
            with torch.no_grad():
                kernel.function(*map(base.argument, args), **constants)
            assert not _this.arrived
        except BaseException as error:
            errors.append(error)
            cluster.meeting.abort()

    for first in range(0, programs, size):
        cluster = Cluster(size, shared)
        threads = [threading.Thread(target=run, args=(cluster, i, first + i)) for i in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


def clustered(launcher: types.ModuleType, stores: Callable[..., Any]) -> Any:
    """A context in which `launcher` launches clusters, whose words go through `stores`, a function of its kernel's."""
    words = {f.__name__: f for f in (put_words, words_of, cluster_arrive, cluster_wait)}
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.dict(stores.__globals__, words))
    stack.enter_context(mock.patch.object(launcher, "launch_clusters", launch_clusters))
    return stack
