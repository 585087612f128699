"""Graph capture of what torch.compile made: `options={"dsv4.cudagraph": "full"}`.

A shape runs compiled when it first comes, once more where captures run, and is captured at its third call; from then
on it is replayed. Parameters, marked tensors and what the graph writes, and all views of their memory, are taken where
they are; the other inputs are copied to where the capture reads them. Results are copies, which the caller may keep,
except for those that lie in an input: they are views of it.
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import progress
from ..errors import warn
from .aliasing import distinct, owner
from .counts import count
from .graph_outputs import GraphOutputs
from .graphs import Capture, Graphs, refuse_capture
from .static_inputs import Record

_log = logging.getLogger("dsv4_compile.runtime")
_PATIENCE = 8
"""Shapes in a row whose static inputs were gone before the third call, after which that is reported."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Which calls are captured.

    Attributes:
        max_captures: shapes of one graph that are captured; further ones run compiled (W601).
        max_tokens: calls of more tokens run compiled: they keep the device busy without a graph.
        debug: compare all addresses at each replay, not at the first alone.
    """

    max_captures: int = 32
    max_tokens: int = 512
    debug: bool = False


@dataclass(slots=True, eq=False)
class _Shape:
    """One shape of the copied inputs, at one set of addresses of the static ones, which it does not keep alive."""

    records: tuple[Record, ...]
    where: str
    static: tuple[int, ...] = ()
    alive: tuple[weakref.ref[Tensor], ...] = ()
    calls: int = 0
    copies: tuple[Tensor, ...] = ()
    capture: Capture | None = None
    outputs: GraphOutputs | None = None
    checked: bool = False


class CapturedGraph:
    """A compiled graph, called as Dynamo calls it, that replays captures of itself.

    Args:
        compiled: takes the graph's inputs: tensors, and integers for sizes that vary.
        names: of the inputs. static: positions of those that keep their address.
        graphs: where captures live; policy: which calls are captured.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        names: Sequence[str],
        static: frozenset[int],
        graphs: Graphs,
        policy: Policy,
    ) -> None:
        self._compiled, self._names, self._graphs, self._policy = compiled, tuple(names), graphs, policy
        self._static = tuple(sorted(static))
        self._moving = tuple(i for i in range(len(self._names)) if i not in static)
        self._shapes: dict[Any, list[_Shape]] = {}
        self._told: set[str] = set()
        self._gone: list[str] = []  # names of inputs that went before their shape was captured

    def __call__(self, *args: Any) -> Any:
        """Run the graph on `args`, by replay where their shape has been captured."""
        refuse_capture('a graph compiled with dsv4.cudagraph="full"')
        shape = self._shape_of(args)
        if shape is None:
            count("compiled")
            return self._compiled(*args)
        if shape.capture is None:
            shape.calls += 1
            if shape.calls < 3:
                count("compiled")
                run = self._graphs.warm_up if shape.calls == 2 else _run
                return run(lambda: self._compiled(*args))
            self._capture(shape, args)
        return self._replay(shape, args)

    def _shape_of(self, args: tuple[Any, ...]) -> _Shape | None:
        """The entry of these inputs, a new one if there is room, or None for a call that stays compiled."""
        static = tuple(args[i] for i in self._static)
        moving = [args[i] for i in self._moving]
        key = tuple((a.shape, a.stride(), a.dtype) if isinstance(a, Tensor) else a for a in moving)
        known = self._shapes.get(key, ())
        ids = tuple(map(id, static))
        for shape in known:
            if shape.static == ids:
                return shape
        records = self._records_of(static)
        for shape in known:
            if shape.records == records:
                self._remember(shape, static)  # other tensor objects at the same places
                return shape
        return self._admit(key, static, records, moving)

    def _remember(self, shape: _Shape, static: tuple[Tensor, ...]) -> None:
        """Know `shape` by these tensors, and drop it with the first of them: a cache must not live for its graph.

        Views may come and go, as long as what they are views of stays; the next ones are known by where they lie.
        """

        def unknow(_: Any) -> None:
            shape.static = ()  # another tensor may get the id

        names, owners = (self._names[i] for i in self._static), [owner(tensor) for tensor in static]
        shape.static = tuple(map(id, static))
        shape.alive = (
            *(weakref.ref(o, functools.partial(self._forget, shape, n)) for o, n in zip(owners, names, strict=True)),
            *(weakref.ref(t, unknow) for t, o in zip(static, owners, strict=True) if o is not t),
        )

    def _forget(self, shape: _Shape, name: str, _: Any) -> None:
        for shapes in self._shapes.values():
            if shape in shapes:
                shapes.remove(shape)
                if shape.capture is None and len(self._gone) < _PATIENCE:
                    self._gone.append(name)
        shape.alive = ()  # they hold the shape, which would wait for the garbage collector

    def _records_of(self, static: tuple[Tensor, ...]) -> tuple[Record, ...]:
        names = (self._names[i] for i in self._static)
        return tuple(Record.of(name, tensor) for name, tensor in zip(names, static, strict=True))

    def _admit(self, key: Any, static: tuple[Tensor, ...], records: tuple[Record, ...], moving: list[Any]) -> Any:
        tokens = tokens_of(moving)
        if tokens > self._policy.max_tokens:
            self._tell_log("size", f"{tokens} tokens a call, above dsv4.cudagraph.max_tokens={self._policy.max_tokens}")
            return None
        tensors = [*static, *(m for m in moving if isinstance(m, Tensor))]
        away = next((t.device for t in tensors if t.device.type != self._graphs.device.type), None)
        if away is not None:
            return self._tell("device", f"a graph on {self._graphs.device} with an input on {away}")
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return self._tell("grad", "a graph called with gradients enabled; wrap the call in torch.no_grad()")
        if len(self._gone) >= _PATIENCE:
            got = f"a graph that has {', '.join(sorted(set(self._gone)))} by address, another tensor at every call"
            self._tell("gone", got, "keep one tensor and copy_ into it, or let the graph write to a tensor of its own")
        if sum(map(len, self._shapes.values())) >= self._policy.max_captures:
            return self._tell("full", f"another shape after dsv4.cudagraph.max_captures={self._policy.max_captures}")
        where = f"the graph of {', '.join(str(tuple(m.shape)) for m in moving if isinstance(m, Tensor)) or 'no input'}"
        shape = _Shape(records, where)
        self._remember(shape, static)
        self._shapes.setdefault(key, []).append(shape)
        return shape

    def _tell(self, reason: str, got: str, fix: str = "") -> None:
        if reason not in self._told:
            self._told.add(reason)
            warn("W601", got=got, fix=fix)

    def _tell_log(self, reason: str, got: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            _log.info("runs compiled, without a graph: %s", got)

    def _capture(self, shape: _Shape, args: tuple[Any, ...]) -> None:
        frozen: list[Any] = list(args)
        # Where things are now; a first call may have moved weights.
        shape.records = self._records_of(tuple(args[i] for i in self._static))
        with torch.inference_mode(False):
            # Not an inference tensor, whatever the mode of this call: later calls write it in theirs.
            for i in self._moving:
                if isinstance(args[i], Tensor):
                    like = args[i]
                    frozen[i] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        shape.copies = tuple(distinct(frozen[i]) for i in self._moving if isinstance(args[i], Tensor))
        self._copy_inputs(shape, args)
        with progress.stage("capture", total=1) as work:
            work.note(shape.where)
            captured = self._graphs.capture(lambda: self._compiled(*frozen), shape.where)
            work.advance()
        shape.outputs = GraphOutputs(captured.outputs, frozen)
        shape.capture = replace(captured, outputs=())  # a view of a cache would keep it alive
        self._gone.clear()
        count("captures")

    def _replay(self, shape: _Shape, args: tuple[Any, ...]) -> list[Any]:
        assert shape.capture is not None and shape.outputs is not None
        self._copy_inputs(shape, args)
        if self._policy.debug or not shape.checked:
            for record, i in zip(shape.records, self._static, strict=True):
                record.check(args[i], shape.where)
            shape.checked = True
        shape.capture.replay()
        count("replays")
        return shape.outputs.of(args)

    def _copy_inputs(self, shape: _Shape, args: tuple[Any, ...]) -> None:
        moving = (args[i] for i in self._moving if isinstance(args[i], Tensor))
        for copy, arg in zip(shape.copies, moving, strict=True):
            copy.copy_(distinct(arg))


def tokens_of(moving: Sequence[Any]) -> int:
    """Tokens of a call: what the largest input counts, in int64 elements (ids), float vectors, or rows of the rest."""

    def count_of(x: Tensor) -> int:
        if x.dtype is torch.int64:
            return x.numel()
        return math.prod(x.shape[:-1]) if x.is_floating_point() else (x.shape[0] if x.dim() else 1)

    return max((count_of(m) for m in moving if isinstance(m, Tensor)), default=1)


def _run(call: Callable[[], Any]) -> Any:
    return call()
