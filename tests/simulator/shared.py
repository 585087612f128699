"""Stand-in for kernels/indexer/histogram.py in Triton's interpreter, which has no threads and no shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton.language as tl

from dsv4_compile._compat import triton_interpreter
from dsv4_compile.kernels.host.gpu import Gpu
from dsv4_compile.kernels.indexer import histogram, radix_select, select_groups, select_topk


class SimulatedShared:
    """The functions of the module by name. Programs run one after the other, and each leaves it empty."""

    def __init__(self) -> None:
        self.counts: Any = None
        self.passes, self.lists = 0, 0
        """Number of counting passes, and of boundary bins with few keys."""

    def reserve_counters(self, bins: Any, native: Any) -> Any:
        """Return an address that is not used."""
        assert self.counts is None
        return tl.zeros((), tl.int32)

    def count_bins(self, at: Any, number: Any) -> None:
        """Count numbers; negative ones are ignored."""
        values = number.handle.data.ravel()
        values = values[values >= 0]
        self.counts = values if self.counts is None else np.concatenate((self.counts, values))

    def count_all(self, at: Any, number: Any, counters: Any) -> None:
        """Count numbers; negative ones are ignored."""
        self.count_bins(at, number)

    def block_extent(self, at: Any, low: Any, high: Any, again: Any, counters: Any) -> tuple[Any, Any]:
        """Return the extent over all threads."""
        return tl.min(low), tl.max(high)

    def take_counts(self, at: Any, counters: Any) -> tuple[Any, ...]:
        """Return a tensor for each member of a group."""
        count, group = tl.core._unwrap_if_constexpr(counters), histogram.GROUP.value
        assert (self.counts < count).all()
        self.passes += 1
        number = np.bincount(self.counts, minlength=count).astype(np.int32).reshape(-1, group)
        self.counts = None
        zero = tl.zeros((len(number),), tl.int32)
        return tuple(zero + _tensor(number[:, i]) for i in range(group))

    def read_one(self, at: Any, first: Any, second: Any, third: Any, here: Any, *sizes: Any) -> tuple[Any, ...]:
        """Return the values where `here` is set, which is exactly one place."""
        assert here.handle.data.sum() == 1
        return tuple(tl.sum(tl.where(here, x, 0)) for x in (first, second, third))

    def nth_largest(self, at: Any, key: Any, mask: Any, number: Any, n: Any, counters: Any) -> tuple[Any, ...]:
        """Return the nth key of few, by sorting."""
        self.lists += 1
        few = key.handle.data[mask.handle.data]
        assert len(few) == number.handle.data <= histogram.LISTED.value
        nth = np.sort(few)[-int(n.handle.data.item())]
        counts = nth, (few > nth).sum(), (few == nth).sum()
        return tuple(tl.full((), int(x), tl.int32) for x in counts)

    def store_in_place(self, pointers: Any, values: Any, mask: Any, native: Any) -> None:
        """Store as `tl.store`."""
        tl.store(pointers, values, mask=mask)


def _tensor(data: np.ndarray[Any, Any]) -> Any:
    return tl.core.tensor(
        triton_interpreter.TensorHandle(np.ascontiguousarray(data), tl.int32), tl.block_type(tl.int32, list(data.shape))
    )


@pytest.fixture
def simulated_shared(monkeypatch: pytest.MonkeyPatch) -> SimulatedShared:
    """Let launchers see an sm_90 GPU, and kernels use the stand-in for its shared memory."""
    simulated = SimulatedShared()
    for module in (radix_select, select_groups, select_topk):
        for name in dir(SimulatedShared):
            if not name.startswith("_") and hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(simulated, name))
        if hasattr(module, "gpu_of"):
            monkeypatch.setattr(module, "gpu_of", lambda device: Gpu("cuda", 90, 132))
    return simulated
