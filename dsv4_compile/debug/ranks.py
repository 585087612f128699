"""`diverge_ranks`: run the same step on all ranks, and name the first op with a result that differs between them.

Ranks exchange hashes of all results, then the values of those that differ, until one differs beyond rounding. All ranks
decide by exchanged data, so they return the same.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import check, fail
from ..parallel import Ranks, gather_objects, split_of
from ..runtime.addresses import named_tensors
from .divergence import Divergence, Form, Result, Run, restored
from .places import Place
from .replay.entry import observed_compiler
from .replay.observe import shape_text
from .rounding import Distance, distance

_NOT_THERE = "nothing"


class _Row(NamedTuple):
    """A tensor of one rank as the others see it: before the step, of an op, or after the step.

    `is_part` says that ranks may have different ones by themselves, `reads` the rows that it was computed from, None
    for any.
    """

    op: str
    place: Place
    module: str
    name: str
    shape: str
    is_part: bool
    reads: tuple[int, ...] | None
    bits: str

    @property
    def what(self) -> tuple[Any, ...]:
        """Equal for rows of ranks that run the same code."""
        return self.op, self.place.line, self.module, self.name


def diverge_ranks(
    form: Form,
    *args: Any,
    group: Any = None,
    state: Any = (),
    parts: Callable[[str], bool] | None = None,
    **kwargs: Any,
) -> Divergence:
    """Run `form` on all ranks, each with its arguments, and return the first result that differs on one of them.

        found = dsv4_compile.debug.diverge_ranks(model, hidden, metadata, caches)  # on every rank
        print(found)  # the same on all: op, line, layer, rank, the element with both values

    Arguments, parameters and `state` are compared first, then each result of an op that Python code or generated code
    makes, then outputs and state. With more than two ranks, the value that most of them have is taken for the right
    one, otherwise that of rank 0. The tensors are restored afterwards.

    Args:
        form: a module or function. It may contain collectives of the same group.
        args, kwargs: its arguments on this rank.
        group: the process group, or a mesh of one dim; None for all ranks.
        state: other tensors that it reads or writes, in nested containers.
        parts: whether ranks have different parts of a parameter, by its name; None for none, or as `hf.convert(mesh=)`
            splits a model. Tensors that are computed from parts, or inside a module that holds one, may differ, and so
            may tensors computed from these, until they are the same again: after a collective.

    Raises E701 without a process group, and E702 on all ranks if the form fails on one. A rank that fails before one of
    the form's own collectives leaves the others waiting for the timeout of the group, as it does without this.
    """
    ranks = _ranks(group)
    module = getattr(form, "_orig_mod", form)
    tensors = named_tensors([args, kwargs, state, *([module] if isinstance(module, nn.Module) else [])], "state")
    table = _Table()
    failure: BaseException | None = None
    with observed_compiler() as (_, sources), restored(tensors) as restore, torch.no_grad():
        try:
            form(*args, **kwargs)  # compile first, unobserved
            restore()
            torch.manual_seed(0)
            parts_of = _Parts(module, _splits(module) if parts is None else parts)
            held, part_names = dict[int, int](), set[str]()
            for index, (name, tensor) in enumerate(tensors.items()):
                is_part = parts_of.has(tensor)
                table.add("before the step", Place(), "", name, tensor, is_part, ())
                part_names |= {name} if is_part else set()
                address = tensor.untyped_storage().data_ptr()
                # Weights may be rows of one matrix: it is a part if one of them is.
                held[address] = index if is_part else held.get(address, index)
            run = Run.of(form, args, kwargs, sources, tensors, held=held, first=len(tensors))
            for result in run.results:
                table.add_result(result, parts_of)
            for name, tensor in run.outputs.items():
                table.add("after the step", Place(), "", name, tensor, name in part_names, run.reads[name])
        except Exception as error:
            failure = error
    text = "" if failure is None else f"{type(failure).__name__}: {failure}".splitlines()[0]
    failed = {rank: message for rank, message in enumerate(gather_objects(text, ranks)) if message}
    if failed:
        got = "; ".join(f"rank {rank}: {message}" for rank, message in failed.items())
        fail("E702", got=f"the form failed on {got}", fix="run it on each rank without diverge_ranks first")
    return table.compare(ranks)


class _Table:
    """Tensors of one run on this rank, in their order."""

    def __init__(self) -> None:
        self.rows: list[_Row] = []
        self.values: list[Tensor] = []

    def add(self, op: str, place: Place, module: str, name: str, tensor: Tensor, is_part: bool, reads: Any) -> None:
        """Add a tensor."""
        value = tensor.detach().cpu().contiguous()
        bits = hashlib.blake2b(value.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest() if value.numel() else ""
        self.rows.append(_Row(op, place, module, name, shape_text(tensor), is_part, reads, bits))
        self.values.append(value.clone() if value.data_ptr() == tensor.data_ptr() else value)

    def add_result(self, result: Result, parts: _Parts) -> None:
        """Add a result of an op."""
        source = result.source
        reads = result.reads if result.reads is not None or parts.names else ()
        is_part = parts.made_in(source.module)
        self.add(source.op, source.place, source.module, result.name, result.value, is_part, reads)

    def compare(self, ranks: Ranks) -> Divergence:
        """Return the first difference of all ranks' tables."""
        tables: list[list[_Row]] = gather_objects(self.rows, ranks)
        rounding, after, compared = 0.0, "", 0
        parts: set[int] = set()
        for index in range(max(map(len, tables))):
            rows = [table[index] if index < len(table) else None for table in tables]
            first = next(row for row in rows if row is not None)
            usual = _most([None if row is None else row.what for row in rows])
            odd = next((rank for rank, row in enumerate(rows) if (None if row is None else row.what) != usual), None)
            if odd is not None:
                return self._other_op(index, rows, usual, odd, after)
            compared += 1
            present = [row for row in rows if row is not None]
            bits = [row.bits for row in present]
            if len(set(bits)) == 1:
                after = f"{first.op} ({first.name})" + (f" at {first.place}" if first.place.line else "")
                continue
            # What was made of parts may differ.
            if any(row.is_part or row.reads is None or parts.intersection(row.reads) for row in present):
                parts.add(index)
                continue
            values: list[Tensor] = gather_objects(self.values[index], ranks)
            right = values[bits.index(_most(bits))]
            for rank, value in enumerate(values):
                if value.shape != right.shape:
                    return self._other_op(index, rows, usual, rank, after)
                far = distance(value, right, rounding)
                if far.differs:
                    difference = self._found(first, rank, after)
                    difference.distance, difference.compared = far, compared
                    return difference
                rounding = max(rounding, far.largest) if value.is_floating_point() else rounding
            after = f"{first.op} ({first.name})" + (f" at {first.place}" if first.place.line else "")
        return Divergence(compared=compared)

    def _found(self, row: _Row, rank: int, after: str) -> Divergence:
        return Divergence(row.op, row.name, row.place, row.module, shape=row.shape, after=after, rank=rank)

    def _other_op(self, index: int, rows: Sequence[_Row | None], usual: Any, odd: int, after: str) -> Divergence:
        """Return that a rank differs from most in the op that it runs, or in its shape."""
        texts = [_NOT_THERE if row is None else f"{row.op} {row.shape}, line {row.place.line}" for row in rows]
        right = next(rank for rank, row in enumerate(rows) if (None if row is None else row.what) == usual)
        row = next(row for row in (rows[right], rows[odd]) if row is not None)
        difference = self._found(row, odd, after)
        difference.distance = Distance(math.inf, 0.0, (), texts[odd], texts[right], 1.0)
        difference.compared = index
        return difference


