"""Not a test: run the programs of a launch in the interpreter in random order, as a GPU may."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor

from dsv4_compile._compat import triton_interpreter
from dsv4_compile.testing import poisoned_empty
from tests.support.bounds import checked


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


def run_launches(call: Callable[[], Tensor], launched: Sequence[str], written: Sequence[str], seed: int) -> Tensor:
    """Return the result of a call in the checking interpreter, in random order, in new memory of NaN.

    It must launch the kernels `launched` and write their arguments `written` alone.
    """
    with poisoned_empty(), checked(mutated=written) as seen, random_order(seed):
        got = call()
    assert seen == [*launched]
    return got
