"""`check_batch_invariant`: the same request alone and among others, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch

from .._compat import OpOverload, OpOverloadPacket
from ..errors import check, fail
from ..lowering import registry
from ..lowering.invariant import PREFIX
from ..ops.common.define import OPS
from ..ops.common.invariance import CLAIMS, STEP, TOKENS, row_places
from .invariant_rows import Args, check_rows


class InvarianceReport(NamedTuple):
    """Rows of a target that were compared without a difference.

    Attributes:
        target: name of the op, or class of the model.
        compositions: random calls, or batches of requests.
        rows: rows, or tokens, that were compared.
    """

    target: str
    compositions: int
    rows: int


def check_batch_invariant(
    target: Any,
    args: Sequence[Args] | None = None,
    *,
    rows: Collection[int] | None = None,
    compositions: int = 20,
    seed: int = 0,
    level: str = TOKENS,
    **options: Any,
) -> InvarianceReport:
    """Compare rows of random calls with the same rows alone, and raise AssertionError for the first bit that differs.

    Args:
        target: an op of this package, or its name: its implementation with `dsv4.batch_invariant`, on the device of its
            arguments. Any other function: it is called as it is. A converted model: its calls as they are compiled, see
            `invariant_models.check_model`. A `RunningBatch` without requests: see `invariant_models.check_running`.
        args: argument tuples of an op or a function; None takes the samples of an op on a CPU.
        rows: indices of the arguments of a function that have a row for each row of its results.
        compositions: random calls for each of `args`, or batches of requests.
        seed: of the random choices.
        level: "step" or "tokens", a value of `dsv4.batch_invariant`, for ops.
        options: further arguments of `check_model` or `check_running`.

    Raises E303 for an op without a claim, E201 for other targets.
    """
    check(level in (STEP, TOKENS), "E201", got=f"level={level!r}", rule=f"level is {STEP!r} or {TOKENS!r}")
    generator = torch.Generator().manual_seed(seed)
    if isinstance(target, str):
        check(target in OPS, "E201", got=f"{target!r}", rule="a name is that of an op in torch.ops.dsv4")
        target = OPS[target]
    if isinstance(target, OpOverloadPacket):
        target = target.default
    if isinstance(target, OpOverload) and target.namespace == "dsv4":
        return _check_op(target._schema.name.removeprefix("dsv4::"), args, compositions, generator, level)
    models = _models(target)
    if models is not None:
        checked = models(target, compositions=compositions, generator=generator, **options)
        return InvarianceReport(type(target).__name__, compositions, checked)
    if not callable(target) or args is None or rows is None:
        wrapped = hasattr(target, "_orig_mod")
        fail(
            "E201",
            got=f"{type(target).__name__}" + ("" if not callable(target) else " without args or rows"),
            rule="the target is an op, a converted model, a RunningBatch, or a function with args and rows",
            fix="compile the model in place, model.compile(...), and pass the model" if wrapped else "",
        )
    tuples = isinstance(args, Sequence) and all(isinstance(values, (tuple, list)) for values in args)
    check(tuples, "E201", got=f"args={type(args).__name__}", rule="args is a list of argument tuples, [(x, weight)]")
    for number, values in enumerate(args):
        label = f"{getattr(target, '__name__', target)} on sample {number}"
        check_rows(target, values, rows, compositions=compositions, generator=generator, label=label)
    return InvarianceReport(getattr(target, "__name__", str(target)), compositions, _rows(args, rows))


def _models(target: Any) -> Callable[..., int] | None:
    """Return the check of a model or a running batch; None for other targets. Looks before it imports transformers."""
    kind = {base.__module__ for base in type(target).__mro__}
    if not any(name.startswith("dsv4_compile.hf.") for name in kind):
        return None
    from . import invariant_models

    return invariant_models.check_of(target)


def _rows(args: Sequence[Args], rows: Collection[int]) -> int:
    return sum(next(values[i].shape[0] for i in rows if values[i] is not None) for values in args)


def _check_op(
    op: str, args: Sequence[Args] | None, compositions: int, generator: torch.Generator, level: str
) -> InvarianceReport:
    from .samples import op_samples

    claims = CLAIMS.get(op)
    if claims is None or not claims.rows:
        exact = claims is not None and claims.exact
        fail(
            "E303",
            got=f"torch.ops.dsv4.{op}",
            why="its results are of the whole batch, integers and copies" if exact else "it claims nothing",
            fix="check the model that calls it" if exact else "pass an op with a claim, or a function, args and rows",
        )
    registry.load()
    target = registry.twin(op, PREFIX + level)
    declared = OPS[op]._schema.arguments
    names = [argument.name for argument in declared]
    places = row_places(op, declared)
    grouped = [names.index(name) for name in claims.grouped]
    written = [i for i, a in enumerate(declared) if a.alias_info is not None and a.alias_info.is_write]
    samples: Sequence[Args] = op_samples(op) if args is None else args
    for number, values in enumerate(samples):
        values = (*values, *(argument.default_value for argument in declared[len(values) :]))
        check_rows(
            target,
            values,
            places,
            grouped=grouped,
            written=written,
            compositions=compositions,
            generator=generator,
            label=f"{op} on sample {number}",
        )
    return InvarianceReport(op, compositions, _rows(samples, places[:1]))
