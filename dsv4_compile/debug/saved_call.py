"""Files of saved op calls: written by `diverge`, and checked before anything that they hold is used.

A file is data of strangers. It names an op of this package, or an op of torch that computes a result from its tensors
and does nothing else; it holds plain values and dense tensors; and a call may return little more than the file holds.
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._compat import OpOverload, pytree
from ..errors import DSV4Error, check, fail, printable
from ..ops.common.define import OPS

SCHEMA = "dsv4.call/1"
_KEYS = {"schema", "op", "overload", "args", "kwargs", "first", "second"}
_RULE = f"a saved call has schema {SCHEMA}, an op of dsv4 or a pure op of aten, plain values and dense tensors"
_FIX = "pass a file that diverge has written"

_PURE = """
abs add addcdiv addcmul addmm addmv all amax amin any argmax argmin baddbmm bitwise_and bitwise_not bitwise_or
bitwise_xor bmm cat ceil clamp clamp_max clamp_min clone constant_pad_nd copy cos cumprod cumsum div dot embedding
eq erf exp exp2 expm1 floor floor_divide fmod gather ge gelu glu gt hardtanh index index_add index_copy index_fill
index_put index_select isinf isnan le leaky_relu linalg_vector_norm linear log log1p log2 logical_and logical_not
logical_or logical_xor logsumexp lt masked_fill matmul max maximum mean min minimum mm mul mv native_layer_norm ne
neg pow prod reciprocal relu remainder roll round rsqrt rsub scatter scatter_add scatter_reduce select_scatter
sigmoid sign silu sin slice_scatter softplus sort sqrt stack std sub sum tanh topk tril triu trunc var var_mean
where _fused_rms_norm _log_softmax _softmax _to_copy
add_ addcmul_ bitwise_and_ bitwise_or_ clamp_ clamp_max_ clamp_min_ copy_ cumsum_ div_ exp_ fill_ floor_ index_add_
index_copy_ index_fill_ index_put_ logical_and_ logical_not_ logical_or_ masked_fill_ mul_ neg_ pow_ reciprocal_
relu_ round_ rsqrt_ scatter_ scatter_add_ scatter_reduce_ sigmoid_ silu_ sqrt_ sub_ tanh_ zero_
"""
PURE = frozenset(_PURE.split())
"""Ops of aten that compute results, or write one of their tensors, and touch nothing else."""
_GLOBALS = frozenset(
    {
        "collections OrderedDict",
        "torch device",
        "torch.storage UntypedStorage",
        "torch._utils _rebuild_tensor_v2",
        "torch._utils _rebuild_tensor_v3",
        *(f"torch {dtype}Storage" for dtype in ("BFloat16", "Half", "Float", "Double", "Byte", "Char", "Short")),
        *(f"torch {dtype}Storage" for dtype in ("Int", "Long", "Bool")),
    }
)
"""Names that the pickle of such a file refers to, dtypes excepted."""
_DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
_NAMES = {str(dtype).replace(".", " ") for dtype in _DTYPES}
_DIVISIONS = ("div", "div_", "floor_divide", "fmod", "remainder")
_PLACEMENTS = ("layout", "memory_format", "pin_memory")
"""Keywords of ops for the memory of a result, without effect on its values."""

_MOST_PICKLE_BYTES = 1 << 20
_MOST_RECORDS = 4096
_MOST_VALUES, _DEEPEST = 4096, 4
"""Values of a call, and lists within lists."""
_MOST_INT = 1 << 20
"""Largest integer of a call of dsv4: sizes, counts and offsets of a step."""
_MOST_BY_NAME = {"iterations": 1000, "max_logits_bytes": 1 << 30}
_SHARED = 4
"""Tensors of a call may have their storages in common: so many times the bytes of the file."""
_RESULT_TIMES, _RESULT_BYTES = 16, 1 << 20
"""A call may return so many times the bytes of the file's tensors, and so many bytes more."""


@dataclass(frozen=True, slots=True)
class SavedCall:
    """A call of `op`, with one of its results in two forms."""

    op: OpOverload
    args: list[Any]
    kwargs: dict[str, Any]
    first: Tensor
    second: Tensor


def can_save(op: OpOverload, args: Any, kwargs: Any) -> bool:
    """Return whether a call of `op` can be called again from a file."""
    name, overload = op.name(), op._overloadname
    try:
        return overload_of(name, overload) is op and _count(_plain([args, [*_values(kwargs).values()]]), "the call") > 0
    except DSV4Error:
        return False


