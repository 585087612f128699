"""Not a test: what each rank does in a scenario of `test_watchdog`, in a separate process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch

from dsv4_compile.parallel import Ranks, watchdog
from dsv4_compile.parallel.agreement import Processes
from dsv4_compile.runtime import groups

TIMEOUT, INTERVAL = 2.0, 0.1
HANGS = 60.0
"""Seconds that a survivor would wait whom no watchdog ends."""
LONGER = 2 * TIMEOUT


class Stand:
    """Stands in for work on a GPU."""

    def __init__(self) -> None:
        self.pending = False
        self.asked = 0

    def record(self) -> None:
        pass

    def done(self) -> bool:
        self.asked += 1
        return not self.pending


class Place(NamedTuple):
    """A free port, and a folder for files."""

    port: int
    folder: Path


class Rank:
    """One of two ranks, with its group, its stand-in for work and its watchdog."""

    def __init__(self, rank: int, place: Place, visible: bool = True, store: str = "") -> None:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{place.folder}/{store}" if store else f"tcp://127.0.0.1:{place.port}",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=60),
        )
        groups.free_before_destruction()
        self.ranks = Ranks(rank, 2, torch.distributed.group.WORLD.group_name)
        self.processes, self.work = Processes(self.ranks), Stand()
        self.everyone = dict(self.processes.visible)
        if not visible:
            self.processes.visible.clear()
        self.dog = watchdog.watch(self.ranks, self.processes, self.work, TIMEOUT, INTERVAL)
        with self.dog.call():
            pass
        torch.distributed.barrier()
        time.sleep(3 * INTERVAL)  # a beat of each rank has been read

    @property
    def survives(self) -> bool:
        return self.ranks.rank == 0

    def outlive(self) -> None:
        """Wait until the other process has ended, or has hung."""
        self.processes.visible |= self.everyone
        end = time.monotonic() + HANGS
        while not self.processes.gone() and time.monotonic() < end:
            time.sleep(INTERVAL)

    def hang(self) -> None:
        """Wait as a host does for a kernel that spins."""
        with self.dog.call():
            self.work.pending = True
        time.sleep(HANGS)
        os._exit(1)


def threads() -> list[str]:
    """Return the names of the watchdog's threads."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("dsv4-")]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def a_rank_is_killed(rank: int, place: Place) -> None:
    me = Rank(rank, place)
    me.hang() if me.survives else die()


def a_rank_that_is_not_visible_is_killed(rank: int, place: Place) -> None:
    me = Rank(rank, place, visible=False)
    me.hang() if me.survives else die()


def the_host_of_the_store_is_killed(rank: int, place: Place) -> None:
    me = Rank(rank, place)
    die() if me.survives else me.hang()


def the_host_of_the_store_that_is_not_visible_is_killed(rank: int, place: Place) -> None:
    me = Rank(rank, place, visible=False)
    die() if me.survives else me.hang()


def a_rank_is_killed_while_the_host_is_inside_a_call(rank: int, place: Place) -> None:
    me = Rank(rank, place)
    if not me.survives:
        die()
    me.dog.enter()
    time.sleep(HANGS)


def a_rank_destroys_the_group_in_a_step(rank: int, place: Place) -> None:
    me = Rank(rank, place)
    if me.survives:
        me.hang()
    torch.distributed.destroy_process_group()
    me.outlive()


def the_host_of_the_store_destroys_the_group_in_a_step(rank: int, place: Place) -> None:
    me = Rank(rank, place)
    if not me.survives:
        me.hang()
    torch.distributed.destroy_process_group()
    me.outlive()


def the_store_is_closed_whose_host_runs(rank: int, place: Place) -> None:
    class Closed:
        def set(self, key: str, value: str) -> None:
            raise torch.distributed.DistNetworkError("Connection reset by peer")

    me = Rank(rank, place)
    if me.survives:
        me.outlive()
        return
    me.dog._beats.store = Closed()
    me.hang()


