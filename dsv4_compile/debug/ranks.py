"""`diverge_ranks`: run the same step on all ranks, and name the first op whose result is not the same on all of them.

Ranks exchange hashes of all results, then the values of those that differ, until one differs beyond rounding. All
ranks decide by what they have all seen, so they return the same.
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
    """A tensor of one rank as the others see it: before the step, of an op, or after the step."""

    op: str
    place: Place
    module: str
    name: str
    shape: str
    part: bool
    bits: str

    @property
    def what(self) -> tuple[Any, ...]:
        """Equal for rows of ranks that run the same code."""
        return self.op, self.place.line, self.module, self.name, "" if self.part else self.shape


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
            splits a model. What an op makes of a part is not compared until a collective has joined it, nor are results
            of generated code in a form with parts.

    Raises E701 without a process group, and E702 on all ranks if the form fails on one.
    """
    ranks = _ranks(group)
    module = getattr(form, "_orig_mod", form)
    tensors = named_tensors([args, kwargs, state, *([module] if isinstance(module, nn.Module) else [])], "state")
    is_part = _splits(module) if parts is None else parts
    table = _Table()
    failure: BaseException | None = None
    with observed_compiler() as (_, sources), restored(tensors) as restore, torch.no_grad():
        try:
            form(*args, **kwargs)  # compile first, unobserved
            restore()
            torch.manual_seed(0)
            own = [p for name, p in module.named_parameters() if is_part(name)] if isinstance(module, nn.Module) else []
            held = {tensor.untyped_storage().data_ptr() for tensor in own}
            for name, tensor in tensors.items():
                part = tensor.untyped_storage().data_ptr() in held
                table.add("before the step", Place(), "", name, tensor, part)
            run = Run.of(form, args, kwargs, sources, tensors, parts=own)
            for result in run.results:
                table.add_result(result)
            for name, tensor in run.outputs.items():
                table.add("after the step", Place(), "", name, tensor, bool(own))
        except Exception as error:
            failure = error
    text = "" if failure is None else f"{type(failure).__name__}: {failure}".splitlines()[0]
    failed = {rank: each for rank, each in enumerate(gather_objects(text, ranks)) if each}
    if failed:
        got = "; ".join(f"rank {rank}: {each}" for rank, each in failed.items())
        fail("E702", got=f"the form failed on {got}", fix="run it on each rank without diverge_ranks first")
    return table.compare(ranks)


class _Table:
    """Tensors of one run on this rank, in their order."""

    def __init__(self) -> None:
        self.rows: list[_Row] = []
        self.values: list[Tensor] = []

    def add(self, op: str, place: Place, module: str, name: str, tensor: Tensor, part: bool) -> None:
        """Add a tensor."""
        value = tensor.detach().cpu().contiguous()
        bits = hashlib.blake2b(value.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest() if value.numel() else ""
        self.rows.append(_Row(op, place, module, name, shape_text(tensor), part, bits))
        self.values.append(value.clone() if value.data_ptr() == tensor.data_ptr() else value)

    def add_result(self, result: Result) -> None:
        """Add a result of an op."""
        source = result.source
        self.add(source.op, source.place, source.module, result.name, result.value, result.part)

    def compare(self, ranks: Ranks) -> Divergence:
        """Return the first difference of all ranks' tables."""
        tables: list[list[_Row]] = gather_objects(self.rows, ranks)
        rounding, after = 0.0, ""
        compared = 0
        for index in range(max(map(len, tables))):
            rows = [table[index] if index < len(table) else None for table in tables]
            first = next(row for row in rows if row is not None)
            usual = _most([None if row is None else row.what for row in rows])
            odd = next((rank for rank, row in enumerate(rows) if (None if row is None else row.what) != usual), None)
            if odd is not None:
                return self._other_op(index, rows, usual, odd, after)
            if any(row is not None and row.part for row in rows):
                continue
            compared += 1
            bits = [row.bits for row in rows if row is not None]
            if len(set(bits)) > 1:
                values: list[Tensor] = gather_objects(self.values[index], ranks)
                right = values[bits.index(_most(bits))]
                for rank, value in enumerate(values):
                    far = distance(value, right, rounding)
                    if far.differs:
                        found = self._found(first, rank, after)
                        found.distance, found.compared = far, compared
                        return found
                    rounding = max(rounding, far.largest) if value.is_floating_point() else rounding
            after = f"{first.op} ({first.name})" + (f" at {first.place}" if first.place.line else "")
        return Divergence(compared=compared)

    def _found(self, row: _Row, rank: int, after: str) -> Divergence:
        return Divergence(row.op, row.name, row.place, row.module, shape=row.shape, after=after, rank=rank)

    def _other_op(self, index: int, rows: Sequence[_Row | None], usual: Any, odd: int, after: str) -> Divergence:
        """Return that a rank runs another op, or gets another shape, than most do."""
        texts = [_NOT_THERE if row is None else f"{row.op} {row.shape}, line {row.place.line}" for row in rows]
        right = next(rank for rank, row in enumerate(rows) if (None if row is None else row.what) == usual)
        row = next(row for row in (rows[right], rows[odd]) if row is not None)
        found = self._found(row, odd, after)
        found.distance = Distance(math.inf, 0.0, (), texts[odd], texts[right], 1.0)
        found.compared = index
        return found


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


def _splits(module: Any) -> Callable[[str], bool]:
    """Return which parameters of a converted model are parts; none of any other form."""
    part = next((m.__dict__["dsv4_part"] for m in _modules(module) if "dsv4_part" in m.__dict__), None)
    return lambda name: part is not None and split_of(name, part[1]) is not None


def _modules(module: Any) -> Sequence[nn.Module]:
    return list(module.modules()) if isinstance(module, nn.Module) else []
