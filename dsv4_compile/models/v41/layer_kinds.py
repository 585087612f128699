"""Kinds of layers: which layers of a model a trace repeats, and the tensors that it reads of each.

Two layers are of one kind if they have the same modules, settings and layouts of weights and caches. A layer has no
kind, and is traced by itself, if it has an engram, is the last source, where a prompt's tail begins, or has hooks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ...errors import check, fail
from ...runtime import layer_programs
from .attention import Selection
from .cache import V41Caches
from .layers import Layer
from .step import Step

_OF_ONE = ("layer", "source", "first_of_kind", "weight_names", "training")
"""Settings that differ between layers of one kind: they say where a layer finds its caches."""
_SCALARS = (bool, int, float, str, type(None))


def weight_names(layer: Layer) -> tuple[str, ...]:
    """Return the names of a layer's parameters, in an order that is the same in all layers of a kind."""
    return tuple(name for name, _ in layer.named_parameters(remove_duplicate=False))


def caches_of(layer: Layer, caches: V41Caches) -> list[Tensor]:
    """Return the tensors of caches that a layer reads or writes, and its tables."""
    attention = layer.attn
    tensors = [caches.windows[attention.layer], caches.rope_tables[attention.layer]]
    if attention.source is not None:
        source = caches.sources[attention.source]
        tensors.append(source.entries)
        if attention.is_index_source:
            tensors += [source.keys, caches.entry_tables[attention.ratio]]
        if attention.is_source and source.state is not None:
            tensors.append(source.state)
    return tensors


def set_kinds(stack: Sequence[Layer], caches: V41Caches) -> None:
    """Set `first_of_kind` of each layer: the first one of its kind, -1 for the only one."""
    first: dict[Any, list[Layer]] = {}
    for layer in stack:
        layer.first_of_kind, layer.weight_names = -1, weight_names(layer)
        kind = _kind(layer, caches)
        if kind is not None:
            first.setdefault(kind, []).append(layer)
    for layers in first.values():
        if len(layers) > 1:
            for layer in layers:
                layer.first_of_kind = layers[0].layer


def _kind(layer: Layer, caches: V41Caches) -> Any:
    modules = dict(layer.named_modules())
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in modules.values())
    if layer.has_engram or layer.is_last_source or hooked:
        return None
    tensors = [*(layer.get_parameter(name) for name in weight_names(layer)), *caches_of(layer, caches)]
    first_uses: dict[int, int] = {}
    shared = tuple(first_uses.setdefault(id(tensor), i) for i, tensor in enumerate(tensors))
    facts = [(path, type(module), *_settings(module)) for path, module in modules.items()]
    return tuple(facts), weight_names(layer), shared, tuple(map(_layout, tensors))


def _settings(module: nn.Module) -> list[Any]:
    settings = []
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or name in _OF_ONE:
            continue
        simple = isinstance(value, _SCALARS) or (
            isinstance(value, tuple) and all(isinstance(item, _SCALARS) for item in value)
        )
        settings.append((name, repr(value) if simple else id(value)))
    return settings


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, type(tensor)