def _most(values: Sequence[Any]) -> Any:
    """Return the value that most ranks have; of equally many, that of the lowest rank."""
    return Counter(values).most_common(1)[0][0]


def _ranks(group: Any) -> Ranks:
    """Return the ranks of a group, of a mesh, or of all processes."""
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    check(ready, "E701", got="no process group", fix="call torch.distributed.init_process_group on each rank first")
    if hasattr(group, "get_coordinate"):
        return Ranks.of(group)
    group = torch.distributed.group.WORLD if group is None else group
    return Ranks(torch.distributed.get_rank(group), torch.distributed.get_world_size(group), str(group.group_name))


class _Parts:
    """Parameters that are split over ranks, and the modules that hold them."""

    def __init__(self, form: Any, is_part: Callable[[str], bool]) -> None:
        named = dict(form.named_parameters()) if isinstance(form, nn.Module) else {}
        self.names = [name for name in named if is_part(name)]
        self._storages = {named[name].untyped_storage().data_ptr() for name in self.names}
        self._modules = {name.rpartition(".")[0] for name in self.names} - {""}

    def has(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is a part."""
        return tensor.untyped_storage().data_ptr() in self._storages

    def made_in(self, module: str) -> bool:
        """Return whether an op runs in a module with parts, which knows its rank."""
        return any(module == holder or module.startswith(f"{holder}.") for holder in self._modules)


def _splits(module: Any) -> Callable[[str], bool]:
    """Return which parameters of a converted model are parts; none of any other form."""
    shard = next((m.__dict__["dsv4_part"] for m in _modules(module) if "dsv4_part" in m.__dict__), None)
    return lambda name: shard is not None and split_of(name, shard[1]) is not None


def _modules(module: Any) -> Sequence[nn.Module]:
    return list(module.modules()) if isinstance(module, nn.Module) else []
