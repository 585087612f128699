"""Operators of tensors in Triton's interpreter without the type promotion and broadcasting of every call.

What an operator computes depends on the types of its operands and, for a number next to a tensor, on the number. The
first call for these goes through Triton; all later ones follow a plan that gave the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl

from dsv4_compile._compat import triton_interpreter as interpreter


def _quotient(left: Any, right: Any) -> Any:
    return (left - np.fmod(left, right)) // right


_DIVISIONS: dict[str, Callable[..., Any]] = {
    "__truediv__": np.divide,
    "__floordiv__": _quotient,
    "__mod__": np.fmod,
}
_COMPARISONS: dict[str, Callable[..., Any]] = {
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "__add__": np.add,
    "__radd__": np.add,
    "__sub__": np.subtract,
    "__rsub__": lambda right, left: np.subtract(left, right),
    "__mul__": np.multiply,
    "__rmul__": np.multiply,
    "__and__": np.bitwise_and,
    "__or__": np.bitwise_or,
    "__xor__": np.bitwise_xor,
    "__lshift__": np.left_shift,
    "__rshift__": np.right_shift,
    **_DIVISIONS,
    **_COMPARISONS,
}
"""The function of NumPy for each operator of Triton's tensors that Triton computes by one."""
_SIZES = 8, 16, 32, 64
_PLAIN = {"int1", "fp16", "fp32", "fp64", *(f"{sign}int{size}" for sign in ("", "u") for size in _SIZES)}
"""Names of the types that NumPy has: operators of other types convert, or compute in a different type."""


class _Form(NamedTuple):
    """All of a tensor but its values: the dtype of its handle, and its own attributes."""

    dtype: Any
    attributes: dict[str, Any]

    @staticmethod
    def of(tensor: Any) -> _Form:
        """Return the form of a tensor."""
        return _Form(tensor.handle.dtype, {key: value for key, value in vars(tensor).items() if key != "handle"})

    def tensor(self, data: Any) -> Any:
        """Return a tensor of this form, faster than by its constructor."""
        tensor, handle = object.__new__(tl.tensor), object.__new__(interpreter.TensorHandle)
        handle.data, handle.dtype, handle.attr = data, self.dtype, {}
        tensor.__dict__.update(self.attributes)
        tensor.handle = handle
        return tensor


class _Plan(NamedTuple):
    """How to compute an operator for operands of given types.

    Attributes:
        function: of the two operands, as arrays.
        number: the number next to the tensor, as an array; None for two tensors.
        left, right: dtypes that the operands are converted to before, None for one that is used as it is.
        step: size of an element of the pointers that an offset is added to; 0 for other operands.
        form: of the result.
        types: those of the operands. A plan is found by their ids, so it keeps them.
    """

    function: Callable[..., Any]
    number: Any
    left: Any
    right: Any
    step: int
    form: _Form
    types: tuple[Any, ...]

    def compute(self, left: Any, right: Any) -> Any:
        """Return the result of two arrays."""
        if self.left is not None:
            left = left.astype(self.left)
        if self.right is not None:
            right = right.astype(self.right)
        return self.function(left, self.step * right if self.step else right)


_ALL = slice(None)
_plans: dict[str, dict[Any, _Plan | None]] = {name: {} for name in _FUNCTIONS}
"""The plans of each operator by types and number, None where only Triton gives the result."""


