"""Emulation of CUDA graphs on a CPU, so that their rules can be tested without a GPU.

A capture records every op that reaches torch's dispatcher, with the tensors and Python values it got, and undoes what
they wrote. A replay runs the ops again on the same memory and copies the new results to where the first ones are. So,
as on a GPU, host values are frozen, an input that moved is not followed, and a stale row is read.

C++ code that Inductor generated does not pass through the dispatcher. Graphs of `backend="dsv4"` are recorded whole;
those of other backends raise E422.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._compat import OpOverload, functional_collectives, pytree
from ..errors import check, fail
from ..metadata.fixed import AtFixedAddresses
from .aliasing import byte_range, owner, view_at, without_repeats
from .capture_budget import CaptureBudget
from .captures import Call, Capture, Footprint, TransparentMode, capture_scope, fail_host_read, tensor_bytes

_HOST_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_COLLECTIVES = "_c10d_functional"
"""Namespace of collectives, which return before their results are there."""
_recorder: ContextVar[Recorder | None] = ContextVar("dsv4_recorder", default=None)


@dataclass(frozen=True, slots=True)
class _RecordedCall:
    """One recorded call, its arguments as aliases of the caller's tensors, and the tensors it made."""

    call: Callable[..., Any]
    args: Any
    kwargs: Any
    new_tensors: dict[int, Tensor]


class StandInGraphs(AtFixedAddresses):
    """Captures that replay on the CPU."""

    kind = "standin"
    device = torch.device("cpu")

    def __init__(self) -> None:
        self._live = self._held = 0
        self.lock, self.budget = threading.RLock(), CaptureBudget()

    def wait(self) -> None:
        """Do nothing: a replay has ended when it returns."""

    def follow(self) -> None:
        """Do nothing: a CPU has no streams."""

    def warm_up(self, call: Call) -> Any:
        """Run `call`."""
        return call()

    def measure(self, call: Call) -> Footprint:
        """Return the bytes that a capture of `call` would hold: the stand-in shares no memory between captures."""
        recorder = Recorder("a measurement")
        with recorder.recording():
            outputs = call()
        return Footprint(recorder.allocated, tensor_bytes(outputs))

    def capture(self, call: Call, what: str) -> Capture:
        """Record `call`, and undo what it wrote."""
        recorder = Recorder(what)
        with capture_scope(what):
            try:
                with recorder.recording():
                    outputs = call()
            finally:
                recorder.undo()
        check(bool(recorder.calls), "E423", got=f"{what} ran no op on a tensor")
        recorder.check_outputs(outputs)
        if not self._live:
            self._held = 0  # a new pool
        self._live += recorder.allocated
        self._held = max(self._held, self._live)
        weakref.finalize(recorder, self._free, recorder.allocated)
        return Capture(outputs, recorder.replay, what)

    def _free(self, nbytes: int) -> None:
        self._live -= nbytes

    def memory(self) -> int:
        """Return the most bytes of recorded results so far: as CUDA's, the pool keeps those of freed captures."""
        return self._held

    def predict(self, footprints: Sequence[Footprint]) -> int:
        """Return the sum: captures share no memory here."""
        return sum(footprint.peak for footprint in footprints)


