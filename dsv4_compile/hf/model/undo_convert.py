"""A model as it is before `convert`, so that a conversion that fails changes nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from .adapters import adapted

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_KEPT = "dsv4_part"
"""Attribute of a model whose other parts were freed, which cannot be undone; the next convert goes on from there."""


def undone_on_failure(convert: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorate a function of a model, and of `merge_adapters`, so that the model is as it was where that raises."""

    @functools.wraps(convert)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        model = args[0] if args else kwargs.get("model")
        if not isinstance(model, nn.Module):
            return convert(*args, **kwargs)
        before = Before(model, values=bool(kwargs.get("merge_adapters")))
        try:
            return convert(*args, **kwargs)
        except BaseException:
            before.restore()
            raise

    return call


class Before:
    """Classes and attributes of all modules, and, with `values`, the bits of weights that merged adapters overwrite.

    The values are copied to the memory of the host. Weights that convert moves keep their bits, and are not copied.
    """

    def __init__(self, model: nn.Module, *, values: bool) -> None:
        self.model = model
        self.modules = [(module, type(module), [*map(_held, vars(module).items())]) for module in model.modules()]
        parts = [module for _, module in adapted(model)] if values else []
        tensors = {id(t): t for adapter in parts for t in (*adapter.parameters(), *adapter.buffers())}
        self.values = [(t, t.detach().to("cpu", copy=True)) for t in tensors.values()]

    @torch.no_grad()
    def restore(self) -> None:
        """Undo all that has changed since."""
        saved = {_KEPT: vars(self.model)[_KEPT]} if _KEPT in vars(self.model) else {}
        for module, kind, attributes in self.modules:
            if type(module) is not kind:
                module.__class__ = kind
            for _, value, content in attributes:
                if content is not None and not _same(value, content):
                    value.clear()
                    value.update(content) if isinstance(value, (dict, set)) else value.extend(content)
            now, then = vars(module), {name: value for name, value, _ in attributes}
            if not _same(now, then):  # equal ones stay untouched: the module may be running in a different thread
                now.clear()
                now.update(then)
        vars(self.model).update(saved)
        for tensor, value in self.values:
            tensor.data.copy_(value)


def _held(attribute: tuple[str, Any]) -> tuple[str, Any, Any]:
    """Return the name of an attribute, its value, and a copy of the value if it is a container, else None."""
    name, value = attribute
    return name, value, value.copy() if isinstance(value, (dict, list, set)) else None


def _same(one: Any, other: Any) -> bool:
    """Return whether two containers hold the same objects."""
    if isinstance(one, dict):
        return list(one) == list(other) and all(one[key] is other[key] for key in one)
    return list(map(id, one)) == list(map(id, other))