def quick_operator(name: str, slow: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method `name` of tensors that gives what `slow` gives."""
    if name not in _FUNCTIONS:
        return slow
    plans, tensor = _plans[name], tl.tensor

    def operate(self: Any, other: Any) -> Any:
        operand = other.value if type(other) is tl.constexpr else other
        kind = type(operand)
        if kind is tensor:
            key: Any = (id(self.type), id(operand.type))
        elif kind is int or kind is float or kind is bool:
            key = (id(self.type), kind, operand)
        else:
            return slow(self, other)
        plan = plans.get(key)
        if plan is None:
            result = slow(self, other)
            if key not in plans:
                plans[key] = _plan(name, self, operand, result)
            return result
        other_data = operand.handle.data if plan.number is None else plan.number
        return plan.form.tensor(plan.compute(self.handle.data, other_data))

    return operate


def _plan(name: str, left: Any, right: Any, result: Any) -> _Plan | None:
    """Return the plan for operands with Triton's result, None if it gives other bits."""
    is_tensor, is_pointer = type(right) is tl.tensor, isinstance(left.dtype, tl.pointer_type)
    types = [left.type, right.type] if is_tensor else [left.type]
    if any(kind.scalar.name not in _PLAIN for kind in types[is_pointer:]) or (type(right) is float and right != right):
        return None
    semantic, step = interpreter.interpreter_semantic, 0
    if is_pointer:
        step = max(1, left.dtype.element_ty.primitive_bitwidth // 8)
        operands = left, semantic.to_tensor(right)
        dtypes: list[Any] = [None, np.uint64]
    else:
        other = semantic.to_tensor(right) if name in _COMPARISONS else right
        operands = semantic.binary_op_type_checking_impl(left, other, False, False, True, name in _DIVISIONS)
        dtypes = [operand.handle.data.dtype for operand in operands]
    arrays = left.handle.data, right.handle.data if is_tensor else operands[1].handle.data
    before, after = (None if dtype == array.dtype else dtype for dtype, array in zip(dtypes, arrays, strict=True))
    number = None if is_tensor else arrays[1]
    plan = _Plan(_FUNCTIONS[name], number, before, after, step, _Form.of(result), tuple(types))
    return plan if _equal(plan.compute(*arrays), result) else None


def _equal(data: Any, result: Any) -> bool:
    """Return whether an array is that of a tensor, bit for bit."""
    want = result.handle.data
    return bool(data.dtype == want.dtype and data.shape == want.shape and data.tobytes() == want.tobytes())


def quick_index(slow: Callable[..., Any]) -> Callable[..., Any]:
    """Return `tensor.__getitem__`, which adds dims of size 1, without describing the same shape again."""
    forms: dict[Any, Any] = {}

    def index(self: Any, slices: Any) -> Any:
        if type(slices) is not tuple or not all(dim is None or dim == _ALL for dim in slices):
            return slow(self, slices)
        key = (id(self.type), *(dim is None for dim in slices))
        if key not in forms:
            result, block = slow(self, slices), self.type.is_block()
            same = block and _equal(self.handle.data[slices], result)
            forms[key] = (_Form.of(result) if same else None), self.type
            return result
        form = forms[key][0]
        return slow(self, slices) if form is None else form.tensor(self.handle.data[slices])

    return index


def quick_cast(slow: Callable[..., Any], convert: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return a conversion of a tensor to a type: `slow` for types that NumPy lacks, else `convert` of the array."""
    forms: dict[Any, Any] = {}

    def cast(x: Any, kind: Any, *rounding: Any) -> Any:
        if x.dtype is kind:
            return x
        if type(kind) is not tl.dtype or type(x.dtype) is not tl.dtype or any(mode is not None for mode in rounding):
            return slow(x, kind, *rounding)
        key = id(x.type), id(kind)
        if key not in forms:
            result = slow(x, kind)
            dtype = result.handle.data.dtype
            same = x.dtype.name in _PLAIN and kind.name in _PLAIN and _equal(convert(x.handle.data, dtype), result)
            forms[key] = (_Form.of(result) if same else None), dtype, x.type, kind
            return result
        form, dtype, *_ = forms[key]
        return slow(x, kind) if form is None else form.tensor(convert(x.handle.data, dtype))

    return cast


def quick_where(slow: Callable[..., Any]) -> Callable[..., Any]:
    """Return `where` of a condition and two tensors or numbers, without broadcasting them before."""
    plans: dict[Any, Any] = {}
    semantic = interpreter.interpreter_semantic

    def key_of(x: Any) -> Any:
        return id(x.type) if type(x) is tl.tensor else (type(x), x)

    def where(condition: Any, x: Any, y: Any) -> Any:
        key = id(condition.type), key_of(x), key_of(y)
        if key not in plans:
            result = slow(condition, x, y)
            operands = semantic.binary_op_type_checking_impl(x, y, True, True)
            numbers = [None if type(a) is tl.tensor else b.handle.data for a, b in zip((x, y), operands, strict=True)]
            arrays = [a.handle.data if b is None else b for a, b in zip((x, y), numbers, strict=True)]
            same = condition.dtype is tl.int1 and _equal(np.where(condition.handle.data, *arrays), result)
            same &= all(a.dtype is b.dtype for a, b in zip((x, y), operands, strict=True) if type(a) is tl.tensor)
            types = [operand.type for operand in (condition, x, y) if type(operand) is tl.tensor]
            plans[key] = (_Form.of(result) if same else None), numbers, types
            return result
        form, (left, right), _ = plans[key]
        if form is None:
            return slow(condition, x, y)
        left = x.handle.data if left is None else left
        return form.tensor(np.where(condition.handle.data, left, y.handle.data if right is None else right))

    return where


def quick_broadcast(slow: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that gives two tensors one shape, which it finds by their types."""
    forms: dict[Any, Any] = {}

    def broadcast(lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        key = id(lhs.type), id(rhs.type)
        if key not in forms:
            results = slow(lhs, rhs)
            pairs = list(zip((lhs, rhs), results, strict=True))
            shapes = [None if operand is got else got.handle.data.shape for operand, got in pairs]
            wide = [
                operand.handle.data if shape is None else np.broadcast_to(operand.handle.data, shape)
                for (operand, _), shape in zip(pairs, shapes, strict=True)
            ]
            same = all(_equal(data, result) for data, result in zip(wide, results, strict=True))
            forms[key] = same, [*zip(shapes, map(_Form.of, results), strict=True)], (lhs.type, rhs.type)
            return results
        possible, plans, _ = forms[key]
        if not possible:
            return slow(lhs, rhs)
        (left, left_form), (right, right_form) = plans
        if left is not None:
            lhs = left_form.tensor(np.broadcast_to(lhs.handle.data, left))
        if right is not None:
            rhs = right_form.tensor(np.broadcast_to(rhs.handle.data, right))
        return lhs, rhs

    return broadcast
