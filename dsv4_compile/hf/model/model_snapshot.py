"""State of a converted model when it was last compared, so that a call costs little while nothing has changed.

The comparisons of `shared_weights` and `layers`, and the guards of a compiled graph, visit every module of every layer,
which takes longer than a decode step's launch. A snapshot holds what they depend on as flat lists, and compares these
without a loop in Python.
"""

from __future__ import annotations

import operator
from collections.abc import Sized
from typing import Any

from torch import Tensor, nn

from ..._compat import VERSION, module_hooks
from ...runtime.addresses import HeldTensors
from .redundant_guards import CONTAINERS, GLOBAL_HOOKS, fingerprint, tensors_of, watched

_version = operator.attrgetter(VERSION)


class Snapshot:
    """State of a `CompilableModel` after its parameters, modules and settings were adopted.

    Args:
        model: a `CompilableModel`.

    Attributes:
        modules, types: all modules, except those that are this package's own, which nothing else changes.
        sized, sizes: dictionaries of attributes, and those with an entry, and their lengths.
        empty: dictionaries of modules, parameters, buffers and hooks that have no entry.
        containers, keys, entries: the others, once for each of their keys, and the entries at the keys.
        watched: names of attributes that graphs have read.
        owners, names, values: dictionaries of attributes, names in them, and the values there.
        named, tensors: parameters, buffers and stacked weights.
        buffers, versions: RoPE frequencies, which may be written in place.
        settings: owner, name and value of settings that are in no dictionary.
        state: the model's `fingerprint`.
    """

    def __init__(self, model: Any) -> None:
        self.modules: list[nn.Module] = list(model.modules())
        self.types = list(map(type, self.modules))
        containers = [vars(module)[name] for module in self.modules for name in CONTAINERS]
        containers += [getattr(module_hooks, name) for name in GLOBAL_HOOKS]
        self.empty = [container for container in containers if not container]
        self.containers = [container for container in containers for _ in container]
        self.keys = [key for container in containers for key in container]
        for attributes in map(vars, self.modules):  # tensors as users attach them: no parameters and no buffers
            attached = [name for name, value in attributes.items() if isinstance(value, Tensor)]
            self.containers += [attributes] * len(attached)
            self.keys += attached
        self.sized: list[Sized] = [*map(vars, self.modules), *(container for container in containers if container)]
        self.sizes = list(map(len, self.sized))
        self.entries = list(map(dict.get, self.containers, self.keys))
        self._held: set[tuple[int, str]] = set()
        self.owners: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.values: list[Any] = []
        self.watched = frozenset(watched)
        self.settings: list[tuple[Any, str, Any]] = []
        for _, owner, name, value in model.dsv4_settings.held:
            if vars(owner).get(name, self) is value:
                self._hold(vars(owner), name)
            elif not isinstance(owner, nn.Module):  # a module has others in containers and in its class
                self.settings.append((owner, name, value))
        for module in self.modules:
            for name in self.watched.intersection(vars(module)):
                if not isinstance(vars(module)[name], Tensor):
                    self._hold(vars(module), name)
        self.named = tensors_of(model)
        self.tensors = HeldTensors(self.named.values())
        buffers: list[Tensor] = [frequency.seen for frequency in model.dsv4_settings.frequencies]
        self.buffers = [buffer for buffer in buffers if not buffer.is_inference()]
        self.versions = list(map(_version, self.buffers))
        self.state = fingerprint(model)

    def __reduce__(self) -> tuple[Any, ...]:
        """Become None in a copy of the model, which has other dictionaries."""
        return type(None), ()

    def holds(self) -> bool:
        """Return whether nothing has changed since. If False, compare again: a change need not matter."""
        return (
            len(watched) == len(self.watched)
            and not any(self.empty)
            and list(map(type, self.modules)) == self.types
            and list(map(len, self.sized)) == self.sizes
            and all(map(operator.is_, map(dict.get, self.containers, self.keys), self.entries))
            and list(map(dict.get, self.owners, self.names)) == self.values
            and self.tensors.hold()
            and list(map(_version, self.buffers)) == self.versions
            and all(getattr(owner, name, None) == value for owner, name, value in self.settings)
        )

    def _hold(self, where: dict[str, Any], name: str) -> None:
        if (id(where), name) in self._held:
            return
        self._held.add((id(where), name))
        self.owners.append(where)
        self.names.append(name)
        self.values.append(where[name])
