"""Kinds of decoder layers: which layers of a converted model run the same code on different tensors.

Two layers are of one kind if a trace of one, with the tensors of the other, is a trace of the other. They have the same
modules, settings and layouts of weights, module by module. A layer has no kind, and is traced by itself, if
its modules hold more than a text can say and a call compares: hooks, classes or functions of a caller, which may read
anything, and settings that are no numbers or words, which may be written in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..._compat import module_hooks, storage_identity
from ...cache import LayerCache
from ...metadata import AttentionMetadata
from ...runtime.aliasing import byte_range
from .expected_modules import hf
from .layers import CompilableDecoderLayer
from .redundant_guards import GLOBAL_HOOKS, HOOKS, SCALARS, is_setting, module_text, modules_of, own_modules, tensors_in

_OF_ONE = frozenset({"layer_idx"})
"""Settings in which layers of one kind differ: a layer finds its cache by its index, and does nothing else by it."""
_KNOWN = ("dsv4_compile", "transformers", "torch")
"""Packages whose modules read what they hold, and of that `layer_idx` for the cache alone."""
_UNCALLED = (hf.DeepseekV4RotaryEmbedding,)
"""Classes whose forward a converted layer never calls."""
_UNREAD = ("block_size",)
"""Settings of other types that only the forwards of modules read that a converted layer never calls."""
_OF_STEP = ("positions", "token_to_req", "is_valid_token")
_OF_WINDOW = ("slot_mapping", "indices", "lens")
_ROWS = (*_OF_WINDOW, "state_slot_mapping", "context_lens", "indexer_slot_mapping", "indexer_state_slot_mapping")
_TABLES = ("block_table", "state_block_table", "indexer_block_table", "indexer_state_block_table")


class LayerTensors(NamedTuple):
    """Names of the tensors that graphs read of a layer, in an order that is the same in all layers of its kind.

    Attributes:
        first: the first layer of the kind.
        alone: tensors that no other part of the model has.
        shared: tensors that other parts have too; all layers of a kind have these.
    """

    first: int
    alone: tuple[str, ...]
    shared: tuple[str, ...]


class Repeated(NamedTuple):
    """The layers of a model that a trace repeats, by index, and their own weights, in the order of the layers."""

    layers: tuple[int, ...] = ()
    weights: Sequence[Tensor] = ()

    def caches(self, caches: Sequence[LayerCache]) -> list[Tensor]:
        """Return the tensors of these layers in the caches of all layers."""
        return [tensor for i in self.layers for tensor in tensors_of_cache(caches[i])]


def without_rows(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without those that are rows of a stacked matrix: layers multiply by the matrix."""
    places = {name: _place(tensor) for name, tensor in named.items()}
    parts, matrix = set(), ("", 0, 0)
    for memory, begin, end in sorted(set(places.values()), key=lambda place: (*place[:2], -place[2])):
        if memory == matrix[0] and end <= matrix[2]:
            parts.add((memory, begin, end))
        else:
            matrix = memory, begin, end
    return {name: tensor for name, tensor in named.items() if places[name] not in parts}


def _place(tensor: Tensor) -> tuple[str, int, int]:
    """Return the memory that a tensor lies in, and its first byte there and the byte after its last."""
    begin, end = byte_range(tensor)
    start = tensor.untyped_storage().data_ptr()
    # Storages of one memory may differ, and those of the meta device have no address.
    return (str(tensor.device), begin + start, end + start) if start else (str(storage_identity(tensor)), begin, end)


