"""The attention's tensors out of the checkpoint that vLLM reads, a layer at a time.

vLLM calls a model's `load_weights` once for each run of names with one beginning, so a layer's tensors come in pieces.
They are kept until the layer is complete, then copied and dropped: at most a few layers are in memory twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn

from ...loading import load_attention

NamedTensors = Iterable[tuple[str, Tensor]]

_NAME = re.compile(r"layers\.(\d+)\.attn\.(.+)")
_SCALE = ".weight_scale_inv"
"""End of vLLM's name for the block scales that the checkpoint calls `.scale`."""


class AttentionWeights:
    """Loads attention layers from names as vLLM's mapper has left them, `layers.3.attn.wq_a.weight`.

    Args:
        layers: the modules to load, by layer index.
    """

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        self.layers = layers
        self._held: dict[int, dict[str, Tensor]] = {}
        self._loaded: set[int] = set()

    def others(self, weights: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that are not attention's; keep or load the others.

        Raises:
            DSV4Error: E207 for a tensor that the layer does not have, or of another shape or dtype.
        """
        for name, tensor in weights:
            match = _NAME.fullmatch(name)
            if match is None or int(match[1]) not in self.layers:
                yield name, tensor
                continue
            index, rest = int(match[1]), match[2]
            held = self._held.setdefault(index, {})
            held[f"{rest.removesuffix(_SCALE)}.scale" if rest.endswith(_SCALE) else rest] = tensor
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
