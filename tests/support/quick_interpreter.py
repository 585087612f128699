"""Patches of Triton's interpreter that skip repeated work: tests of kernels take half to a third of the time.

Results are equal bit for bit, but for rounded sums by a function of a kernel. Tests and `generated_triton` apply them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import triton.language as tl

from dsv4_compile._compat import triton_interpreter as interpreter
from tests.support.quick_operators import quick_broadcast, quick_cast, quick_index, quick_operator, quick_where


@functools.cache
def quicken() -> None:
    """Apply all patches, for the rest of this process."""
    _patch_once_a_launch()
    _skip_overflow_checks()
    _cache_types()
    _cache_dtypes()
    _cache_constants()
    _cache_ranges()
    _look_up_codes()
    _skip_promotion_of_equal_types()
    _call_builtins_directly()
    _reduce_neighbours()


def _skip_overflow_checks() -> None:
    """Skip the 64-bit check of every addition and multiplication for overflow.

    Triton 3.6 and 3.7 compute it and then drop its assertion, because the interpreter's options say no debugging.
    """
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "the assertions are made in this version"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _cache_types() -> None:
    """Build the type of each shape and element once, so that equal types are one object."""
    describe, describe_pointer = tl.block_type.__init__, tl.pointer_type.__init__
    scalar = tl.constexpr(1), tl.tuple([])

    @functools.cache
    def known(*sizes: int) -> tuple[Any, ...]:
        model: Any = object.__new__(tl.block_type)
        describe(model, tl.float32, list(sizes))
        of_tensors = tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])
        return model.shape, model.numel, f"<{model.shape}, ", of_tensors, {}

    def find(cls: Any, element_ty: Any, shape: Any) -> Any:
        sizes = (size.value if type(size) is tl.constexpr else size for size in getattr(shape, "values", shape))
        shape, numel, name, of_tensors, by_element = known(*sizes)
        block = by_element.get(id(element_ty))
        if block is None:
            block = by_element[id(element_ty)] = object.__new__(cls)
            block.element_ty, block.shape, block.numel, block.name = element_ty, shape, numel, f"{name}{element_ty}>"
            block.of_tensors, block.by_element = of_tensors, by_element
        return block

    def with_element_ty(self: Any, element_ty: Any) -> Any:
        return self.by_element.get(id(element_ty)) or tl.block_type(element_ty, self.shape)

    pointers: dict[Any, Any] = {}

    def find_pointer(cls: Any, element_ty: Any, address_space: int = 1, const: bool = False) -> Any:
        key = id(element_ty), address_space, const
        if key not in pointers:
            pointers[key] = object.__new__(cls)
            describe_pointer(pointers[key], element_ty, address_space, const)
        return pointers[key]

    def initialize(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensors if type.is_block() else scalar

    tl.block_type.__new__, tl.pointer_type.__new__ = find, find_pointer
    tl.block_type.__init__ = tl.pointer_type.__init__ = lambda *_, **__: None
    tl.block_type.with_element_ty, tl.tensor.__init__ = with_element_ty, initialize


def _cache_constants() -> None:
    """Convert each number of a kernel to a tensor once."""
    make = interpreter.interpreter_semantic.scalar_constant

    @functools.cache
    def known(value: Any, kind: str, dtype: Any) -> Any:
        return make(value, dtype)

    interpreter.interpreter_semantic.scalar_constant = lambda value, dtype: known(value, type(value).__name__, dtype)


def _cache_ranges() -> None:
    """Compute a range of numbers only once; nothing may write to the result."""
    builder = interpreter.InterpreterBuilder
    make = builder.create_make_range

    @functools.cache
    def known(start: int, stop: int) -> Any:
        numbers = make(None, None, start, stop).data
        numbers.flags.writeable = False
        return numbers

    builder.create_make_range = lambda self, _, start, stop: interpreter.TensorHandle(known(start, stop), tl.int32)


def _look_up_codes() -> None:
    """Convert the 256 codes of a format of 8 bits once, and widen bfloat16 by a shift."""
    convert = interpreter._convert_float

    @functools.cache
    def of_codes(source: Any, target: Any) -> Any:
        return convert(np.arange(256, dtype=np.uint8), source, target, None)

    def look_up(bits: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source.primitive_bitwidth == 8 and rounding_mode is None:
            return of_codes(source, target).take(bits.view(np.uint8))
        if source is tl.bfloat16 and target is tl.float32:
            return bits.view(np.uint16).astype(np.uint32) << np.uint32(16)
        return convert(bits, source, target, rounding_mode)

    interpreter._convert_float = look_up


def _skip_promotion_of_equal_types() -> None:
    """Skip type promotion and broadcasting of two tensors of one type and shape, except in divisions.

    Numbers next to tensors are not copied to their shape: NumPy combines each element with the number.
    """
    semantic = interpreter.interpreter_semantic
    check, broadcast, make_tensor = (
        semantic.binary_op_type_checking_impl,
        semantic.broadcast_impl_value,
        semantic.to_tensor,
    )
    semantic.computation_type_impl = functools.cache(semantic.computation_type_impl)

    meet = quick_broadcast(broadcast)

    def meet_operands(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = lhs.type.is_block(), rhs.type.is_block()
        if left == right:
            return meet(lhs, rhs)
        if left:
            return lhs, tl.tensor(rhs.handle, lhs.type.with_element_ty(rhs.dtype))
        return tl.tensor(lhs.handle, rhs.type.with_element_ty(lhs.dtype)), rhs

    def prepare(lhs: Any, rhs: Any, *options: bool) -> tuple[Any, Any]:
        tensors = type(lhs) is tl.tensor and type(rhs) is tl.tensor
        may_divide = len(options) > 2
        if tensors and not may_divide and type(lhs.dtype) is tl.dtype and lhs.dtype == rhs.dtype:
            return meet_operands(lhs, rhs)
        semantic.broadcast_impl_value = meet_operands
        try:
            operands: tuple[Any, Any] = check(lhs, rhs, *options)
        finally:
            semantic.broadcast_impl_value = meet
        return operands

    def to_tensor(x: Any, check_type: bool = True) -> Any:
        return x if type(x) is tl.tensor else make_tensor(x, check_type)

    semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl = meet, prepare
    semantic.to_tensor = to_tensor
    semantic.cast = quick_cast(semantic.cast, np.ndarray.astype)
    semantic.bitcast = quick_cast(semantic.bitcast, np.ndarray.view)
    semantic.where = quick_where(semantic.where)


def _call_builtins_directly() -> None:
    """Call functions of the language without the wrapper that checks for a caller in a kernel."""
    unwrap, constexpr, itself = tl.core._unwrap_if_constexpr, tl.constexpr, (tl.tensor, int, str, bool, type(None))

    def unwrap_most(x: Any) -> Any:
        kind = type(x)
        return x.value if kind is constexpr else x if kind in itself else unwrap(x)

    tl.core._unwrap_if_constexpr = tl._unwrap_if_constexpr = unwrap_most

    @functools.cache
    def direct(module: Any, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        if module is not tl.tensor:
            return call
        return quick_index(call) if name == "__getitem__" else quick_operator(name, call)

    def replace(module: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        scope.set_attr(module, name, direct(module, name, getattr(member, "__wrapped__", member)))

    interpreter._patch_attr = replace


def _reduce_neighbours() -> None:
    """Reduce by a function of a kernel's own in whole slices: neighbours first, then their results, as a GPU does.

    An associative function gives what it would element by element. Rounded sums may differ in their last bit.
    """
    reduce = interpreter.ReduceOps.generic_reduce

    def reduce_neighbours(self: Any, inputs: Any) -> Any:
        if self.axis is None:
            return reduce(self, inputs)
        arrays = [np.moveaxis(tensor.handle.data, self.axis, 0) for tensor in inputs]
        while len(arrays[0]) > 1:  # a power of two
            pairs = (
                [self.to_tensor(x[side::2], tensor.dtype) for x, tensor in zip(arrays, inputs, strict=True)]
                for side in (0, 1)
            )
            combined = self.combine_fn.fn(*next(pairs), *next(pairs))
            arrays = [tensor.handle.data for tensor in (combined if isinstance(combined, tuple) else (combined,))]
        arrays = [np.moveaxis(x, 0, self.axis) if self.keep_dims else x[0] for x in arrays]
        return [self.to_tensor(x, tensor.dtype) for x, tensor in zip(arrays, inputs, strict=True)]

    interpreter.ReduceOps.generic_reduce = reduce_neighbours


def _cache_dtypes() -> None:
    """Look up NumPy dtypes in one table, instead of building it each time."""
    original, known = interpreter._get_np_dtype, dict[str, Any]()

    def look_up(kind: Any) -> Any:
        scalar = kind.scalar
        if isinstance(scalar, tl.pointer_type):
            return original(scalar)
        if scalar.name not in known:
            known[scalar.name] = original(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = look_up


def _patch_once_a_launch() -> None:
    """Patch Triton's language once per launch.

    Triton 3.6 and 3.7 do it again at every call of a device function, a third of the time of a kernel with many.
    """
    original, nothing = interpreter._patch_lang, interpreter._LangPatchScope
    replaced: set[str] = set()

    @functools.cache
    def seen_by(fn: Any) -> frozenset[str]:
        return frozenset(value.__name__ for value in fn.__globals__.values() if value is tl or value is tl.core)

    def patch(fn: Any) -> Any:
        seen = seen_by(fn)
        if seen and seen <= replaced:
            return nothing()
        scope = original(fn)
        restore = scope.restore

        def end() -> None:
            restore()
            replaced.clear()

        scope.restore = end
        replaced.update(seen)
        return scope

    interpreter._patch_lang = patch
