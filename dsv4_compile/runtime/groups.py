"""Captured graphs that communicate, which are freed before their process group is destroyed; watchdogs end then too.

NCCL waits in `destroy_process_group` until no graph holds its communicator: for ever while the model that owns the
graph lives on.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from .._compat import OpOverload
from ..errors import check
from ..parallel import watchdog
from ..parallel.boundary import check_arrived

_NAMESPACES = ("_c10d_functional", "c10d", "dsv4_collectives", "symm_mem")
"""Namespaces of ops with the name of a process group as last string argument."""
_lock = threading.Lock()


class Graph(Protocol):
    """A CUDA graph, as torch.cuda.CUDAGraph."""

    def replay(self) -> None:
        """Launch the graph."""

    def reset(self) -> None:
        """Free the graph."""


_communicating: weakref.WeakKeyDictionary[Graph, frozenset[str]] = weakref.WeakKeyDictionary()
"""Names of the process groups by graph."""


def group_of(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the name of the process group that a call of `op` communicates with, or None."""
    if op.namespace not in _NAMESPACES:
        return None
    return next((arg for arg in (*reversed(args), *kwargs.values()) if isinstance(arg, str)), None)


def replay_of(graph: Graph, groups: frozenset[str], what: str) -> Callable[[], None]:
    """Return what replays `graph`, which is freed when one of `groups` is destroyed; a later replay raises E704.

    A replay after one that not all ranks joined raises E705.
    """
    if not groups:
        return graph.replay
    free_before_destruction()
    _communicating[graph] = groups

    def replay() -> None:
        check_arrived(groups)
        try:
            graph.replay()
        except RuntimeError:
            check(graph in _communicating, "E704", got=f"a replay of {what}")
            raise

    return replay


def release(group: str | None = None) -> int:
    """Free the captured graphs that communicate in the process group `group`, or in any; return their number."""
    graphs = [graph for graph, names in tuple(_communicating.items()) if group is None or group in names]
    for graph in graphs:
        del _communicating[graph]
        graph.reset()
    return len(graphs)


def free_before_destruction() -> None:
    """Let torch.distributed.destroy_process_group free graphs first, then end the watchdogs of the group."""
    distributed: Any = torch.distributed
    with _lock:
        destroy = distributed.destroy_process_group
        if hasattr(destroy, "dsv4_releases"):
            return

        @functools.wraps(destroy)
        def destroy_process_group(group: Any = None) -> None:
            is_world = group is None or group is distributed.group.WORLD
            name = None if is_world else getattr(group, "group_name", "")
            if release(name) and torch.cuda.is_available():
                torch.cuda.synchronize()
            watchdog.leave(name)
            destroy(group)

        destroy_process_group.dsv4_releases = True  # type: ignore[attr-defined]
        distributed.destroy_process_group = destroy_process_group
        distributed.distributed_c10d.destroy_process_group = destroy_process_group
