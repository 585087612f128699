"""One rank of a mesh without the others, through torch's fake process group: a rank's step without collectives.

A collective of that group returns at once: an all-reduce leaves this rank's summand, a gather has copies of its part.
Kernels, shapes and memory are those of a rank, results are those of no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ..errors import check
from .ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BACKEND = "fake"
"""torch's name of the backend."""


@contextmanager
def fake_mesh(size: int, device: torch.device) -> Iterator[DeviceMesh]:
    """Yield a mesh of `size` ranks with this process as rank 0, and destroy its group after the block.

    Raises E701 if the process has a group already.
    """
    distributed = torch.distributed
    check(
        not distributed.is_initialized(),
        "E701",
        got="a process that has a process group already",
        why="the fake one is the default group of its process",
        fix="call torch.distributed.destroy_process_group() first",
    )
    from torch.distributed.device_mesh import init_device_mesh

    from .._compat import FakeStore  # its module registers the backend

    distributed.init_process_group(BACKEND, rank=0, world_size=size, store=FakeStore())
    try:
        yield init_device_mesh(device.type, (size,))
    finally:
        distributed.destroy_process_group()


def is_fake(ranks: Ranks) -> bool:
    """Return whether the other ranks do not exist."""
    return str(torch.distributed.get_backend(ranks.group)) == BACKEND
