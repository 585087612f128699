"""`diverge`: run two forms of one step, and name the first layer and op with results that differ by more than rounding.

Every op of a form that runs in Python is seen, and of generated code each buffer that is the whole result of an op of
the model. Results of both forms belong together if op, line and module are the same, or else by their order.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._compat import OpOverload, pytree
from ..runtime.addresses import named_tensors
from .places import Place
from .replay.entry import observed_compiler
from .replay.observe import Launch, Observer, all_module_names, shape_text
from .replay.sources import Source, Sources, layer_of
from .rounding import Distance, distance
from .saved_call import can_save, save_call
from .writes import written_by

Form = Callable[..., Any]
_LATER = ("c10d", "_c10d")
"""Prefixes of the namespaces of torch's collectives; their results are there after a wait."""
_LISTED = 6
"""Ops between the last agreement and the first difference that are listed."""


@dataclass(slots=True)
class Result:
    """A tensor that an op returned or wrote, `name` among its results.

    `call` is the number of the launch, `ops` all ops that it computes: several of a fused kernel, `options` the names
    of arguments that differ from their defaults. `reads` has the numbers of the results that it was computed from, see
    `Origins`; None where they are not known.
    """

    source: Source
    name: str
    value: Tensor
    call: int
    generated: bool
    ops: tuple[str, ...] = ()
    reads: tuple[int, ...] | None = None
    options: frozenset[str] = frozenset()


@dataclass(slots=True)
class Divergence:
    """The first difference of two forms of a step, or that there is none.

    Attributes:
        op, name, place, module, layer: of the op with a different result, in the first form.
        ops: all ops of the kernel that computed it in the second form.
        distance: how far, the limit, and the element with both values.
        after: op and line of the last result before it that agrees.
        between: ops of either form that ran since, and have no counterpart that could be compared.
        compared: number of results that were compared.
        file: inputs and both results of the op, for `python -m dsv4_compile.debug.rerun FILE`.
        rank: the rank that differs from the others, of `diverge_ranks`.
    """

    op: str = ""
    name: str = ""
    place: Place = field(default_factory=Place)
    module: str = ""
    ops: list[str] = field(default_factory=list)
    shape: str = ""
    distance: Distance | None = None
    after: str = ""
    between: list[str] = field(default_factory=list)
    compared: int = 0
    file: Path | None = None
    rank: int | None = None

    @property
    def agrees(self) -> bool:
        """Whether no result differs by more than rounding."""
        return self.distance is None

    @property
    def layer(self) -> str:
        """Path of the layer, "layers.3", or "" outside of layers."""
        return layer_of(self.module)

    def __str__(self) -> str:
        if self.distance is None:
            return f"agree: {self.compared} results within rounding"
        far = self.distance
        lines = [
            f"differ at {self.op} ({self.name} {self.shape}) in {self.module or 'no module'}",
            f"  rank     {self.rank}" if self.rank is not None else "",
            f"  line     {self.place}  {self.place.source}",
            f"  element  {list(far.index)}: {far.got}, expected {far.want}; {far.share:.1%} of the elements differ",
            f"  distance {far.largest:.3g}, by rounding at most {far.limit:.3g}",
            f"  kernel   {', '.join(self.ops)}" if len(self.ops) > 1 else "",
            f"  after    {self.after or 'nothing: it is the first result'}",
            f"  between  {', '.join(self.between)}" if self.between else "",
            f"  replay   python -m dsv4_compile.debug.rerun {self.file}" if self.file else "",
        ]
        return "\n".join(line for line in lines if line)


def diverge(
    a: Form, b: Form, *args: Any, state: Any = (), save: str | Path | None = "divergence.pt", **kwargs: Any
) -> Divergence:
    """Run two forms of one step, and return the first result of `b` that differs from that of `a` beyond rounding.

        found = dsv4_compile.debug.diverge(model, torch.compile(model, backend="dsv4"), hidden, metadata, caches)
        print(found)

    Both run from the same state: tensors among the arguments, parameters and buffers of both, and `state` are copied
    before and restored after each run. Code that was compiled before is compiled again, here, so that its results are
    known by name. A replay on a GPU is one launch: only its outputs and `state` are compared.

    Args:
        a: the reference: a module, a function, or `lambda: ...` around a call of a runner.
        b: the other form: compiled, captured, or a different model.
        args, kwargs: of both.
        state: other tensors that a run reads or writes, in nested containers: caches, `buffers.tensors`.
        save: a file for inputs and results of the op, which `python -m dsv4_compile.debug.rerun` calls alone; None for
            none. Written if a single op of `a` can be called again: one of dsv4, or one of aten that only computes.
    """
    forms = [getattr(form, "_orig_mod", form) for form in (a, b)]
    tensors = named_tensors([args, kwargs, state, *(f for f in forms if isinstance(f, torch.nn.Module))], "state")
    with observed_compiler() as (_, sources), restored(tensors) as restore, torch.no_grad():

        def run(form: Form, keep: int | None = None) -> Run:
            restore()
            torch.manual_seed(0)
            return Run.of(form, args, kwargs, sources, tensors, keep)

        for form in (a, b):  # compile first, unobserved
            restore()
            form(*args, **kwargs)
        first, second = run(a), run(b)
        difference, call = _first_difference(first, second)
        if difference.distance is not None and save is not None and call is not None:
            again = run(a, keep=call[0])
            if again.saved is not None:
                op, positional, keywords = again.saved
                if can_save(op, positional, keywords):
                    difference.file = save_call(Path(save), op, positional, keywords, call[1], call[2])
    return difference