def save_call(path: Path, op: OpOverload, args: Any, kwargs: Any, first: Tensor, second: Tensor) -> Path:
    """Write a call of `op` and one of its results in both forms to `path`, and return it. E201 unless `can_save`."""
    check(can_save(op, args, kwargs), "E201", got=f"a call of {op.name()}", rule=_RULE, fix="save nothing of it")
    header = {"schema": SCHEMA, "op": op.name(), "overload": op._overloadname}
    content = {**header, "args": _plain(args), "kwargs": _plain(_values(kwargs)), "first": first, "second": second}
    torch.save(content, path)
    return path


def load_call(path: str | Path) -> SavedCall:
    """Return the call that `save_call` wrote. E201 for any other file; nothing of it is executed or imported."""
    path = Path(path)
    check(path.is_file(), "E201", got=f"no file {str(path)!r}", rule=_RULE, fix=_FIX)
    _check_archive(path)
    try:
        content = torch.load(path, weights_only=True, map_location=None if torch.cuda.is_available() else "cpu")
    except Exception as fault:
        _refuse(f"{path.name}, which torch does not load", fault)
    schema = content.get("schema") if isinstance(content, dict) else type(content).__name__
    if schema != SCHEMA:
        _refuse(f"schema {str(schema)[:40]!r}")
    if set(content) != _KEYS:
        _refuse(f"a call with {sorted(map(str, content))[:10]}")
    op = overload_of(content["op"], content["overload"])
    args, kwargs, first, second = (content[name] for name in ("args", "kwargs", "first", "second"))
    if not isinstance(args, list) or not isinstance(kwargs, dict) or not all(isinstance(name, str) for name in kwargs):
        _refuse(f"arguments of type {type(args).__name__} and keywords of type {type(kwargs).__name__}")
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or first.shape != second.shape:
        _refuse("two results of unequal shape")
    held = _count([args, list(kwargs.values()), first, second], path.name)
    if held > _SHARED * path.stat().st_size:
        _refuse(f"{held:,} bytes of tensors in a file of {path.stat().st_size:,}")
    call = SavedCall(op, args, kwargs, first, second)
    _check_sizes(call, held)
    _check_division(call)
    return call


def overload_of(name: Any, overload: Any) -> OpOverload:
    """Return the overload of an op that a file may call, by `dsv4::mhc_post` or `aten::add.Tensor`. E201 for others."""
    if not isinstance(name, str) or not isinstance(overload, str):
        _refuse(f"an op of type {type(name).__name__}")
    namespace, _, rest = name.partition("::")
    packet, _, suffix = rest.partition(".")
    if (suffix or "default") == overload:
        if namespace == "dsv4" and overload == "default" and packet in OPS:
            return OPS[packet]
        if namespace == "aten" and packet in PURE and overload in getattr(torch.ops.aten, packet).overloads():
            op: OpOverload = getattr(getattr(torch.ops.aten, packet), overload)
            # Overloads for scalars, lists and text of TorchScript check nothing: remainder.int(1, 0) ends the process.
            on_tensors = any("Tensor" in str(argument.type) for argument in op._schema.arguments)
            if on_tensors and not any(argument.is_out for argument in op._schema.arguments):
                return op
    _refuse(f"op {name[:80]!r}, overload {overload[:40]!r}")


