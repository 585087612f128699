"""Build the Triton kernels of a graph in threads while torch compiles it: `dsv4.early_builds`.

The launchers of the graph's opaque ops are called with tensors that have no memory. Every launch that they would make
is built instead, by Triton's own asynchronous mode, which finds the variant as a launch does; the first call of the
graph then finds it. Triton and ptxas hold Python's lock for a small part of a build only.

A caller that pads its calls to a few sizes says so by `also_for`. Which variant a launcher takes follows from sizes,
strides and alignments alone, so calling it for each size has them all, whatever its thresholds are.

A build that fails is reported and forgotten: the first launch builds again, and raises what there is to raise.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import progress
from .._compat import triton_known
from ..errors import is_installed
from ..kernels.host.build_hooks import prepare_builds
from ..ops.common.arguments import tensors_in
from ..ops.common.define import OPS
from ..ops.common.invariance import CLAIMS, is_large, row_places
from ..ops.common.kernels import invariant_launcher, launcher, refusal
from .start_times import spending

_log = logging.getLogger("dsv4_compile.runtime")


@dataclass(frozen=True, slots=True)
class Built:
    """A variant of a kernel that was built early, or an op with no such variant.

    Attributes:
        name: function of the kernel; the op where its launcher failed.
        seconds: how long the build took; 0 for an op.
        error: why it failed, "" if it did not.
    """

    name: str
    seconds: float
    error: str = ""


Listener = Callable[[Built], Any]
_active: ContextVar[EarlyBuilds | None] = ContextVar("dsv4_early_builds", default=None)
_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("dsv4_early_builds_listeners", default=())
_sizes: ContextVar[tuple[int, Sequence[int]]] = ContextVar("dsv4_early_builds_sizes", default=(0, ()))
"""Tokens of the call that compiles, and all sizes that its caller pads to."""
_instead: ContextVar[tuple[int, int]] = ContextVar("dsv4_early_builds_instead", default=(0, 0))
"""Tokens of a traced call, and the number of tokens to take in their place, 0 for none."""


@contextmanager
def also_for(tokens: int, sizes: Sequence[int]) -> Iterator[None]:
    """Let a graph that a call of `tokens` tokens compiles in the block build the kernels of calls of all `sizes`."""
    token = _sizes.set((tokens, sizes))
    try:
        yield
    finally:
        _sizes.reset(token)


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Call `listener` with each early build that ends inside the block, in this thread."""
    token = _listeners.set((*_listeners.get(), listener))
    try:
        yield
    finally:
        _listeners.reset(token)


def active() -> EarlyBuilds | None:
    """Return the builds of the graph that compiles now, None if kernels are built at the first call."""
    return _active.get()


class Metadata(NamedTuple):
    """A tensor without its memory: what a launcher may look at."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Elements from the start of the storage, which is taken to be aligned."""
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> Metadata:
        """Return the metadata of a tensor or a fake, of dynamic sizes those that it was traced with."""
        size, stride = tuple(traced([*x.size()])), tuple(traced([*x.stride()]))
        return cls(size, stride, traced(x.storage_offset()), x.dtype, x.device)

    def sliced(self, dim: int, start: int, end: int) -> Metadata:
        """Return the metadata of `x[start:end]` in dim `dim`."""
        size = (*self.size[:dim], min(end, self.size[dim]) - start, *self.size[dim + 1 :])
        return self._replace(size=size, offset=self.offset + start * self.stride[dim])

    def make(self) -> Tensor:
        """Return such a tensor; a fake one inside FakeTensorMode."""
        room = 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        storage = torch.empty(self.offset + max(room, 0), dtype=self.dtype, device=self.device)
        return storage.as_strided(self.size, self.stride, self.offset)


def traced(value: Any) -> Any:
    """Return `value` with dynamic sizes replaced by those that they were traced with; ValueError if there are none."""
    from .._compat import pytree

    return pytree.tree_map_only(torch.SymInt, _hint, value)


def _hint(size: torch.SymInt) -> int:
    if size.node.hint is None:
        raise ValueError("a size depends on data")
    hint = int(size.node.hint)
    tokens, other = _instead.get()
    expression = size.node.expr
    symbols: Any = expression.free_symbols if other else ()
    if len(symbols) == 1:
        (symbol,) = symbols
        if expression.subs(symbol, tokens) == hint:  # not of a size that is no number of tokens
            return int(expression.subs(symbol, other))
    return hint


@dataclass(slots=True)
class _Variant:
    """A variant of a kernel that is being built; `keep` gives the result to the kernels that asked for it."""

    name: str
    future: Future[tuple[Any, float]]
    keep: list[Callable[[Any], None]] = field(default_factory=list)


def for_graph(wanted: str, devices: Collection[torch.device]) -> AbstractContextManager[Any]:
    """Return a block to compile a graph on `devices` in; kernels are built early unless `dsv4.early_builds` is "off".

    Builds are prepared in any case: a graph that torch loads from its cache has it look at the ptxas.
    Builds are left to the first call on a CPU, which has no kernels, with a Triton that was not tested in asynchronous
    mode,
    and where torch forks this process to compile: locks that a thread held stay locked in a fork.
    """
    gpus = sorted((device for device in devices if device.type == "cuda"), key=str)
    if not gpus or not is_installed("triton"):
        return nullcontext()
    prepare_builds()
    if wanted == "off":
        return nullcontext()
    from .._compat import cache_dir_utils, inductor_config

    forks = inductor_config.worker_start_method == "fork"
    if forks or not triton_known():
        why = "torch compiles in forks of this process" if forks else "this Triton was not tested"
        _log.info("kernels are built at their first launch: %s", why)
        return nullcontext()
    # Inductor sets it to the same at some time before the first call; a later process looks for kernels there.
    os.environ.setdefault("TRITON_CACHE_DIR", cache_dir_utils.triton_cache_dir(gpus[0].index or 0))
    return EarlyBuilds(inductor_config.compile_threads or os.cpu_count() or 1, all_sizes=wanted != "first")