@dataclass(slots=True)
class Run:
    """Results of one run in the order of the launches, then its outputs and the state after it."""

    results: list[Result]
    outputs: dict[str, Tensor]
    launches: list[Launch]
    saved: tuple[OpOverload, Any, Any] | None = None
    reads: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        form: Form,
        args: Any,
        kwargs: Any,
        sources: Sources,
        state: Mapping[str, Tensor],
        keep: int | None = None,
        held: Mapping[int, int] | None = None,
        first: int = 0,
    ) -> Run:
        """Run `form` once.

        Args:
            keep: number of an op call; its arguments are copied before it runs.
            held, first: see `Origins`.
        """
        results: list[Result] = []

        def watch(launch: Launch, source: Source, written: Mapping[str, Tensor]) -> None:
            call = next(i for i in range(len(observer.launches) - 1, -1, -1) if observer.launches[i] is launch)
            if origins.pending and not launch.generated:
                return
            for name, tensor in written.items():
                copied = tensor.detach().clone()
                reads = None if launch.generated else origins.reads
                origins.made(tensor, origins.first + len(results))
                result = Result(source, name, copied, call, launch.generated, launch.source.ops, reads, launch.options)
                results.append(result)

        origins = Origins(held or {}, first)
        observer = _Keeping(keep, origins, sources, all_module_names(), watch=watch)
        with observer.observing():
            returned = form(*args, **kwargs)
        leaves = enumerate(pytree.tree_leaves(returned))
        named = {f"output {i}": leaf for i, leaf in leaves if isinstance(leaf, Tensor)} | dict(state)
        outputs = {name: tensor.detach().clone() for name, tensor in named.items()}
        read = {name: origins.of_tensors(leaf) for name, leaf in named.items()}
        return cls(results, outputs, observer.launches, observer.saved, read)


class Origins:
    """Numbers of the results that storages hold, so that a result can tell its inputs.

    Args:
        held: numbers that storages hold at the beginning, by address.
        first: number of the first result.

    Attributes:
        reads: numbers that the op reads which runs.
        pending: whether its results come later, after a wait.
    """

    def __init__(self, held: Mapping[int, int], first: int) -> None:
        self.of, self.first = dict(held), first
        self.reads: tuple[int, ...] = ()
        self.pending = False

    def before(self, func: OpOverload, given: Any) -> None:
        """Look at the arguments of an op."""
        self.pending = func.namespace.startswith(_LATER) and "wait_tensor" not in func.name()
        self.reads = self.of_tensors(given)

    def of_tensors(self, tree: Any) -> tuple[int, ...]:
        """Return the numbers that the tensors in `tree` hold."""
        return tuple(sorted({self.of[address] for address in _storages(tree) if address in self.of}))

    def made(self, tensor: Tensor, number: int) -> None:
        """Record a result."""
        self.of |= dict.fromkeys(_storages(tensor), number)

    def after(self, func: OpOverload, args: Any, kwargs: Any, out: Any) -> None:
        """Forget the results that new memory held, and results that are still to come."""
        new = _storages(out) - _storages((args, kwargs)) if func.name().startswith("aten::empty") else set()
        if self.pending:
            new = _storages((out, list(written_by(func, args, kwargs))))
        for address in new:
            self.of.pop(address, None)


def _storages(tree: Any) -> set[int]:
    leaves = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.numel())
    return {leaf.untyped_storage().data_ptr() for leaf in leaves}