def _check_archive(path: Path) -> None:
    """Raise E201 for an archive that unpacks to more than its size, or has a pickle with other names than ours."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            names = {record.filename for record in records}
            pickled = [record for record in records if record.filename.endswith("data.pkl")]
            size = sum(record.file_size for record in records)
            packed = any(record.compress_type != zipfile.ZIP_STORED for record in records)
            if len(names) != len(records) or len(records) > _MOST_RECORDS or len(pickled) != 1:
                _refuse(f"an archive of {len(records)} records")
            if packed or size > path.stat().st_size or pickled[0].file_size > _MOST_PICKLE_BYTES:
                _refuse(f"records of {size:,} bytes in {path.stat().st_size:,}")
            for opcode, argument, _ in pickletools.genops(archive.read(pickled[0])):
                refers = opcode.name == "GLOBAL" and (argument in _GLOBALS or argument in _NAMES)
                if not refers and ("GLOBAL" in opcode.name or opcode.name.startswith(("EXT", "INST", "OBJ", "NEWOBJ"))):
                    _refuse(f"a pickle with {opcode.name} {str(argument)[:80]!r}")
    except DSV4Error:
        raise
    except Exception as fault:
        _refuse(f"{path.name}, which is not an archive of torch.save", fault)


def _count(tree: Any, name: str) -> int:
    """Return the bytes of all tensors in `tree`. E201 for values of other kinds, and for too many."""
    total = 0
    for number, (value, depth) in enumerate(_walk(tree)):
        if number > _MOST_VALUES or depth > _DEEPEST:
            _refuse(f"{name} with more than {_MOST_VALUES} values, or lists deeper than {_DEEPEST}")
        if isinstance(value, Tensor):
            total += _bytes(value)
        elif isinstance(value, torch.device):
            if value.type not in ("cpu", "cuda"):
                _refuse(f"device {value}")
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            _refuse("an integer of more than 64 bits")
        elif value is not None and not isinstance(value, (bool, int, float, str, torch.dtype)):
            _refuse(f"a value of type {type(value).__name__}")
    return max(total, 1)


def _walk(tree: Any, depth: int = 0) -> Iterator[tuple[Any, int]]:
    """Yield the leaves of lists, each with its depth; a list that is too deep is a leaf, so that no walk is endless."""
    if not isinstance(tree, list) or depth > _DEEPEST:
        yield tree, depth
        return
    for value in tree:
        yield from _walk(value, depth + 1)


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a plain tensor with all its elements in its storage. E201 for any other."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        _refuse(f"a tensor of type {type(tensor).__name__}, layout {tensor.layout}")
    if tensor.dtype not in _DTYPES or tensor.device.type not in ("cpu", "cuda") or tensor.is_neg():
        _refuse(f"a tensor of {tensor.dtype} on {tensor.device}")
    size = tensor.numel() * tensor.itemsize
    if size > tensor.untyped_storage().nbytes():
        _refuse(f"a tensor of {size:,} bytes in a storage of {tensor.untyped_storage().nbytes():,}")
    return size


def _check_sizes(call: SavedCall, held: int) -> None:
    """Raise E201 for integers or results larger than those of a step; the call is first made without memory."""
    declared = [argument.name for argument in call.op._schema.arguments]
    for name, value in [*zip(declared, call.args, strict=False), *call.kwargs.items()]:
        most = _MOST_BY_NAME.get(name, _MOST_INT)
        if call.op.namespace == "dsv4" and isinstance(value, int) and abs(value) > most:
            _refuse(f"{name} = {value} of {call.op.name()}, at most {most}")
    args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.to("meta"), (call.args, call.kwargs))
    try:
        with torch.no_grad():
            returned = call.op(*args, **{n: "meta" if n == "device" else value for n, value in kwargs.items()})
    except Exception as fault:
        _refuse(f"a call of {call.op.name()} that it does not take", fault)
    sizes = [leaf.numel() * leaf.itemsize for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]
    if sum(sizes) > _RESULT_TIMES * held + _RESULT_BYTES:
        _refuse(f"a call of {call.op.name()} that returns {sum(sizes):,} bytes from {held:,}")


def _check_division(call: SavedCall) -> None:
    """Raise E201 for integers with a quotient by -1 beyond 64 bits: a CPU that divides them ends the process."""
    if call.op.namespace != "aten" or call.op.overloadpacket.__name__ not in _DIVISIONS:
        return
    tensors = (value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor) and value.numel())
    for value in tensors:
        is_signed_int = not value.is_floating_point() and value.dtype.is_signed
        if is_signed_int and int(value.min()) == torch.iinfo(value.dtype).min:
            _refuse(f"a division of {int(value.min())}")


def _plain(tree: Any) -> Any:
    """Return `tree` with lists for tuples, and tensors for parameters, which `_walk` and `load_call` know."""
    if isinstance(tree, torch.nn.Parameter):
        return tree.detach()
    if isinstance(tree, (list, tuple)):
        return [_plain(item) for item in tree]
    if isinstance(tree, dict):
        return {name: _plain(item) for name, item in tree.items()}
    return tree


def _values(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (kwargs or {}).items() if name not in _PLACEMENTS}


def _refuse(got: str, fault: Exception | None = None) -> NoReturn:
    why = f"{type(fault).__name__}: {(str(fault).splitlines() or [''])[0][:200]}" if fault is not None else ""
    fail("E201", got=printable(got), why=printable(why), rule=_RULE, fix=_FIX)