def repeats_of(model: Any, named: Mapping[str, Tensor]) -> tuple[LayerTensors | None, ...]:
    """Return what graphs read of each layer of a decoder stack, None for a layer that is the only one of its kind.

    Args:
        model: a `CompilableModel`.
        named: the tensors that graphs read, by their names there.
    """
    config, names = {id(model.config): "config"}, {id(tensor): name for name, tensor in named.items()}
    outside = [
        tensors_in(module).values() for path, module in modules_of(model).items() if not path.startswith("layers.")
    ]
    kinds = [_kind(layer, config) for layer in model.layers]
    holders = Counter(id(tensor) for _, tensors in kinds for tensor in tensors)
    holders.update({id(tensor) for tensors in outside for tensor in tensors})
    shared = [[i for i, tensor in enumerate(tensors) if holders[id(tensor)] > 1] for _, tensors in kinds]
    keys = [(kind, *((i, id(tensors[i])) for i in at)) for (kind, tensors), at in zip(kinds, shared, strict=True)]
    counts, first = Counter(keys), dict[Any, int]()
    repeats: list[LayerTensors | None] = []
    for i, (layer, key, (kind, tensors)) in enumerate(zip(model.layers, keys, kinds, strict=True)):
        repeated = kind and counts[key] > 1 and layer.self_attn.layer_idx == i
        read = [(at in shared[i], names[id(tensor)]) for at, tensor in enumerate(tensors) if id(tensor) in names]
        alone, common = (tuple(name for is_shared, name in read if is_shared is which) for which in (False, True))
        repeats.append(LayerTensors(first.setdefault(key, i), alone, common) if repeated else None)
    return tuple(repeats)


def later_layers(repeats: Sequence[LayerTensors | None]) -> dict[int, LayerTensors]:
    """Return the layers that a trace repeats, by index, from the result of `repeats_of`."""
    return {i: layer for i, layer in enumerate(repeats) if layer is not None and layer.first < i}


def repeated_in(repeats: Sequence[LayerTensors | None], named: Mapping[str, Tensor]) -> Repeated:
    """Return the layers that a trace repeats, from the result of `repeats_of` and the tensors by name."""
    later = later_layers(repeats)
    return Repeated(tuple(later), [named[name] for layer in later.values() for name in layer.alone])


def _kind(layer: Any, outside: dict[int, str]) -> tuple[str, list[Tensor]]:
    """Return a text that layers of one kind share, "" for a layer of no kind, and the layer's distinct tensors."""
    modules = modules_of(layer)
    tensors = {id(tensor): tensor for module in modules.values() for tensor in tensors_in(module).values()}
    added = {id(module) for module in own_modules(layer).values()}
    hooked = any(vars(module)[name] for module in modules.values() for name in HOOKS)
    hooked = hooked or any(getattr(module_hooks, name) for name in GLOBAL_HOOKS)
    if type(layer) is not CompilableDecoderLayer or hooked:
        return "", list(tensors.values())
    if not all(id(module) in added or _is_describable(module, outside) for module in modules.values()):
        return "", list(tensors.values())
    paths = {id(module): path for path, module in modules.items()} | outside
    places: dict[int, int] = {}
    lines = [f"{path}:{module_text(module, paths, places, without=_OF_ONE)}" for path, module in modules.items()]
    return "\n".join(lines), list(tensors.values())


def _is_describable(module: nn.Module, outside: dict[int, str]) -> bool:
    """Return whether a module's forward reads nothing but its modules, tensors, and numbers and words that it holds."""
    kind = type(module)
    if not all(origin.partition(".")[0] in _KNOWN for origin in (kind.__module__, kind.forward.__module__)):
        return False
    return kind in _UNCALLED or all(
        type(value) in SCALARS or isinstance(value, Tensor) or id(value) in outside or name in _UNREAD
        for name, value in vars(module).items()
        if is_setting(name)
    )


def tensors_of_cache(cache: LayerCache) -> list[Tensor]:
    """Return the tensors of a layer's cache that exist."""
    return [tensor for tensor in cache.flat() if tensor is not None]


def block_tables_of(metadata: AttentionMetadata) -> list[Tensor]:
    """Return the block tables of a step, which are those of its cache."""
    return _of_ratios(metadata, _TABLES)


def tensors_of_step(metadata: AttentionMetadata) -> list[Tensor]:
    """Return all tensors of a step's metadata."""
    window = [getattr(metadata.window, name) for name in _OF_WINDOW]
    rows = [*(getattr(metadata, name) for name in _OF_STEP), *window]
    return [*rows, *_of_ratios(metadata, _ROWS), *_of_ratios(metadata, _TABLES)]


def _of_ratios(metadata: AttentionMetadata, names: Sequence[str]) -> list[Tensor]:
    held = [getattr(source, name) for source in metadata.sources.values() for name in names]
    return [tensor for tensor in held if tensor is not None]