class RepeatedTensors:
    """Tensors of the layers that a trace repeats, as they are at each call."""

    def __init__(self, stack: Sequence[Layer], caches: V41Caches) -> None:
        set_kinds(stack, caches)
        later = [layer for layer in stack if 0 <= layer.first_of_kind < layer.layer]
        self._weights: dict[int, list[tuple[Mapping[str, Any], str]]] = {}
        self._caches = {layer.layer: caches_of(layer, caches) for layer in later}
        for layer in later:
            paths = [name.rpartition(".") for name in weight_names(layer)]
            self._weights[layer.layer] = [(layer.get_submodule(path)._parameters, name) for path, _, name in paths]
        self._hooks = {
            layer.layer: [m._forward_hooks for m in layer.modules()] + [m._forward_pre_hooks for m in layer.modules()]
            for layer in later
        }
        self._known = self._read()
        self._layouts = {i: [_layout(tensor) for tensor in tensors] for i, tensors in self._known.items()}

    def _read(self) -> dict[int, list[Tensor]]:
        return {
            i: [*(parameters[name] for parameters, name in weights), *self._caches[i]]
            for i, weights in self._weights.items()
        }

    def __bool__(self) -> bool:
        return bool(self._weights)

    def __call__(self) -> dict[int, list[Tensor]]:
        """Return the tensors of each layer.

        Raises E208 for one that was replaced by a tensor of a different layout, and for a layer that has hooks now.
        """
        for i, hooks in self._hooks.items():
            if any(hooks):
                got = f"layer {i} with hooks, which it did not have when the steps were compiled"
                fail("E208", got=got, why="it runs the code of a layer without hooks", fix="call v41.compile again")
        tensors = self._read()
        for i, read in tensors.items():
            if all(new is old for new, old in zip(read, self._known[i], strict=True)):
                continue
            same = [_layout(tensor) for tensor in read] == self._layouts[i]
            got = f"layer {i} with weights of a different shape, dtype or device than when the steps were compiled"
            check(same, "E208", got=got, fix="call v41.compile again")
        self._known = tensors
        return tensors


class Marked:
    """Calls of a stack's layers in a trace that has one layer of each kind."""

    def __init__(self) -> None:
        self._ends: dict[int, list[Tensor]] = {}

    def call(
        self,
        layer: Layer,
        streams: Tensor,
        pre: Tensor,
        step: Step,
        caches: V41Caches,
        selection: Selection | None,
        taps: dict[int, Tensor] | None,
    ) -> tuple[Tensor, Tensor, Step, Selection | None]:
        """Do what `Layer.forward` does without rows and tail, by an op for a layer of a kind that was traced."""
        attention = layer.attn
        read = _selected(attention, selection)
        carried = [streams, pre, *step, *read]
        index, first = layer.layer, layer.first_of_kind
        if first < index:
            results = layer_programs.repeat(carried, self._ends[first], index, first)
        else:
            weights = [_weight(layer, name) for name in layer.weight_names]
            begun = layer_programs.begin(carried, [*weights, *caches_of(layer, caches)], index)
            inner = None
            if attention.selects_candidates and attention.is_index_source:
                inner = Selection(begun[1], begun[-1])
            elif len(read) == 1:
                inner = Selection(begun[-1], None)
            tapped: dict[int, Tensor] | None = None if taps is None else {}
            streams, pre, _, chosen = layer(
                begun[0], begun[1], None, Step(*begun[2 : 2 + len(step)]), caches, inner, None, tapped
            )
            ended = [streams, pre]
            if attention.is_index_source:
                assert chosen is not None
                ended.append(chosen.slots)
                if attention.publishes_candidates:
                    assert chosen.candidates is not None
                    ended.append(chosen.candidates)
            if tapped:
                ended.append(tapped[index])
            results = layer_programs.end(ended, index)
            self._ends[index] = results
        if attention.is_index_source:
            candidates = None if selection is None else selection.candidates
            selection = Selection(results[2], results[3] if attention.publishes_candidates else candidates)
        if taps is not None and layer.is_tapped:
            taps[index] = results[-1]
        return results[0], results[1], step, selection


def _selected(attention: Any, selection: Selection | None) -> list[Tensor]:
    """Return what a layer reads of the selection of layers before it: candidates, or slots, or nothing."""
    if selection is None or attention.source is None:
        return []
    if attention.is_index_source:
        reads = attention.selects_candidates and selection.candidates is not None
        return [selection.candidates] if reads and selection.candidates is not None else []
    return [selection.slots]


def _weight(layer: Layer, name: str) -> Tensor:
    value: Any = layer
    for attribute in name.split("."):
        value = getattr(value, attribute)
    return value  # type: ignore[no-any-return]
