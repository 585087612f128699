"""A complete check of one custom op: torch's opcheck, and further properties."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .._compat import FakeTensorMode, OpOverload, TorchDispatchMode
from ..ops.common.arguments import map_tensors, tensors_in
from ..ops.common.define import EAGER, LIBRARY, REFERENCES
from ..ops.common.kernels import runs_kernel
from .compare import assert_bitwise
from .poison import poisoned_empty

Args = Sequence[Any]


def check_op(op: OpOverload, args_list: Sequence[Args], *, utilities: bool = True) -> None:
    """Check `op` on every tuple of positional arguments in `args_list`. Raises on the first broken promise.

    - `torch.library.opcheck` with all of its utilities (schema, autograd registration, fake, AOT dispatch); left out
      with `utilities=False`, when many similar inputs would make it slow.
    - The fake gives the shape, dtype, device and strides of the real result.
    - Results share memory with no argument and not with each other.
    - Arguments that the schema does not mark as mutated keep every byte of their storage; those that it marks keep
      every byte outside their own elements, such as the gap between two pages.
    - A second run gives the same bytes, also where fresh memory is full of NaN: everything is written, nothing stale
      is read.
    - The reference of one of this package's ops never waits for the device (see `refuse_synchronization`). Not checked
      where a kernel runs. A form for CPUs may: its reference is checked as well.

    The arguments themselves are left as they were. Not checked here: whether the values are right.
    """
    for index, args in enumerate(args_list):
        where = f"{op} on sample {index}"
        if utilities:
            with _allclose_of_float8():
                torch.library.opcheck(op, tuple(_clone(args)))
        _check_fake(op, args, where)
        _check_memory(op, args, where)


@contextmanager
def _allclose_of_float8() -> Iterator[None]:
    """torch's schema check compares arguments by `torch.allclose`, which refuses float8: compare the bytes of those."""
    allclose = torch.allclose

    def by_bytes(a: Tensor, b: Tensor, **tolerances: Any) -> bool:
        if a.element_size() == 1 and a.is_floating_point():
            return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        return allclose(a, b, **tolerances)

    torch.allclose = by_bytes  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.allclose = allclose


def _check_fake(op: OpOverload, args: Args, where: str) -> None:
    real = _outputs(op(*_clone(args)))
    with FakeTensorMode() as mode:
        fake = _outputs(op(*map_tensors(mode.from_tensor, args)))
    if len(real) != len(fake):
        raise AssertionError(f"{where}: {len(real)} results, the fake gives {len(fake)}")
    for i, (got, promised) in enumerate(zip(real, fake, strict=True)):
        if describe(got) != describe(promised):
            raise AssertionError(f"{where}: result {i} is {describe(got)}, the fake promises {describe(promised)}")


