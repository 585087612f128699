"""Schema of an op, inferred from its reference: names, types, defaults and results stand there alone."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Collection
from typing import Any

import torch


def infer_schema(
    name: str, reference: Callable[..., Any], arguments: type[Any] | None, mutates: Collection[str]
) -> str:
    """Return the schema of the op `name` as a string.

    Args:
        reference: annotated with its results, and with its arguments unless `arguments` has them.
        arguments: a NamedTuple that `reference` takes, or None.
        mutates: names of the tensors that the op writes.

    Sizes are `int`, not `SymInt`: ops take tensors for all that changes from step to step, and a graph is specialised
    on the rest.
    """
    declared = reference if arguments is None else arguments
    types = typing.get_type_hints(declared)
    parameters = [
        parameter.replace(annotation=types[parameter.name])
        for parameter in inspect.signature(declared).parameters.values()
    ]
    returned = typing.get_type_hints(reference)["return"]

    def prototype() -> None:
        """Stand for the op, with the signature below."""

    prototype.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        parameters, return_annotation=None if returned is type(None) else returned
    )
    schema = torch.library.infer_schema(prototype, mutates_args=list(mutates), op_name=name)
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    return re.sub(r"Tensor\(\w+!\)", lambda _: f"Tensor({next(letters)}!)", schema).replace("SymInt", "int")
