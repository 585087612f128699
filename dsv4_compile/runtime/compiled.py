"""Captures of compiled functions: `options={"dsv4.cudagraph": "full"}`.

The first call of a shape runs compiled, the second runs compiled on the capture stream, the third is captured; all
further ones replay. Parameters, marked tensors, what the graph writes, and all views of their memory are used in place;
the other inputs are copied to where the capture reads them. Outputs are copies that the caller may keep, except for
those that lie in an input: they are views of it.

with dsv4_compile.runtime.counting() as counts:
    model.generate(...)
print(counts)  # Counts(captures=1, replays=61, compiled=3)
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import progress
from .._compat import copy_all, lie_at
from ..errors import fail, warn
from ..options import MAX_CAPTURE_BYTES
from .addresses import TensorRecord, compared
from .aliasing import GraphOutputs, owner, without_repeats
from .capture_budget import Evictable
from .captured_call import NEVER, WAITS, CapturedCall
from .captures import Graphs, check_not_capturing, tensor_bytes
from .start_times import spending
from .warmup import is_late

_log = logging.getLogger("dsv4_compile.runtime")
_MAX_LOST = 8
"""Shapes in a row that lost their in-place inputs before the third call, until that is reported."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits on the calls that are captured.

    Attributes:
        max_captures: shapes of one graph that are captured; further ones run compiled (W601).
        max_bytes: memory that all captures of the device may hold, see `capture_budget`.
        max_tokens: calls of more tokens run compiled, unless they are `in_bucket`: lengths that do not repeat.
        debug: compare all addresses at each replay, not at the first alone.
        strict: a call that is captured, or counts for it, after warm-up raises E430.
    """

    max_captures: int = 64
    max_bytes: int = MAX_CAPTURE_BYTES
    max_tokens: int = 512
    debug: bool = False
    strict: bool = False


@dataclass(slots=True)
class Counts:
    """Captures, replays, calls that ran compiled, and evicted captures, of graphs with `dsv4.cudagraph="full"`."""

    captures: int = 0
    replays: int = 0
    compiled: int = 0
    evictions: int = 0


in_bucket: ContextVar[bool] = ContextVar("dsv4_in_bucket", default=False)
"""Whether the caller pads to a few sizes, so that calls above `Policy.max_tokens` are captured too."""
_replays = itertools.count(1)
_counters: ContextVar[tuple[Counts, ...]] = ContextVar("dsv4_counts", default=())


@contextmanager
def counting() -> Iterator[Counts]:
    """Count captures and replays of compiled graphs inside the block."""
    counts = Counts()
    token = _counters.set((*_counters.get(), counts))
    try:
        yield counts
    finally:
        _counters.reset(token)


def _count(what: str, number: int = 1) -> None:
    for counts in _counters.get():
        setattr(counts, what, getattr(counts, what) + number)


class CapturedGraph:
    """A compiled graph, called as Dynamo calls it, that captures and replays itself.

    Args:
        compiled: takes the graph's inputs: tensors, and integers for sizes that vary.
        names: names of the inputs.
        in_place: positions of the inputs that keep their address.
        graphs: where captures live.
        policy: which calls are captured.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        names: Sequence[str],
        in_place: frozenset[int],
        graphs: Graphs,
        policy: Policy,
    ) -> None:
        self._compiled, self._names, self._graphs, self._policy = compiled, tuple(names), graphs, policy
        self._in_place = tuple(sorted(in_place))
        self._copied = tuple(i for i in range(len(self._names)) if i not in in_place)
        # From two positions on, itemgetter returns a tuple.
        self._pick = operator.itemgetter(*self._in_place) if len(self._in_place) > 1 else self._pick_few
        self._entries: dict[Any, list[CapturedCall]] = {}
        self._reported: set[str] = set()
        self._lost: list[str] = []  # names of inputs that were freed before their shape was captured

    def _pick_few(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(args[i] for i in self._in_place)

    def __call__(self, *args: Any) -> Any:
        """Run the graph on `args`, by replay if their shape has been captured."""
        check_not_capturing('a graph compiled with dsv4.cudagraph="full"')
        with self._graphs.lock:
            entry = self._entry_of(args)
            if entry is not None:
                if entry.capture is None and self._policy.strict and entry.waits < NEVER and is_late():
                    self._fail_late(entry)
                entry.calls += 1
            if entry is not None and entry.calls > 1:
                self._graphs.follow()
                return self._warm_up_or_replay(entry, args)
        _count("compiled")
        return self._compiled(*args)

    def _fail_late(self, entry: CapturedCall) -> NoReturn:
        """Raise E430 for a call that warm-up has not captured, with its difference from those."""
        others = [
            captured for entries in self._entries.values() for captured in entries if captured.capture is not None
        ]
        same = next((captured for captured in others if captured.where == entry.where), None)
        if same is not None:
            pairs = zip(same.records, entry.records, strict=True)
            moved = ", ".join(now.name for before, now in pairs if before != now)
            why = f"it was captured with other memory for {moved}"
        elif entry.waits > WAITS:
            why = f"its capture was evicted, to keep captures within {self._policy.max_bytes:,} bytes"
        elif entry.calls:
            why = f"warm-up made {entry.calls} of the 3 calls of this shape that a capture takes"
        else:
            why = f"warm-up captured {', '.join(sorted({captured.where for captured in others})) or 'nothing'}"
        if not entry.calls:
            self._remove(entry)  # nothing has run, and warm-up may make its calls later
        fail("E430", got=f"capture {entry.where}", why=why)

    def _warm_up_or_replay(self, entry: CapturedCall, args: tuple[Any, ...]) -> Any:
        """Run a second or later call of `entry`, in the only thread that uses the captures."""
        if entry.capture is None and (entry.calls <= entry.waits or not self._capture(entry, args)):
            _count("compiled")
            results = self._graphs.warm_up(lambda: self._compiled(*args))
            if entry.calls == WAITS:
                entry.output_bytes = _new_bytes(results, args)
            return results
        return self._replay(entry, args)

    def _entry_of(self, args: tuple[Any, ...]) -> CapturedCall | None:
        """Return the entry of these inputs, a new one if there is room, or None for a call that stays compiled."""
        copied = [args[i] for i in self._copied]
        key = tuple((a.shape, a.stride(), a.dtype) if isinstance(a, Tensor) else a for a in copied)
        known = self._entries.get(key, ())
        for entry in known:
            if entry.compared is not None and not self._policy.debug and self._has_same_others(entry, args):
                return entry
        if not known and not self._is_small(copied):
            return None
        in_place = list(self._pick(args))
        ids = tuple(map(id, in_place))
        for entry in known:
            if entry.ids == ids and (entry.capture is None or self._policy.debug or _lies_still(entry, in_place)):
                return entry  # before its capture it may move, and in debug mode `_replay` says what has moved
        records = self._records_of(in_place)
        for entry in known:
            if entry.records == records:
                self._remember(entry, in_place)  # other tensor objects at the same addresses
                return entry
        return self._admit(key, in_place, records, copied)

    def _has_same_others(self, entry: CapturedCall, args: tuple[Any, ...]) -> bool:
        """Return whether a call has the in-place tensors of `entry`.

        The caller of a graph compares its model and cache. Where both have what they had, so do the inputs that come
        from them, and the others alone are looked at.
        """
        if entry.compared != compared.get():
            return False
        others = [args[self._in_place[i]] for i in entry.others]
        same = all(id(tensor) == entry.ids[i] for tensor, i in zip(others, entry.others, strict=True))
        return same and lie_at(others, [entry.addresses[i] for i in entry.others])

    def _remember(self, entry: CapturedCall, in_place: list[Tensor]) -> None:
        """Recognise `entry` by these tensor objects, and drop it when one of their owners is freed.

        Views may be freed while their owner lives; the next ones are recognised by their address.
        """

        def forget_ids(_: Any) -> None:
            entry.ids, entry.compared = (), None  # a new tensor may get the id

        names, owners = (self._names[i] for i in self._in_place), [owner(tensor) for tensor in in_place]
        entry.ids, entry.addresses = tuple(map(id, in_place)), list(map(Tensor.data_ptr, in_place))
        entry.compared = None
        entry.references = (
            *(weakref.ref(o, functools.partial(self._drop, entry, n)) for o, n in zip(owners, names, strict=True)),
            *(weakref.ref(t, forget_ids) for t, o in zip(in_place, owners, strict=True) if o is not t),
        )

    def _drop(self, entry: CapturedCall, name: str, _: Any) -> None:
        # A callback, in whatever thread frees the tensor.
        if self._remove(entry) and entry.capture is None and len(self._lost) < _MAX_LOST:
            self._lost.append(name)

    def _remove(self, entry: CapturedCall) -> bool:
        """Forget an entry, and return whether it was known."""
        holders = [entries for entries in tuple(self._entries.values()) if entry in entries]
        for entries in holders:
            entries.remove(entry)
        entry.references = ()  # their callbacks hold the entry, which would wait for the garbage collector
        return bool(holders)

    def _records_of(self, in_place: Sequence[Tensor]) -> tuple[TensorRecord, ...]:
        names = (self._names[i] for i in self._in_place)
        return tuple(TensorRecord.of(name, tensor) for name, tensor in zip(names, in_place, strict=True))

    def _admit(
        self, key: Any, in_place: list[Tensor], records: tuple[TensorRecord, ...], copied: list[Any]
    ) -> CapturedCall | None:
        tensors = [*in_place, *(x for x in copied if isinstance(x, Tensor))]
        elsewhere = next((t.device for t in tensors if t.device.type != self._graphs.device.type), None)
        if elsewhere is not None:
            self._warn("device", f"a graph on {self._graphs.device} with an input on {elsewhere}")
            return None
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            self._warn("grad", "a graph called with gradients enabled; wrap the call in torch.no_grad()")
            return None
        if len(self._lost) >= _MAX_LOST:
            got = f"a graph that has {', '.join(sorted(set(self._lost)))} by address, a different tensor in every call"
            self._warn("lost", got, "keep one tensor and copy_ into it, or let the graph write to a separate tensor")
        if sum(map(len, self._entries.values())) >= self._policy.max_captures:
            self._warn("full", f"another shape after dsv4.cudagraph.max_captures={self._policy.max_captures}")
            return None
        where = f"the graph of {', '.join(str(tuple(x.shape)) for x in copied if isinstance(x, Tensor)) or 'no input'}"
        entry = CapturedCall(records, where)
        self._remember(entry, in_place)
        self._entries.setdefault(key, []).append(entry)
        return entry

    def _is_small(self, copied: Sequence[Any]) -> bool:
        """Return whether a call has as few tokens as are captured. Asked first: it is all that most prompts need."""
        if in_bucket.get():
            return True
        tokens, most = tokens_of(copied), self._policy.max_tokens
        if tokens > most and "size" not in self._reported:
            self._reported.add("size")
            limit = f"dsv4.cudagraph.max_tokens={most}"
            _log.info("runs compiled, without a graph: %s tokens a call, above %s", tokens, limit)
        return tokens <= most

    def _warn(self, reason: str, got: str, fix: str = "") -> None:
        if reason not in self._reported:
            self._reported.add(reason)
            warn("W601", got=got, fix=fix)

    def _capture(self, entry: CapturedCall, args: tuple[Any, ...]) -> bool:
        """Capture a call, and return whether it fits into the bytes that captures may hold."""
        captured_args: list[Any] = list(args)
        # Recorded again: a first call may have moved weights.
        entry.records = self._records_of([args[i] for i in self._in_place])
        entry.addresses = [record.address for record in entry.records]
        limit, budget = self._policy.max_bytes, self._graphs.budget
        entry.input_bytes = sum(args[i].nbytes for i in self._copied if isinstance(args[i], Tensor))
        if (alone := entry.output_bytes + entry.input_bytes) > limit:
            return self._refuse(entry, alone)
        with spending("capture"), progress.stage("capture", total=1) as work:
            work.note(entry.where)
            self._evict(budget.to_evict(alone, limit), entry, work)
            with torch.inference_mode(False):
                # No inference tensors, whatever the mode of this call: later calls write them in other modes.
                for i in self._copied:
                    if isinstance(args[i], Tensor):
                        like = args[i]
                        captured_args[i] = torch.empty_strided(
                            like.shape, like.stride(), dtype=like.dtype, device=like.device
                        )
            entry.copies = tuple(without_repeats(captured_args[i]) for i in self._copied if isinstance(args[i], Tensor))
            self._copy_inputs(entry, args)
            captured = self._graphs.capture(lambda: self._compiled(*captured_args), entry.where)
            entry.outputs = GraphOutputs(captured.outputs, captured_args)
            entry.output_bytes = entry.outputs.nbytes
            entry.capture = replace(captured, outputs=())  # a view of a cache would keep it alive
            del captured
            pool = self._graphs.memory()
            alone = max(budget.grown_by(pool), entry.output_bytes) + entry.input_bytes
            budget.add(entry, pool)
            self._evict(budget.to_evict(0, limit, keep=entry) if alone <= limit else [], entry, work)
            work.advance()
        self._lost.clear()
        _count("captures")
        return alone <= limit or self._refuse(entry, alone)

    def _refuse(self, entry: CapturedCall, nbytes: int) -> bool:
        """Let a shape whose capture holds `nbytes` run compiled from now on, and return False."""
        self._warn("bytes", f"a capture of {nbytes:,} bytes, {entry.where}, for at most {self._policy.max_bytes:,}")
        self._graphs.budget.evict([entry])
        entry.waits = NEVER
        return False

    def _evict(self, captures: list[Evictable], entry: CapturedCall, work: progress.Stage) -> None:
        """Free captures to make room for that of `entry`, and say so."""
        if not captures:
            return
        work.note(f"{entry.where}, in place of {len(captures)} captures")
        limit = self._policy.max_bytes
        self._warn("evicted", f"captures of more than {limit:,} bytes: the least recently used are evicted")
        self._graphs.wait()
        self._graphs.budget.evict(captures)
        _count("evictions", len(captures))

    def _replay(self, entry: CapturedCall, args: tuple[Any, ...]) -> list[Any]:
        assert entry.capture is not None and entry.outputs is not None
        self._copy_inputs(entry, args)
        if self._policy.debug or not entry.checked:
            for record, i in zip(entry.records, self._in_place, strict=True):
                record.check(args[i], entry.where)
            entry.checked = True
        entry.capture.replay()
        entry.replayed = next(_replays)
        _count("replays")
        return entry.outputs.for_call(args)

    def _copy_inputs(self, entry: CapturedCall, args: tuple[Any, ...]) -> None:
        if entry.copies:
            copy_all(entry.copies, [without_repeats(args[i]) for i in self._copied if isinstance(args[i], Tensor)])


def _new_bytes(results: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes of the results of a call that do not lie in its arguments."""
    known = {owner(arg).untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
    return tensor_bytes([r for r in results if isinstance(r, Tensor) and r.untyped_storage().data_ptr() not in known])


def _lies_still(entry: CapturedCall, in_place: list[Tensor]) -> bool:
    """Return whether the in-place tensors of a captured entry, the same objects, are where its graph reads them."""
    if not lie_at(in_place, entry.addresses):
        return False
    if now := compared.get():
        entry.compared = now
        entry.others = tuple(i for i, tensor in enumerate(in_place) if not any(id(tensor) in held.ids for held in now))
    return True


def tokens_of(inputs: Sequence[Any]) -> int:
    """Return the tokens of a call: the most int64 ids, float vectors, or rows of other dtypes in one input."""

    def count_of(x: Tensor) -> int:
        if x.dtype is torch.int64:
            return x.numel()
        return math.prod(x.shape[:-1]) if x.is_floating_point() else (x.shape[0] if x.dim() else 1)

    return max((count_of(x) for x in inputs if isinstance(x, Tensor)), default=1)