def describe(x: Tensor) -> tuple[Any, ...]:
    """Return what a consumer may rely on. The stride of a dim of size 1, or of an empty tensor, addresses nothing."""
    empty = x.numel() == 0
    strides = tuple(None if size == 1 or empty else stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return tuple(x.shape), strides, x.dtype, x.device.type


def _check_memory(op: OpOverload, args: Args, where: str) -> None:
    first_args, second_args = _clone(args), _clone(args)
    # Finite where the other run's memory is NaN: recycled memory may hold anything, NaN and the right answer included.
    # A kernel is no calls of torch that could be watched, and its bytes are those of no reference: it runs twice.
    with nullcontext() if _runs_kernel(op, args) else _RefuseSynchronization(fill=0x55, waits=True):
        first = _outputs(op(*first_args))
    if not _runs_kernel(op, args):
        with refuse_synchronization():
            op(*_clone(args))
    with poisoned_empty():
        second = _outputs(op(*second_args))

    inputs = {_address(a) for a in tensors_in(first_args)} - {0}
    for i, result in enumerate(first):
        if _address(result) in inputs:
            raise AssertionError(f"{where}: result {i} shares memory with an argument or with an earlier result")
        inputs.add(_address(result) or -1)

    for argument, *pair in zip(op._schema.arguments, args, first_args, strict=False):
        for before, after in zip(*map(tensors_in, zip(pair)), strict=True):
            may_write = argument.alias_info is not None and argument.alias_info.is_write
            old, new = (_outside(before), _outside(after)) if may_write else (_storage(before), _storage(after))
            what = "memory around its elements changed" if may_write else "is not declared as mutated, but changed"
            assert_bitwise(new, old, label=f"{where}: argument {argument.name!r} {what}; storage")

    written = zip(tensors_in(first_args), tensors_in(second_args), strict=True)
    for i, (a, b) in enumerate([*zip(first, second, strict=True), *written]):
        assert_bitwise(b, a, label=f"{where}: second run over poisoned memory, tensor {i}")


def _runs_kernel(op: OpOverload, args: Args) -> bool:
    device = next((tensor.device for tensor in tensors_in(args)), torch.device("cpu"))
    return runs_kernel(op._schema.name.partition("::")[2], device)


def _outputs(result: Any) -> list[Tensor]:
    if result is None:
        return []
    return [result] if isinstance(result, Tensor) else list(result)


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _storage(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def _over(storage: Tensor, like: Tensor) -> Tensor:
    """Return a view of `storage` with the dtype, shape, strides and offset of `like`."""
    alias = torch.empty(0, dtype=like.dtype, device=like.device)
    return alias.set_(storage.untyped_storage(), like.storage_offset(), like.shape, like.stride())


def _outside(x: Tensor) -> Tensor:
    """Copy of x's storage with x's own elements zeroed."""
    copy = _storage(x).clone()
    elements = _over(copy, x)
    (elements.view(torch.uint8) if elements.element_size() == 1 else elements).zero_()
    return copy


def _clone(args: Args) -> Args:
    """Copies with equal strides, offsets and gaps. Arguments that share a storage share it in the copy as well."""
    copies: dict[int, Tensor] = {}

    def clone(x: Tensor) -> Tensor:
        storage = copies.setdefault(_address(x), _storage(x).clone())
        return _over(storage, x)

    return map_tensors(clone, args)


_SYNCHRONIZING = frozenset(
    (
        "_local_scalar_dense",
        "_unique2",
        "argwhere",
        "bincount",
        "equal",
        "histc",
        "is_nonzero",
        "item",
        "masked_select",
        "nonzero",
        "nonzero_numpy",
        "unique_consecutive",
        "unique_dim",
    )
)
_ALLOCATING = frozenset(("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"))


class _RefuseSynchronization(TorchDispatchMode):
    """Raises on calls that make a CUDA stream wait for the host, whichever device they run on.

    With `fill`, memory from `torch.empty` and its relatives holds that byte. With `waits` nothing is refused, and ops
    of this package run as they do elsewhere, on a CPU in their form for it.
    """

    def __init__(self, fill: int | None = None, waits: bool = False) -> None:
        super().__init__()
        self.fill, self.waits = fill, waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == LIBRARY.ns:
            with self:
                return (EAGER if self.waits else REFERENCES)[func._schema.name.split("::")[1]](*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if not self.waits:
            _check_call(name, args, kwargs)
        result = func(*args, **kwargs)
        if self.fill is not None and name in _ALLOCATING:
            _storage(result).fill_(self.fill)
        return result


def _check_call(name: str, args: Any, kwargs: Any) -> None:
    """Raise AssertionError if a call of `aten::name` makes a CUDA stream wait for the host."""
    if name in _SYNCHRONIZING or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        raise AssertionError(f"aten::{name} makes the stream wait for the host")
    if name in ("index", "index_put", "index_put_") and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    ):
        raise AssertionError(f"aten::{name} with a mask makes the stream wait for the host")
    if name == "lift_fresh" and args[0].dim() > 0:
        raise AssertionError("torch.tensor of a list is a blocking copy from the host")


@contextmanager
def refuse_synchronization() -> Iterator[None]:
    """Raise AssertionError where code would make a CUDA stream wait for the host. Needs no GPU.

    Found: `.item()`, branches on tensors, `nonzero`, boolean indexing, constants copied from Python lists. Ops of this
    package are entered through their reference; other custom ops are opaque.
    """
    with _RefuseSynchronization():
        yield