class Recorder(TransparentMode):
    """Dispatch mode that records ops in the order they run: record and undo once, then replay any number of times."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.calls: list[_RecordedCall] = []
        self.allocated = 0
        self._own: set[int] = set()  # addresses of storages made while recording
        self._saved: dict[tuple[int, int], tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._outside: dict[int, torch.UntypedStorage] = {}
        self._inside_call = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs in the block, with compiled graphs of this package as one call each."""
        token = _recorder.set(self)
        try:
            with self:
                yield
        finally:
            _recorder.reset(token)

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and record it unless it runs inside a recorded call."""
        kwargs = kwargs or {}
        if self._inside_call:
            return func(*args, **kwargs)
        if _reads_device(func, args):
            fail_host_read(self.what, str(func))
        returns, arguments = func._schema.returns, func._schema.arguments
        written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        named = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        self._save(pytree.tree_leaves([named[name] for name in written if name in named]))
        out = func(*args, **kwargs)
        if not written and any(r.alias_info is not None for r in returns):
            return out  # a view: its address follows from its base, so a replay has nothing to do
        self._add(func, args, kwargs, out)
        return out

    def call(self, compiled: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a compiled graph as one recorded call. It may write any of its inputs."""
        self._inside_call = True  # its ops, and those below, are not recorded too
        try:
            self._save(args)
            out = compiled(*args)
            self._add(compiled, args, {}, out)
        finally:
            self._inside_call = False
        return out

    def _add(self, call: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> None:
        inputs = {t.untyped_storage().data_ptr(): t for t in _tensors((args, kwargs))}
        self._outside |= {a: t.untyped_storage() for a, t in inputs.items() if a not in self._own}
        new_tensors: dict[int, Tensor] = {}
        for index, leaf in enumerate(pytree.tree_leaves(out)):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in inputs:
                new_tensors[index] = leaf
                self._own.add(leaf.untyped_storage().data_ptr())
                self.allocated += leaf.untyped_storage().nbytes()
        self.calls.append(_RecordedCall(call, *_aliased(args, kwargs), new_tensors))

    def _save(self, written: Any) -> None:
        for tensor in _tensors(written):
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            memory = address, storage.nbytes()
            if address not in self._own and memory not in self._saved:
                self._saved[memory] = storage, storage.clone()

    def undo(self) -> None:
        """Restore memory that the recorded ops wrote and did not allocate: a capture executes nothing."""
        for storage, before in reversed(self._saved.values()):  # two storages may share memory
            storage.copy_(before)
        self._saved.clear()

    def check_outputs(self, outputs: Any) -> None:
        """Raise E422 for an output that no recorded op made or got: code outside of the dispatcher made it."""
        seen = self._own | {t.untyped_storage().data_ptr() for recorded in self.calls for t in _tensors(recorded.args)}
        for tensor in _tensors(outputs):
            check(
                tensor.untyped_storage().data_ptr() in seen,
                "E422",
                got=f"{self.what}: an output of shape {tuple(tensor.shape)} that no recorded op made",
                why="C++ code of a different backend does not pass through torch's dispatcher",
                fix='on a CPU compile the step with backend="dsv4" or "eager", or leave it uncompiled',
            )

    @torch.inference_mode()
    def replay(self) -> None:
        """Run everything again. Raise E421 if recorded memory was freed or resized since the capture."""
        for address, storage in self._outside.items():
            now = storage.data_ptr()
            if now != address:
                fail(
                    "E421",
                    got=f"{self.what}: memory of {storage.nbytes()} bytes at {address:#x} moved to {now:#x}",
                    why="a tensor that the step uses was resized or freed",
                )
        for recorded in self.calls:
            leaves = pytree.tree_leaves(recorded.call(*recorded.args, **recorded.kwargs))
            collective = getattr(recorded.call, "namespace", "") == _COLLECTIVES
            for index, recorded_tensor in recorded.new_tensors.items():
                # The recorded wait is for the first result, not for this one.
                leaf = functional_collectives.wait_tensor(leaves[index]) if collective else leaves[index]
                without_repeats(recorded_tensor).copy_(without_repeats(leaf))


def _aliased(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return `args` and `kwargs` with other tensors for the same memory, so that the capture keeps no caller's tensor.

    Views of one tensor stay views of one: AOTAutograd's code looks at the bases of its arguments at each call.
    """
    owners: dict[int, Tensor] = {}

    def alias(tensor: Tensor) -> Tensor:
        base = owner(tensor)
        detached = owners.setdefault(id(base), base.detach())
        if base is tensor:
            return detached
        return view_at(detached, byte_range(tensor)[0], tensor.dtype, tensor.shape, tensor.stride())

    aliased: tuple[Any, Any] = pytree.tree_map_only(Tensor, alias, (args, kwargs))
    return aliased


def _reads_device(func: OpOverload, args: Any) -> bool:
    """Return whether the host must know values to run `func`: a number, or the size of its result."""
    if func is torch.ops.aten.index.Tensor:  # tagged because of masks
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return any(tag in func.tags for tag in _HOST_TAGS)


def recordable(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `compiled`, so that the stand-in records it as one call."""

    def run(*args: Any) -> Any:
        recorder = _recorder.get()
        return compiled(*args) if recorder is None else recorder.call(compiled, args)

    return run


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
