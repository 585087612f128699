"""A stand-in for CUDA graphs on a CPU, so that their rules can be tested without a GPU.

A capture writes down every op that reaches torch's dispatcher, with the tensors and Python values it got, and undoes
what they wrote. A replay runs the ops again on the same memory and puts fresh results where the first ones lay. So, as
on a GPU: what the host computed is frozen, an input that moved is not followed, and a stale row is read.

C++ code that Inductor generated does not pass through the dispatcher. Graphs of `backend="dsv4"` are recorded whole;
those of another backend are refused (E422) rather than left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._compat import OpOverload, TorchDispatchMode, pytree
from ..errors import check, fail
from .aliasing import distinct, extent, owner, view_at
from .capture_errors import refuse_host_read
from .graphs import Call, Capture, Footprint, capture_of, tensor_bytes

_HOST_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_tape: ContextVar[Tape | None] = ContextVar("dsv4_tape", default=None)


@dataclass(frozen=True, slots=True)
class _Node:
    """One recorded call, its tensors as aliases of their own, and the tensors it made."""

    call: Callable[..., Any]
    args: Any
    kwargs: Any
    made: dict[int, Tensor]


class StandInGraphs:
    """Captures that replay on the CPU."""

    kind = "standin"
    device = torch.device("cpu")

    def __init__(self) -> None:
        self._held = 0

    def warm_up(self, call: Call) -> Any:
        """Run `call`."""
        return call()

    def measure(self, call: Call) -> Footprint:
        """Everything that one capture of `call` would hold: the stand-in reuses no memory."""
        tape = Tape("a measurement")
        with tape.recording():
            outputs = call()
        return Footprint(tape.allocated, tensor_bytes(outputs))

    def capture(self, call: Call, what: str) -> Capture:
        """Record `call`, and undo what it wrote."""
        tape = Tape(what)
        with capture_of(what):
            try:
                with tape.recording():
                    outputs = call()
            finally:
                tape.undo()
        check(bool(tape.nodes), "E423", got=f"{what} ran no op on a tensor")
        tape.check_outputs(outputs)
        self._held += tape.allocated
        return Capture(outputs, tape.replay, what)

    def memory(self) -> int:
        """Bytes that recorded results hold."""
        return self._held

    def predict(self, footprints: Sequence[Footprint]) -> int:
        """The sum: nothing is shared here."""
        return sum(footprint.peak for footprint in footprints)


class Tape(TorchDispatchMode):  # type: ignore[misc]
    """Ops in the order they ran. One use: record, undo, then replay any number of times."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.nodes: list[_Node] = []
        self.allocated = 0
        self._own: set[int] = set()  # addresses of storages that were made while recording
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._outside: dict[int, torch.UntypedStorage] = {}
        self._inside_call = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: a function that is compiled runs compiled while it is recorded."""
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True, which older torch asks to the same end."""
        return True

    def recording(self) -> Any:
        """Context in which what runs is recorded, and graphs of this package record themselves whole."""
        return _Recording(self)

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`; outside of a recorded call, write it down."""
        kwargs = kwargs or {}
        if self._inside_call:
            return func(*args, **kwargs)
        if _reads_device(func, args):
            refuse_host_read(self.what, str(func))
        returns, arguments = func._schema.returns, func._schema.arguments
        written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        named = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        self._keep(pytree.tree_leaves([named[name] for name in written if name in named]))
        out = func(*args, **kwargs)
        if not written and any(r.alias_info is not None for r in returns):
            return out  # a view: its address follows from its base, and nothing has to be done again
        self._add(func, args, kwargs, out)
        return out

    def call(self, compiled: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a compiled graph as one node. It may write any of its inputs."""
        self._inside_call = True  # its ops, and ours, are not recorded beside it
        try:
            self._keep(args)
            out = compiled(*args)
            self._add(compiled, args, {}, out)
        finally:
            self._inside_call = False
        return out

    def _add(self, call: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> None:
        inputs = {t.untyped_storage().data_ptr(): t for t in _tensors((args, kwargs))}
        self._outside |= {a: t.untyped_storage() for a, t in inputs.items() if a not in self._own}
        made: dict[int, Tensor] = {}
        for index, leaf in enumerate(pytree.tree_leaves(out)):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in inputs:
                made[index] = leaf
                self._own.add(leaf.untyped_storage().data_ptr())
                self.allocated += leaf.untyped_storage().nbytes()
        self.nodes.append(_Node(call, *_aliased(args, kwargs), made))

    def _keep(self, written: Any) -> None:
        for tensor in _tensors(written):
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address not in self._own and address not in self._before:
                self._before[address] = storage, storage.clone()

    def undo(self) -> None:
        """Put back what the recorded ops wrote outside: a capture executes nothing."""
        for storage, before in reversed(self._before.values()):  # two may be of one memory, by way of NumPy
            storage.copy_(before)
        self._before.clear()

    def check_outputs(self, outputs: Any) -> None:
        """E422 for an output that nothing recorded has made or written: some code was not seen."""
        seen = self._own | {t.untyped_storage().data_ptr() for node in self.nodes for t in _tensors(node.args)}
        for tensor in _tensors(outputs):
            check(
                tensor.untyped_storage().data_ptr() in seen,
                "E422",
                got=f"{self.what}: an output of shape {tuple(tensor.shape)} that no recorded op made",
                why="C++ code of another backend does not pass through torch's dispatcher",
                fix='on a CPU compile the step with backend="dsv4" or "eager", or leave it uncompiled',
            )

    @torch.inference_mode()
    def replay(self) -> None:
        """Run everything again. E421 where memory that was recorded has been given back meanwhile."""
        for address, storage in self._outside.items():
            now = storage.data_ptr()
            if now != address:
                fail(
                    "E421",
                    got=f"{self.what}: memory of {storage.nbytes()} bytes at {address:#x} moved to {now:#x}",
                    why="a tensor that the step uses was resized or freed",
                )
        for node in self.nodes:
            leaves = pytree.tree_leaves(node.call(*node.args, **node.kwargs))
            for index, made in node.made.items():
                distinct(made).copy_(distinct(leaves[index]))


def _aliased(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """`args` and `kwargs` with other tensors for the same memory: the caller's must not live for the capture.

    Views of one tensor stay views of one. Code of AOTAutograd asks at each call what its arguments are views of.
    """
    owners: dict[int, Tensor] = {}

    def alias(tensor: Tensor) -> Tensor:
        whole = owner(tensor)
        own = owners.setdefault(id(whole), whole.detach())
        if whole is tensor:
            return own
        return view_at(own, extent(tensor)[0], tensor.dtype, tensor.shape, tensor.stride())

    aliased: tuple[Any, Any] = pytree.tree_map_only(Tensor, alias, (args, kwargs))
    return aliased


def _reads_device(func: OpOverload, args: Any) -> bool:
    """Whether the host must know values to run `func`: a number, or how many elements come out."""
    if func is torch.ops.aten.index.Tensor:  # tagged for the sake of masks
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return any(tag in func.tags for tag in _HOST_TAGS)


class _Recording:
    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def __enter__(self) -> None:
        self._token = _tape.set(self._tape)
        self._tape.__enter__()

    def __exit__(self, *fault: Any) -> None:
        self._tape.__exit__(*fault)
        _tape.reset(self._token)


def recordable(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, which the stand-in then records as one node."""

    def run(*args: Any) -> Any:
        tape = _tape.get()
        return compiled(*args) if tape is None else tape.call(compiled, args)

    return run


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