def the_host_of_the_store_that_is_not_visible_hangs(rank: int, place: Place) -> None:
    me = Rank(rank, place, visible=False)
    if not me.survives:
        me.hang()
    stopped = os.getpid()
    if os.fork() == 0:
        me.outlive()
        os.kill(stopped, signal.SIGKILL)
        os._exit(0)
    os.kill(stopped, signal.SIGSTOP)


def a_rank_ends_its_interpreter_in_a_step(rank: int, place: Place) -> None:
    me = Rank(rank, place)
    if me.survives:
        me.hang()
    sys.exit(3)


def a_rank_that_has_left_is_not_asked_for_more(rank: int, place: Place) -> None:
    me = Rank(rank, place)
    with me.dog.call():
        pass
    if not me.survives:
        torch.distributed.destroy_process_group()
        return
    time.sleep(LONGER)  # idle
    assert me.work.asked == 1, me.work.asked  # a query in a capture would spoil it


def a_rank_that_has_left_has_finished_the_call(rank: int, place: Place) -> None:
    me = Rank(rank, place)
    with me.dog.call():
        if me.survives:
            time.sleep(LONGER)  # a breakpoint
    if not me.survives:
        torch.distributed.destroy_process_group()


def a_rank_is_slow(rank: int, place: Place) -> None:
    me = Rank(rank, place, visible=False)
    with me.dog.call():
        me.work.pending = me.survives
    end = time.monotonic() + LONGER
    while time.monotonic() < end and not me.survives:
        sum(range(100_000))  # Python that never waits
        time.sleep(0)
    torch.distributed.barrier()
    me.work.pending = False
    torch.distributed.destroy_process_group()


def a_rank_is_stopped(rank: int, place: Place) -> None:
    stopped(Rank(rank, place), 1)


def the_host_of_the_store_is_stopped(rank: int, place: Place) -> None:
    stopped(Rank(rank, place), 0)


def stopped(me: Rank, which: int) -> None:
    """Stop the rank `which` for longer than the timeout, while the other has a step pending."""
    if me.ranks.rank == which:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        with me.dog.call():
            me.work.pending = True
        time.sleep(LONGER)
        os.kill(me.processes.places[which][1], signal.SIGCONT)
        me.work.pending = False
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def a_fork_ends_that_is_no_rank(rank: int, place: Place) -> None:
    me = Rank(rank, place)
    if me.survives:
        with me.dog.call():
            me.work.pending = True
    elif (child := os.fork()) == 0:
        watchdog.leave()
        me.dog.leave()
        os._exit(0)
    else:
        os.waitpid(child, 0)
    time.sleep(LONGER)
    me.work.pending = False
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def a_group_is_destroyed_and_made_again(rank: int, place: Place) -> None:
    first = Rank(rank, place)
    assert sorted(threads()) == ["dsv4-beats", "dsv4-watchdog"]
    assert watchdog.watch(first.ranks, first.processes, first.work, 3.0) is first.dog
    assert first.dog.timeout == 3.0
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    assert threads() == []
    # A caller who imported the function before: the threads see that the group is no more.
    second = Rank(rank, place, store="second")
    assert second.dog is not first.dog
    torch.distributed.barrier()
    torch.distributed.destroy_process_group.__wrapped__()
    time.sleep(10 * INTERVAL)
    assert threads() == []
    third = Rank(rank, place, store="third")  # under the same name
    assert third.ranks.name == first.ranks.name
    if third.survives:
        third.hang()
    die()


def a_thread_fails(rank: int, place: Place) -> None:
    me = Rank(rank, place)

    def gone() -> list[int]:
        raise ValueError("no /proc")

    me.processes.gone = gone  # type: ignore[method-assign]
    time.sleep(5 * INTERVAL)
    assert sorted(threads()) == ["dsv4-beats", "dsv4-watchdog"]
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run(name: str, rank: int, port: int, folder: str) -> None:
    """Run a scenario with stderr in a file."""
    os.dup2(os.open(Path(folder) / f"{name}.{rank}", os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    globals()[name](rank, Place(port, Path(folder)))


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
