"""State that a converted model was last compared with, so that a call costs little while nothing has changed.

The comparisons of `shared_weights` and `layers` visit every module of every layer, which takes longer than a decode
step's launch. A snapshot holds what they depend on as flat lists, and compares them without a loop in Python.
"""

from __future__ import annotations

import operator
from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor

from .._compat import version_of
from .shared_weights import ReadModules


class Snapshot:
    """State of a `CompilableModel` after its parameters, modules and settings were adopted.

    Attributes:
        dicts, keys, objects: what each dictionary held under a key: modules, parameters, buffers, settings.
        hooks: dictionaries that were empty.
        sized, sizes: dictionaries that new hooks, adapters or parametrisations would grow.
        tensors, addresses: parameters and where they lay; `weight.data = ...` moves them.
        buffers, versions: RoPE frequencies, which may be written in place.
        settings: owner, name and value of settings that are in no dictionary.
    """

    def __init__(self, model: Any) -> None:
        self.dicts: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.objects: list[Any] = []
        self.hooks: list[Sized] = []
        self.sized: list[Sized] = [model.layers._modules]
        self.tensors: list[Tensor] = []
        read = [model.dsv4_settings.rotary]
        self._hold(model._modules, "layers")
        for key, layer in model.layers._modules.items():
            self._hold(model.layers._modules, key)
            self._hold(layer._modules, "self_attn")
            self._hold(layer.self_attn.__dict__, "dsv4_weights")
            weights = layer.self_attn.dsv4_weights
            read.append(weights.modules)
            for each in weights.shared:
                self._hold_tensor(each.theirs, each.leaf)
        if model.dsv4_read is not None:
            read += model.dsv4_read.modules
            self._hold_around(model)
        for modules in read:
            self._hold_modules(modules)
        self._hold_settings(model.dsv4_settings)
        self.sizes = list(map(len, self.sized))
        self.addresses = list(map(torch.Tensor.data_ptr, self.tensors))
        self.versions = list(map(version_of, self.buffers))

    def __reduce__(self) -> tuple[Any, ...]:
        """Become None in a copy of the model, which has other dictionaries."""
        return type(None), ()

    def holds(self) -> bool:
        """Return whether nothing has changed since. If False, compare again: a change need not matter."""
        return (
            all(map(operator.is_, map(dict.get, self.dicts, self.keys), self.objects))
            and not any(self.hooks)
            and list(map(len, self.sized)) == self.sizes
            and list(map(torch.Tensor.data_ptr, self.tensors)) == self.addresses
            and list(map(version_of, self.buffers)) == self.versions
            and all(getattr(owner, name, None) == value for owner, name, value in self.settings)
        )

    def _hold(self, where: dict[str, Any], key: str) -> Any:
        self.dicts.append(where)
        self.keys.append(key)
        self.objects.append(where.get(key))
        return self.objects[-1]

    def _hold_tensor(self, where: dict[str, Any], key: str) -> None:
        if isinstance(held := self._hold(where, key), Tensor):
            self.tensors.append(held)

    def _hold_modules(self, modules: ReadModules) -> None:
        """Hold what `ReadModules.check` depends on."""
        for _, siblings, key, module in modules.modules:
            self._hold(siblings, key)
            self.hooks += (module._forward_hooks, module._forward_pre_hooks)
            self.sized += (module.__dict__, module._modules)

    def _hold_around(self, model: Any) -> None:
        """Hold what `ReadParts.adopt` depends on."""
        self._hold_tensor(self._hold(model._modules, "embed_tokens")._parameters, "weight")
        for moe in model.dsv4_read.moe:
            for name in ("shared_w13", "shared_w13_scale"):
                self._hold(moe.__dict__, name)
            for part in (moe.shared_experts.gate_proj, moe.shared_experts.up_proj):
                for name in ("weight", "weight_scale_inv"):
                    self._hold_tensor(part._parameters, name)
            gate = self._hold(moe._modules, "gate")
            for owned in (gate._parameters, gate._buffers):
                self._hold_tensor(owned, "tid2eid")

    def _hold_settings(self, settings: Any) -> None:
        """Hold what `ReadSettings.check` depends on."""
        for each in settings.frequencies:
            self._hold(each.buffers, each.name)
        self.buffers: list[Tensor] = [each.seen for each in settings.frequencies]
        self.settings: list[tuple[Any, str, Any]] = []
        for _, owner, name, value in settings.held:
            places = (vars(owner), vars(owner).get("_modules", {}))
            found = next((place for place in places if place.get(name, self) is value), None)
            if found is None:
                self.settings.append((owner, name, value))
            else:
                self._hold(found, name)
