"""Tensors of this package's layers out of the checkpoint that vLLM reads.

vLLM calls a model's `load_weights` once for each run of names with one beginning, so a layer's tensors come in pieces.
Attention's are kept until the layer is complete, then copied and dropped: at most a few layers are in memory twice.
Others are copied one by one to where they belong, so that experts are never in memory twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from ...errors import check
from ...loading import as_parameter, load_attention
from ...ops.common.validate import INTS
from ...parallel import Ranks
from ...parallel.split import attention_split_of, part_of
from .layer_parts import LayerParts

NamedTensors = Iterable[tuple[str, Tensor]]

_NAME = re.compile(r"layers\.(\d+)\.attn\.(.+)")
_SCALE = ".weight_scale_inv"
"""End of vLLM's name for the block scales that the checkpoint calls `.scale`."""
_LAYER = re.compile(r"layers\.(\d+)\.(?!attn\.)(.+)")
_RENAMED = (
    (_SCALE, ".scale"),
    (".weight_scale", ".scale"),
    (".gate.e_score_correction_bias", ".gate.bias"),
    (".down_proj.weight", ".w2.weight"),
    (".down_proj.scale", ".w2.scale"),
)
"""Ends of names that vLLM's mappers make of a checkpoint's, one after the other, and the checkpoint's."""
_BYTES = (torch.uint8, torch.int8, torch.float8_e8m0fnu)


class AttentionWeights:
    """Loads attention layers from names as vLLM's mapper has left them, `layers.3.attn.wq_a.weight`.

    Args:
        layers: the modules to load, by layer index.
        ranks: which have equal parts of heads and groups, and `layers` is one of them; None for one rank.
    """

    def __init__(self, layers: Mapping[int, nn.Module], ranks: Ranks | None = None) -> None:
        self.layers, self.ranks = layers, ranks
        self._held: dict[int, dict[str, Tensor]] = {}
        self._loaded: set[int] = set()

    def others(self, weights: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that are not attention's; keep or load the others.

        Raises:
            DSV4Error: E207 for a tensor that the layer does not have, or of a wrong shape or dtype.
        """
        for name, tensor in weights:
            match = _NAME.fullmatch(name)
            if match is None or int(match[1]) not in self.layers:
                yield name, tensor
                continue
            index, rest = int(match[1]), match[2]
            held = self._held.setdefault(index, {})
            leaf = f"{rest.removesuffix(_SCALE)}.scale" if rest.endswith(_SCALE) else rest
            held[leaf] = tensor if self.ranks is None else part_of(tensor, attention_split_of(leaf), self.ranks)
            if len(held) == sum(1 for _ in self.layers[index].parameters()):
                self._load(index)

    def finish(self) -> set[str]:
        """Return the names of all parameters, `layers.3.attn.layer.wq_a.weight`. E207 if a tensor did not come."""
        for index in sorted(set(self.layers) - self._loaded):
            self._load(index)
        return {
            f"layers.{index}.attn.layer.{name}"
            for index, layer in self.layers.items()
            for name, _ in layer.named_parameters()
        }

    def _load(self, index: int) -> None:
        prefix = f"layers.{index}.attn."
        held = {prefix + name: tensor for name, tensor in self._held.pop(index, {}).items()}
        load_attention(self.layers[index], held, prefix=prefix)
        self._loaded.add(index)


class LayerWeights:
    """Loads everything of decoder layers but attention, from names as vLLM's mapper has left them.

    Args:
        layers: the modules to load, by layer index, each a `LayerParts`.
    """

    def __init__(self, layers: Mapping[int, LayerParts]) -> None:
        self.layers = layers
        self._empty: dict[int, dict[str, Tensor]] = {}
        self._loaded: set[int] = set()

    def others(self, weights: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of attention and those outside of layers; copy the others.

        Raises:
            DSV4Error: E207 for a tensor that the layer does not have or got before, or of a wrong shape or dtype.
        """
        for name, tensor in weights:
            match = _LAYER.fullmatch(name)
            if match is None or int(match[1]) not in self.layers:
                yield name, tensor
                continue
            index, rest = int(match[1]), checkpoint_name(match[2])
            local_tensor = self.layers[index].part(rest, tensor)
            if local_tensor is None:
                continue
            if index not in self._empty:
                self._empty[index] = dict(self.layers[index].slots())
            slot = self._empty[index].pop(rest, None)
            check(slot is not None, "E207", got=f"{name}", why=f"layer {index} has no {rest}, or got it before")
            assert slot is not None
            fill(slot, local_tensor, name)
            if not self._empty[index]:
                self._finish(index)

    def finish(self) -> set[str]:
        """Return the names of all parameters, `layers.3.ffn.gate`. E207 if a tensor did not come."""
        for index, layer in self.layers.items():
            if index in self._empty or index not in self._loaded:
                missing = list(self._empty.get(index) or dict(layer.slots()))
                got = f"no tensor layers.{index}.{missing[0]}, {len(missing)} in all"
                check(not missing, "E207", got=got, why="the layer needs it")
        return {
            f"layers.{index}.{name}"
            for index, layer in self.layers.items()
            for name, _ in layer.named_parameters()
            if not name.startswith("attn.")
        }

    def _finish(self, index: int) -> None:
        del self._empty[index]
        self.layers[index].settle()
        self._loaded.add(index)


def checkpoint_name(name: str) -> str:
    """Return the checkpoint's name of a tensor of a layer that vLLM has renamed."""
    for theirs, ours in _RENAMED:
        if name.endswith(theirs):
            name = name.removesuffix(theirs) + ours
    return name


def fill(slot: Tensor, value: Tensor, name: str) -> None:
    """Copy a tensor of the checkpoint into its slot, a part of a parameter. Only floating weights may be rounded.

    Raises:
        DSV4Error: E207 for a wrong shape, or for a dtype that cannot be copied without loss.
    """
    got, needs = f"{name} {value.dtype} {list(value.shape)}", f"{slot.dtype} {list(slot.shape)} is needed"
    check(value.shape == slot.shape, "E207", got=got, why=needs)
    if slot.dtype is torch.uint8:  # MXFP4, or its scales: bytes, whatever they are called
        check(value.dtype in _BYTES, "E207", got=got, why=needs)
        value = value.view(torch.uint8)
    elif slot.dtype is torch.int32:
        check(value.dtype in INTS, "E207", got=got, why=needs)
    elif slot.dtype is torch.float32 and value.dtype is torch.float8_e8m0fnu:
        value = value.float()
    else:
        value = as_parameter(value, slot.dtype, name)
    with torch.no_grad():
        slot.copy_(value)
