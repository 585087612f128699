"""The ways to run one op that scenarios compare: eager PyTorch, stock torch.compile, our IR, our kernel."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._compat import maybe_mark_dynamic
from ..backend import dsv4
from ..ops.common.define import OPS, REFERENCES
from ..ops.common.kernels import launcher
from .problem import Args, Prepare

_count = itertools.count()


def compiled(
    function: Callable[..., Any], backend: Any, typical: Callable[[], Args], tokens: Sequence[int], **options: Any
) -> Callable[..., Any]:
    """`function` compiled for arguments of a middle size, with a dynamic token dim; see `implementations`."""

    def run(*args: Any) -> Any:
        return function(*args)

    # Dynamo keeps what it has compiled, and which sizes it has seen, by code and name: with its own of both, a function
    # starts anew and leaves the others as they are.
    run.__code__ = run.__code__.replace(co_name=f"compiled_{next(_count)}")
    call = torch.compile(run, backend=backend, fullgraph=True, options=options or None)
    args = typical()
    for index in tokens:
        assert isinstance(args[index], Tensor)
        maybe_mark_dynamic(args[index], 0)
    call(*args)
    return call


def implementations(op: str, typical: Callable[[], Args], tokens: Sequence[int]) -> Mapping[str, Prepare]:
    """`eager` and `inductor` run the reference, `ir` and `triton` the op. Each is prepared once, however often asked.

    Args:
        typical: arguments of a middle size. Code is compiled for these, with a dynamic token dim, and serves every
            size; torch compiles once more where there is one token.
        tokens: positions of the arguments whose first dim is tokens.
    """

    def through_op(*args: Any) -> Any:
        return OPS[op](*args)

    return {
        "eager": lambda: REFERENCES[op],
        "inductor": functools.cache(lambda: compiled(REFERENCES[op], "inductor", typical, tokens)),
        "ir": functools.cache(lambda: compiled(through_op, dsv4, typical, tokens, **{f"dsv4.impl.{op}": "ir"})),
        "triton": lambda: on_gpu(launcher(op)),
    }


def on_gpu(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, which launches a kernel of ours. RuntimeError where no GPU would run it; the table then says so."""
    if not torch.cuda.is_available():
        raise RuntimeError("hand-written kernels run on GPUs")
    return call
