"""vLLM's DeepSeek-V4 with this package's attention: when it may run, what it is called with, what it loads."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from . import _compat, compiling
from .attention import Attention
from .step import StepBuffers, table_sets
from .weights import AttentionWeights, NamedTensors

base: Any = _compat.base_model()
compilable: Any = _compat.compilable(base.DeepseekV4Model)


class DeepseekV4Model(compilable):  # type: ignore[misc]
    """vLLM's model with `Attention` in its layers; it is compiled once its caches exist.

    vLLM traces in its first call, a profiling run before it allocates caches, and keeps no guards. Until every cache is
    bound the model therefore runs eagerly.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        compiling.prepare(vllm_config, base)
        with self.replacing():
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.attention = {index: layer.attn for index, layer in enumerate(self.layers)}
        self.step_buffers: StepBuffers = self.attention[0].owners[0].step_buffers
        layers = {index: attention.layer for index, attention in self.attention.items()}
        self.weights = AttentionWeights(layers, self.attention[0].ranks)
        self.sets: list[dict[str, int]] = []
        self._bindings = 0

    @classmethod
    def replacing(cls) -> AbstractContextManager[None]:
        """Let vLLM build `Attention` in its decoder layers inside the block."""
        return _compat.attention_layers(base, Attention)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.step_buffers.bindings != self._bindings:
            self._bind()
        if not self.sets:
            return self.forward(*args, **kwargs)
        if getattr(self, "compiled", True):
            return super().__call__(*args, **kwargs)
        with compiling.explaining(self), _compat.compile_threads():
            return super().__call__(*args, **kwargs)

    def _bind(self) -> None:
        """Group the layers' caches after vLLM has bound them, and compile again if they are not the first."""
        ready = all(attention.ready for attention in self.attention.values())
        tables = [attention.tables() for attention in self.attention.values()] if ready else []
        self.sets, numbers = table_sets(tables)
        for index, attention in self.attention.items():
            attention.metadata_set = numbers[index] if ready else None
        self._bindings = self.step_buffers.bindings
        if ready:
            counts, how = (len(self.attention), len(self.sets)), compiling.how(self)
            _compat.log("%d layers of attention are bound, with %d sets of block tables; %s", *counts, how)
        if getattr(self, "compiled", False):
            _compat.compile_again(self)

    def forward(
        self, input_ids: Tensor, positions: Tensor, intermediate_tensors: Any, inputs_embeds: Tensor | None = None
    ) -> Any:
        """Run the layers with the step's metadata in the place of positions."""
        return super().forward(input_ids, self.step(positions), intermediate_tensors, inputs_embeds)

    def step(self, positions: Tensor) -> Any:
        """Return the `Step` of `positions` `[T]`, or these before every cache is bound. Traceable."""
        return self.step_buffers.step(positions, self.sets) if self.sets else positions

    def load_weights(self, weights: NamedTensors) -> set[str]:
        """Load a run of names; return those that vLLM's own loader has taken."""
        return set(super().load_weights(self.weights.others(weights)))

    def finish_weights(self) -> set[str]:
        """Return the names of attention's parameters. E207 if a tensor did not come."""
        return self.weights.finish()


class DeepseekV4ForCausalLM(base.DeepseekV4ForCausalLM):  # type: ignore[misc]
    """The class that vLLM's registry holds for DeepSeek-V4."""

    model_cls = DeepseekV4Model

    def forward(
        self, input_ids: Tensor, positions: Tensor, intermediate_tensors: Any = None, inputs_embeds: Any = None
    ) -> Any:
        """Run a step; one that vLLM describes by nothing has no tokens."""
        if _compat.get_forward_context().attn_metadata is None:
            self.model.step_buffers.clear()
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)

    def load_weights(self, weights: NamedTensors) -> set[str]:
        """Load the checkpoint; return the names of all parameters that it has filled. E207 if a layer lacks one."""
        loaded = super().load_weights(weights)
        return set(loaded) | {f"model.{name}" for name in self.model.finish_weights()}
