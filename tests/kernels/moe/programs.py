"""Not a test: run the programs of a launch in the interpreter in random order, as a GPU may."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from dsv4_compile._compat import triton_interpreter


@contextmanager
def random_order(seed: int) -> Iterator[None]:
    """Permute the programs of every launch in the block."""
    builder, executor = triton_interpreter.interpreter_builder, triton_interpreter.GridExecutor
    set_grid_idx, call = builder.set_grid_idx, executor.__call__
    orders: dict[str, Any] = {}

    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        orders.clear()
        return call(self, *args, **kwargs)

    def moved(x: int, y: int, z: int) -> None:
        sizes = builder.grid_dim
        if not orders:
            orders["order"] = np.random.default_rng(seed).permutation(int(np.prod(sizes)))
        flat = int(orders["order"][(x * sizes[1] + y) * sizes[2] + z])
        set_grid_idx(flat // (sizes[1] * sizes[2]), flat // sizes[2] % sizes[1], flat % sizes[2])

    with mock.patch.object(executor, "__call__", start), mock.patch.object(builder, "set_grid_idx", moved):
        yield
