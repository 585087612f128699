"""What kernels/indexer/histogram.py does, for Triton's interpreter, which knows neither threads nor their shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton.language as tl

from dsv4_compile._compat import triton_interpreter
from dsv4_compile.kernels.host.gpu import Gpu
from dsv4_compile.kernels.indexer import histogram as shared_counts
from dsv4_compile.kernels.indexer import radix_select as topk_boundary
from dsv4_compile.kernels.indexer import select_topk


class SimulatedShared:
    """The functions of the module under their names. Programs run one after the other, and each leaves nothing."""

    def __init__(self) -> None:
        self.counts: Any = None
        self.passes, self.lists = 0, 0
        """How often keys were counted, and how often the bin of the boundary held few."""

    def counters(self, bins: Any, native: Any) -> Any:
        """The address is of no use."""
        assert self.counts is None
        return tl.zeros((), tl.int32)

    def add(self, at: Any, number: Any) -> None:
        """Negative numbers are left out."""
        values = number.handle.data.ravel()
        values = values[values >= 0]
        self.counts = values if self.counts is None else np.concatenate((self.counts, values))

    def extent(self, at: Any, low: Any, high: Any, again: Any, counters: Any) -> tuple[Any, Any]:
        """Of all threads."""
        return tl.min(low), tl.max(high)

    def take(self, at: Any, counters: Any) -> tuple[Any, ...]:
        """A tensor for each member of a group."""
        count, group = tl.core._unwrap_if_constexpr(counters), shared_counts.GROUP.value
        assert (self.counts < count).all()
        self.passes += 1
        number = np.bincount(self.counts, minlength=count).astype(np.int32).reshape(-1, group)
        self.counts = None
        zero = tl.zeros((len(number),), tl.int32)
        return tuple(zero + _tensor(number[:, i]) for i in range(group))

    def only(self, at: Any, first: Any, second: Any, third: Any, here: Any, *sizes: Any) -> tuple[Any, ...]:
        """There is exactly one."""
        assert here.handle.data.sum() == 1
        return tuple(tl.sum(tl.where(here, x, 0)) for x in (first, second, third))

    def nth_of_few(self, at: Any, key: Any, mask: Any, number: Any, n: Any, counters: Any) -> tuple[Any, ...]:
        """Counted one by one."""
        self.lists += 1
        few = key.handle.data[mask.handle.data]
        assert len(few) == number.handle.data <= shared_counts.LISTED.value
        nth = np.sort(few)[-int(n.handle.data.item())]
        found = nth, (few > nth).sum(), (few == nth).sum()
        return tuple(tl.full((), int(x), tl.int32) for x in found)

    def store(self, pointers: Any, values: Any, mask: Any, native: Any) -> None:
        """As `tl.store` does."""
        tl.store(pointers, values, mask=mask)


def _tensor(data: np.ndarray[Any, Any]) -> Any:
    return tl.core.tensor(
        triton_interpreter.TensorHandle(np.ascontiguousarray(data), tl.int32), tl.block_type(tl.int32, list(data.shape))
    )


@pytest.fixture
def simulated_shared(monkeypatch: pytest.MonkeyPatch) -> SimulatedShared:
    """Launchers believe in a Hopper GPU, and the kernels use what stands in for its shared memory."""
    simulated = SimulatedShared()
    for module in (topk_boundary, select_topk):
        for name in dir(SimulatedShared):
            if not name.startswith("_") and hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(simulated, name))
    monkeypatch.setattr(select_topk, "gpu_of", lambda device: Gpu("cuda", 90, 132))
    return simulated
