"""Gluon kernels on the CPU: the partitions of a program are threads, its tensors are torch tensors.

A module of `kernels/` is imported a second time with a stand-in for Gluon. Simulated are values and their rounding,
addresses with bounds, the phases of mbarriers, and that no operand of an asynchronous GEMM is overwritten before the
wait. Not simulated are layouts, and orders of accesses that no barrier enforces.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import math
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.simulator.ptx import elementwise
from tests.simulator.values import Pointer, Value, raw

KERNELS = Path(__file__).parents[2] / "kernels"
GLUON = "triton.experimental.gluon"
NO_COPIES = types.SimpleNamespace(async_load=None, async_store=None)
"""Stands in for TMA and cp.async where a test simulates neither: calling one fails."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integers as wide as the elements of a tensor, by their bytes: NaN equals itself there."""
SECONDS = 60.0
"""Time after which a wait counts as a deadlock."""


class Shared:
    """A tensor in shared memory."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    layout = None

    def index(self, i: Any) -> Shared:
        return Shared(self.data[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, int(start), int(length)))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def load(self, layout: Any) -> Value:
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        assert self.data.shape == value.data.shape and self.data.dtype is value.data.dtype
        self.data.copy_(value.data)

    def reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        data = self.data.view(dtype)
        if len(shape) == 3 and shape[1] == len(data) and shape[0] * shape[2] == data[0].numel():
            # Blocks of columns of a swizzled tile.
            return Shared(data.unflatten(1, (shape[0], shape[2])).permute(1, 0, 2))
        return Shared(data.view(shape))


class Barrier:
    """An mbarrier: a phase ends when all expected arrivals and all expected bytes have come.

    A wait for a parity passes while a phase of the other parity runs.
    """

    changed = threading.Condition()
    failed = threading.Event()

    def __init__(self, count: int = 1) -> None:
        self.parts = [self] + [Barrier() for _ in range(count - 1)]
        self.count = self.pending = self.phase = self.bytes = 0

    def index(self, i: Any) -> Barrier:
        return self.parts[int(i)]

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, count: int = 1, pred: Any = True, announced: int = 0) -> None:
        """Arrive, and expect `announced` more bytes; negative bytes have been copied."""
        if not pred:
            return
        with self.changed:
            self.pending -= count
            self.bytes += announced
            assert self.pending >= 0 and self.bytes >= 0
            if self.pending == self.bytes == 0:
                self.pending, self.phase = self.count, self.phase + 1
            self.changed.notify_all()

    def wait(self, parity: Any) -> None:
        with self.changed:
            passed = self.changed.wait_for(lambda: self.phase & 1 != int(parity) or self.failed.is_set(), SECONDS)
        assert passed and not self.failed.is_set(), "a partition waits for an arrival that never comes"


def unwritten(dtype: torch.dtype, shape: list[Any]) -> Tensor:
    """Return memory as before the first write: NaN, or -1 for dtypes without NaN."""
    return torch.full([int(n) for n in shape], math.nan if dtype.is_floating_point else -1).to(dtype)


def argument(x: Any) -> Any:
    """Convert an argument of a launch."""
    if type(x) is int:
        return Value(torch.tensor(x, dtype=torch.int32 if abs(x) < 2**31 else torch.int64))
    if isinstance(x, tuple):
        parts = [argument(field) for field in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return Pointer.of(x) if isinstance(x, Tensor) else x


class Kernel:
    """A jitted function: called by a second one, or launched."""

    program: tuple[int, ...] = (0,)
    grid: tuple[int, ...] = (1,)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **constants: Any) -> Any:
        return self.function(*args, **constants)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, enable_fp_fusion: bool = True, launch_pdl: bool = False, **constants: Any) -> None:
            Kernel.grid = grid
            if "num_warps" not in inspect.signature(self.function).parameters:
                constants.pop("num_warps", None)
            for Kernel.program in itertools.product(*map(range, grid)):
                self.function(*map(argument, args), **constants)

        return launch


def static_assert(holds: bool) -> None:
    assert holds


def specialize(partitions: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    """Run the partitions of a program concurrently, and raise the first exception."""
    errors: list[BaseException] = []
    Barrier.failed.clear()

    def run(function: Any, args: tuple[Any, ...]) -> None:
        try:
            with torch.no_grad():
                function(*args)
        except BaseException as error:
            errors.append(error)
            Barrier.failed.set()
            with Barrier.changed:
                Barrier.changed.notify_all()

    threads = [threading.Thread(target=run, args=partition) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def multiply(a: Any, b: Shared, acc: Value, use_acc: bool = True, is_async: bool = False) -> Value:
    """Return a GEMM that remembers its operands, those of its accumulator, and its number, until the wait."""
    product = Value(a.data.float() @ b.data.float() + (acc.data if use_acc else 0.0))
    earlier = getattr(acc, "operands", [])
    product.operands = [*earlier, *((x.data, x.data.clone()) for x in (a, b))]  # type: ignore[attr-defined]
    _gemms.begun = product.number = getattr(_gemms, "begun", 0) + 1  # type: ignore[attr-defined]
    return product


_gemms = threading.local()
"""How many GEMMs a partition began."""


def finish(pending: int, deps: list[Value]) -> Value:
    """Wait for a GEMM. Its operands must not have changed since it began, and the `pending` ones began after it."""
    assert _gemms.begun - deps[0].number >= pending, "the wait lets this GEMM run on"  # type: ignore[attr-defined]
    for now, then in deps[0].operands:  # type: ignore[attr-defined]
        assert torch.equal(now.view(BITS[now.itemsize]), then.view(BITS[now.itemsize])), "an operand was overwritten"
    return Value(deps[0].data)


def assembly(text: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
    """Execute inline assembly: a move, a pragma, a prefetch, which must lie in its tensor, or arithmetic."""
    if text.startswith("mov"):
        return args[0]
    if text.startswith(".pragma"):
        return None
    if "prefetch" in text:
        args[0].resolve(None)
        return None
    several = isinstance(dtype, tuple)
    results = elementwise(text, constraints, [raw(x) for x in args], list(dtype) if several else [dtype], pack)
    return tuple(map(Value, results)) if several else Value(results[0])


def reduce(x: Value, axis: int, combine: Callable[[Value, Value], Value]) -> Value:
    """Reduce an axis by combining halves."""
    data = x.data.movedim(axis, -1)
    while data.shape[-1] > 1:
        data = raw(combine(*(Value(half.contiguous()) for half in data.chunk(2, -1))))
    return Value(data[..., 0])


def load(pointer: Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = "") -> Value:
    offset, live = pointer.resolve(mask)
    if len(pointer.memory) == 0:
        return Value(torch.zeros(offset.shape, dtype=pointer.memory.dtype))
    return Value(torch.where(live, pointer.memory[offset], torch.tensor(other, dtype=pointer.memory.dtype)))


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    offset, live = pointer.resolve(mask)
    assert not pointer.is_copy
    values = torch.as_tensor(raw(value)).to(pointer.memory.dtype).broadcast_to(offset.shape)
    as_bytes = values.dtype is torch.float8_e4m3fn  # has no index_put
    memory, values = (x.view(torch.uint8) if as_bytes else x for x in (pointer.memory, values.contiguous()))
    memory[offset[live]] = values[live]


def atomic_add(pointer: Pointer, value: int, sem: str, scope: str) -> Value:
    """Add to a scalar; programs run one after the other, so that this is atomic."""
    old = load(pointer)
    store(pointer, old + value)
    return old


def multiple_of(x: Any, n: int) -> Any:
    """Check an alignment that a kernel promises to the compiler, of numbers or of byte addresses."""
    numbers = torch.as_tensor(x.offset) * x.memory.element_size() if isinstance(x, Pointer) else x.data
    assert (numbers % n == 0).all()
    return x


def where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(a, Pointer):
        if isinstance(raw(condition), Tensor) and raw(condition).dim() > 0:
            return Pointer.select(raw(condition), a, b)
        return a if raw(condition) else b
    kinds = {int: torch.int32, Number: torch.int32, float: torch.float32}
    a, b = (x if isinstance(x, Tensor) else torch.tensor(x, dtype=kinds[type(x)]) for x in (raw(a), raw(b)))
    return Value(torch.where(raw(condition), a, b))


def largest(x: Value, axis: int) -> Value:
    """Return the maximum along an axis; it ignores NaN, as that of two numbers does."""
    nan = torch.isnan(x.data)
    top = torch.where(nan, -math.inf, x.data).amax(axis) if nan.any() else x.data.amax(axis)
    return Value(torch.where(nan.all(axis), math.nan, top) if nan.any() else top)


class Number(int):
    value = property(int)


def constant(x: Any) -> Any:
    return Number(x) if type(x) is int else x


def anything(*_: Any, **__: Any) -> None:
    return None


def modules() -> dict[str, types.ModuleType]:
    """Return the stand-ins by the names of the modules that they replace."""
    language, hopper, gluon = (types.ModuleType(name) for name in (f"{GLUON}.language", "hopper", GLUON))
    wrap = lambda f: lambda *args: Value(f(*(raw(x) for x in args)))  # noqa: E731
    either = lambda f: lambda a, b: Value(f(*(torch.as_tensor(raw(x)) for x in (a, b))))  # noqa: E731
    plain = {
        name: wrap(getattr(torch, name)) for name in ("abs", "exp2", "log2", "rsqrt", "sum", "reshape", "zeros_like")
    }
    layouts = "BlockedLayout SliceLayout NVMMADistributedLayout NVMMASharedLayout SwizzledSharedLayout barrier"
    types_ = ("int8", "int16", "int32", "int64", "float16", "float32", "bfloat16")
    vars(language).update(
        dict.fromkeys(layouts.split(), anything)
        | {name: getattr(torch, name) for name in types_}
        | plain
        | {
            "float8e4nv": torch.float8_e4m3fn,
            "constexpr": constant,
            "pointer_type": lambda dtype: dtype,
            "arange": lambda start, end, layout: Value(torch.arange(start, end, dtype=torch.int32)),
            "zeros": lambda shape, dtype, layout: Value(torch.zeros([int(n) for n in shape], dtype=dtype)),
            "full": lambda shape, x, dtype, layout: Value(torch.full([int(n) for n in shape], x, dtype=dtype)),
            "fma": lambda a, b, c: Value(torch.addcmul(*(torch.as_tensor(raw(x)) for x in (c, a, b)))),
            "max": largest,
            "reduce": reduce,
            "maximum": either(torch.fmax),
            "minimum": either(torch.fmin),
            "expand_dims": lambda x, axis: Value(x.data.unsqueeze(axis)),
            "convert_layout": lambda x, layout: x,
            "to_tensor": lambda x: x if isinstance(x, Value) else Value(torch.tensor(x)),
            "split": lambda x: tuple(Value(half) for half in x.data.unbind(-1)),
            "join": lambda a, b: Value(torch.stack(torch.broadcast_tensors(a.data, b.data), -1)),
            "broadcast": lambda a, b: tuple(Value(x) for x in torch.broadcast_tensors(a.data, b.data)),
            "static_range": range,
            "static_assert": static_assert,
            "num_programs": lambda axis: Value(torch.tensor((*Kernel.grid, 1, 1)[axis], dtype=torch.int32)),
            "program_id": lambda axis: Value(torch.tensor(Kernel.program[axis], dtype=torch.int32)),
            "allocate_shared_memory": lambda dtype, shape, layout: (
                Barrier(shape[0]) if layout == "mbarrier" else Shared(unwritten(dtype, shape))
            ),
            "inline_asm_elementwise": assembly,
            "warp_specialize": specialize,
            "shared_memory_descriptor": Shared,
            "where": where,
            "multiple_of": multiple_of,
            "load": load,
            "store": store,
            "atomic_add": atomic_add,
        }
    )
    calls = {"init": Barrier.init, "wait": Barrier.wait, "arrive": Barrier.arrive}
    barrier = types.SimpleNamespace(**calls, MBarrierLayout=lambda: "mbarrier")
    vars(hopper).update(
        fence_async_shared=anything,
        mbarrier=barrier,
        warpgroup_mma=multiply,
        warpgroup_mma_wait=finish,
        warpgroup_mma_init=lambda acc: acc,
    )
    vars(gluon).update(language=language, jit=lambda f=None, **_: Kernel(f) if f else Kernel)
    cuda = types.ModuleType("cuda")
    vars(cuda).update(gdc_launch_dependents=anything, gdc_wait=anything)
    return {
        GLUON: gluon,
        f"{GLUON}.language": language,
        f"{GLUON}.language.nvidia.hopper": hopper,
        "triton.language.extra.cuda": cuda,
    }


def gluon_modules(launcher: str) -> list[str]:
    """Return the module `launcher` and those it imports, if they use Gluon or import a module that does."""
    gluon_users: dict[str, bool] = {}

    def uses(name: str) -> bool:
        if name not in gluon_users:
            gluon_users[name] = False
            tree = ast.parse((KERNELS / f"{name.replace('.', '/')}.py").read_text())
            imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
            gluon_users[name] = any(node.level == 0 and node.module.startswith(GLUON) for node in imports)
            imported = [f"{name.split('.')[0]}.{node.module}" for node in imports if node.level == 1]
            imported += [node.module for node in imports if node.level == 2]
            for other in imported:
                gluon_users[name] |= uses(other)
        return gluon_users[name]

    uses(launcher)
    return [name for name, gluon in gluon_users.items() if gluon]


def simulated(launcher: str) -> Any:
    """Import the module `launcher` of kernels/ ("family.file") anew, with every module that uses Gluon."""
    importlib.import_module("dsv4_compile.kernels.attention.split_combine")  # with the real Triton
    stand_ins = modules()
    hopper = stand_ins[f"{GLUON}.language.nvidia.hopper"]
    if not hasattr(hopper, "tma"):
        vars(hopper).update(tma=NO_COPIES)
        ampere = types.ModuleType("ampere")
        ampere.async_copy = NO_COPIES
        stand_ins[f"{GLUON}.language.nvidia.ampere"] = ampere
    package = importlib.import_module("triton.experimental")
    with (
        mock.patch.dict(sys.modules, stand_ins),
        mock.patch.object(package, "gluon", stand_ins[GLUON], create=True),
    ):
        for name in gluon_modules(launcher):
            sys.modules.pop(f"dsv4_compile.kernels.{name}", None)
        return importlib.import_module(f"dsv4_compile.kernels.{launcher}")