class _Keeping(Observer):
    """Observer that copies the arguments of one op call, and knows what each op reads."""

    def __init__(self, keep: int | None, origins: Origins, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._keep, self._origins = keep, origins
        self.saved: tuple[OpOverload, Any, Any] | None = None

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and copy its arguments before if it is the call to keep."""
        copied = None
        if len(self.launches) == self._keep:
            copied = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
        before = len(self.launches)
        kwargs = kwargs or {}
        self._origins.before(func, (args, kwargs))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self._origins.after(func, args, kwargs, out)
        if copied is not None and len(self.launches) > before:
            self.saved = (func, *copied)
        return out


@contextmanager
def restored(tensors: Mapping[str, Tensor]) -> Any:
    """Yield a function that gives tensors the values that they have now; it is called at the end too."""
    saved = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def restore() -> None:
        with torch.inference_mode():
            for name, tensor in tensors.items():
                tensor.detach().copy_(saved[name])

    try:
        yield restore
    finally:
        restore()


def _first_difference(first: Run, second: Run) -> tuple[Divergence, tuple[int, Tensor, Tensor] | None]:
    """Return the first difference, and number of the op's call in `first` with both results."""
    pairs = _pairs(first.results, second.results)
    before, agreed = 0.0, -1
    for count, (mine, other) in enumerate(pairs, 1):
        far = distance(other.value, mine.value, before)
        if far.differs:
            difference = _described(mine, other, far, count)
            difference.after, difference.between = _since(agreed, pairs, count - 1, first, second)
            return difference, (mine.call, mine.value, other.value)
        agreed = count - 1
        before = max(before, far.largest) if mine.value.is_floating_point() else before
    for name, value in first.outputs.items():
        other_value = second.outputs.get(name)
        if other_value is None or other_value.shape != value.shape:
            other_value = torch.full_like(value, torch.nan) if value.is_floating_point() else ~value
        far = distance(other_value, value, before)
        if far.differs:
            writer = next((r for r in reversed(first.results) if _equal(r.value, value)), None)
            difference = Divergence(name=name, op="unknown", shape=shape_text(value), distance=far, compared=len(pairs))
            if writer is not None:
                source = writer.source
                difference.op, difference.place, difference.module = source.op, source.place, source.module
            difference.after, difference.between = _since(agreed, pairs, len(pairs), first, second)
            return difference, None
    return Divergence(compared=len(pairs) + len(first.outputs)), None


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _described(mine: Result, other: Result, far: Distance, count: int) -> Divergence:
    source = mine.source
    shape, ops = shape_text(mine.value), list(other.ops)
    return Divergence(source.op, mine.name, source.place, source.module, ops, shape, far, compared=count)


def _pairs(first: Sequence[Result], second: Sequence[Result]) -> list[tuple[Result, Result]]:
    """Return results that belong together, in the order of the second form.

    Those of the same op, line and module first, in their order; between them, those of the same op by order. A fused
    call that computes more than its op is known by its options, and has no partner.
    """
    waiting: dict[tuple[Any, ...], list[int]] = {}
    for i, result in enumerate(first):
        waiting.setdefault(_key(result), []).append(i)
    partner: dict[int, int] = {}
    for j, result in enumerate(second):
        known = waiting.get(_key(result), [])
        # A buffer's name is none of an op's results.
        match = next((i for i in known if result.generated or first[i].name == result.name), None)
        if match is not None:
            known.remove(match)
            partner[j] = match
    rest_first = [i for i in range(len(first)) if i not in set(partner.values())]
    rest_second = [j for j in range(len(second)) if j not in partner and not second[j].generated]
    matcher = difflib.SequenceMatcher(
        a=[_loose(first[i]) for i in rest_first], b=[_loose(second[j]) for j in rest_second], autojunk=False
    )
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag == "equal" or (tag == "replace" and i_end - i == j_end - j):
            for index, other in zip(rest_first[i:i_end], rest_second[j:j_end], strict=True):
                one, two = first[index], second[other]
                fused = one.source.op == two.source.op and one.options != two.options
                if one.value.shape == two.value.shape and not fused:
                    partner[other] = index
    return [(first[i], second[j]) for j, i in sorted(partner.items())]


def _key(result: Result) -> tuple[Any, ...]:
    source, value = result.source, result.value
    where = source.place.file, source.place.line, source.module
    return source.op, result.options, *where, tuple(value.shape), value.dtype


def _loose(result: Result) -> tuple[Any, ...]:
    return result.source.op, result.options, result.name, tuple(result.value.shape)


def _since(
    agreed: int, pairs: Sequence[tuple[Result, Result]], at: int, first: Run, second: Run
) -> tuple[str, list[str]]:
    """Return the last agreeing result, and the ops of both forms since it that were not compared."""
    last = pairs[agreed] if agreed >= 0 else None
    end = pairs[at] if at < len(pairs) else None
    after = f"{last[0].source.op} at {last[0].source.place}" if last is not None else ""
    compared = [{id(pair[side]) for pair in pairs} for side in (0, 1)]
    between: list[str] = []
    for side, run in enumerate((first, second)):
        low = last[side].call if last is not None else -1
        high = end[side].call if end is not None else len(run.launches)
        calls = {r.call for r in run.results if id(r) in compared[side]}
        names = [launch.source.op for i, launch in enumerate(run.launches) if low < i < high and i not in calls]
        between += [f"{name} of the {'first' if side == 0 else 'second'}" for name in names]
    return after, between[:_LISTED]