class _Addresses(TorchFunctionMode):
    """Gives tensors without memory the address that their offset in a storage would be at, from address 0 on."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.data_ptr:
            return args[0].storage_offset() * args[0].element_size()
        return func(*args, **(kwargs or {}))


class EarlyBuilds:
    """Builds of one compilation, in `threads` threads: `with EarlyBuilds(16): compile()`.

    With `all_sizes`, for the sizes of `also_for` too, not for those of the call that compiles alone.

    The end of the block waits for the builds. After an exception in the block those that have not begun are dropped.
    """

    def __init__(self, threads: int, *, all_sizes: bool = True) -> None:
        from triton import AsyncCompileMode

        from .._compat import FakeTensorMode
        from ..kernels.host.launch import building

        self._building, self._all_sizes = building, all_sizes
        self._pool = ThreadPoolExecutor(threads, "dsv4-build")
        self._mode = AsyncCompileMode(self._pool)
        self._mode.submit = self._submit
        self._name = ""
        self._calls: set[Any] = set()
        self._fake = FakeTensorMode()  # one for all calls: making it extracts the stack
        self._variants: dict[str, _Variant] = {}

    def __enter__(self) -> EarlyBuilds:
        self._token = _active.set(self)
        return self

    def __exit__(self, kind: Any, *failure: Any) -> None:
        _active.reset(self._token)
        if kind is None:
            self._finish()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def add(self, op: str, arguments: Callable[[], Sequence[Any]], invariant: str = "") -> None:
        """Begin to build what a call of `op` launches; `arguments` are `Metadata` and plain values in schema order.

        A call that the kernel does not support builds nothing: its reference runs. `invariant` is the value of
        `dsv4.batch_invariant`, "" if it is off.
        """
        self._add(op, arguments, invariant)
        tokens, sizes = _sizes.get() if self._all_sizes else (0, ())
        for size in sizes:
            if size != tokens:
                token = _instead.set((tokens, size))
                try:
                    self._add(op, arguments, invariant)
                finally:
                    _instead.reset(token)

    def _add(self, op: str, arguments: Callable[[], Sequence[Any]], invariant: str) -> None:
        try:
            call = arguments()
            key = op, invariant, *(tuple(value) if isinstance(value, list) else value for value in call)
            if key in self._calls:
                return
            self._calls.add(key)
            with self._fake, _Addresses(), self._building(self._build):
                args = [_made(value) for value in call]
                device = next(tensors_in(args)).device
                with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                    refuses = refusal(op)
                    if refuses is None or not refuses(*args):
                        _launcher(op, args, invariant)(*args)
        except Exception as error:
            _report(Built(op, 0, _words(error)))

    def _build(self, kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self._name = kernel.fn.__name__
        with self._mode:
            kernel.warmup(*args, grid=(1,), **constants)

    def _submit(self, key: str, build: Callable[[], Any], keep: Callable[[Any], None], *forget: Any) -> None:
        """Take a variant from Triton. It keeps nothing of it, so it asks again each time, and has nothing to forget."""
        if key not in self._variants:
            self._variants[key] = _Variant(self._name, self._pool.submit(_timed, build))
        self._variants[key].keep.append(keep)

    def _finish(self) -> None:
        variants = self._variants.values()
        if not all(variant.future.done() for variant in variants):
            with spending("build"), progress.stage("build kernels", total=len(variants)) as work:
                for variant in variants:
                    work.note(variant.name)
                    wait([variant.future])
                    work.advance()
        for variant in variants:
            try:
                kernel, seconds = variant.future.result()
                with self._building(self._build):  # Triton's hooks hear of it here
                    for keep in variant.keep:
                        keep(kernel)
                _report(Built(variant.name, seconds))
            except Exception as error:
                _report(Built(variant.name, 0, _words(error)))


def _made(value: Any) -> Any:
    """Return an argument with tensors for `Metadata`, in lists too."""
    if isinstance(value, list):
        return [_made(x) for x in value]
    return value.make() if isinstance(value, Metadata) else value


def _launcher(op: str, args: Sequence[Any], invariant: str) -> Callable[..., Any]:
    """Return what runs a call of `op` at a value of `dsv4.batch_invariant`, "" for off."""
    if not invariant or CLAIMS[op].exact:
        return launcher(op)
    rows = args[row_places(op, OPS[op]._schema.arguments)[0]].shape[0]
    return launcher(op) if is_large(invariant, rows) else invariant_launcher(op, invariant)


def _timed(build: Callable[[], Any]) -> tuple[Any, float]:
    """Return a kernel and the seconds that its build took, with the C code that launches it."""
    from triton.runtime import driver

    begin = time.perf_counter()
    kernel = build()
    with suppress(Exception):  # the first launch raises it
        driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel, time.perf_counter() - begin


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _report(built: Built) -> None:
    """Tell who listens, and the log of a failure."""
    if built.error:
        _log.info("%s is built at its first launch: %s", built.name, built.error)
    for listener in _listeners.get():
        listener(built)
