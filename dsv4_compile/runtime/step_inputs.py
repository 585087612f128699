"""What a step is called with: persistent inputs, with a row for each token, and the metadata of the same rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._compat import maybe_mark_dynamic
from ..errors import check
from ..metadata import MetadataBuffers
from .aliasing import overlap, rows_coincide
from .batches import token_tensors

Step = Callable[..., Any]


class StepInputs(dict[str, Tensor]):
    """Tensors `[>= capacity, ...]` by name, in the order of a step's arguments. E204 for one with fewer rows."""

    def __init__(self, tensors: Mapping[str, Tensor], capacity: int) -> None:
        super().__init__(tensors)
        for name, tensor in self.items():
            check(
                tensor.dim() > 0 and tensor.shape[0] >= capacity,
                "E204",
                got=f"input {name} of shape {list(tensor.shape)} beside metadata of {capacity} tokens",
                fix=f"allocate {name} with {capacity} rows, max_num_batched_tokens of the buffers",
            )

    def named(self) -> dict[str, Tensor]:
        """All of them, as errors name them."""
        return {f"input {name}": tensor for name, tensor in self.items()}

    def check_memory(self, caches: Mapping[str, Tensor], buffers: MetadataBuffers) -> None:
        """Raise E201 for an input whose rows behind a batch, which are zeroed, hold what the batch needs.

        An input may be metadata with a row for each token, `input_ids` for one, and inputs may be the same rows.
        """
        by_request = [s.name for s in buffers.plan.specs if s.shape[0] != "max_num_batched_tokens"]
        others = {**caches, **{f"metadata {name}": buffers.tensors[name] for name in by_request}}
        named = list(self.named().items())
        for index, (name, tensor) in enumerate(named):
            shared = [other for other, theirs in others.items() if overlap(tensor, theirs)]
            shared += [other for other, theirs in named[:index] if not rows_coincide(tensor, theirs)]
            check(
                not shared,
                "E201",
                got=f"{name} in memory of {', '.join(shared)}",
                rule="an input has rows of its own, which are zeroed behind the batch",
                fix="allocate it apart",
            )

    def rows(self, size: int) -> list[Tensor]:
        """The first `size` rows of each."""
        return [tensor[:size] for tensor in self.values()]

    def copy_in(self, name: str, value: Tensor, tokens: int) -> None:
        """Fill the first `tokens` rows of one of them. E201 for another name, shape or dtype."""
        rule, fix = f"inputs are {', '.join(self)}", "pass one of them, as named in DecodeRunner(inputs=...)"
        check(name in self, "E201", got=f"input {name!r}", rule=rule, fix=fix)
        own = self[name]
        check(
            value.shape == (tokens, *own.shape[1:]) and value.dtype == own.dtype,
            "E201",
            got=f"{name} {value.dtype} {list(value.shape)}",
            rule=f"{name} is {own.dtype} {[tokens, *own.shape[1:]]} in a step of {tokens} tokens",
        )
        own[:tokens].copy_(value)

    def pad(self, tokens: int, bucket: int) -> None:
        """Zeros in the rows that a bucket has beyond its tokens."""
        if tokens < bucket:
            for tensor in self.values():
                tensor[tokens:bucket].zero_()


def whole_step(step: Step, buffers: MetadataBuffers, inputs: StepInputs, caches: Any, size: int) -> Callable[[], Any]:
    """A call of `step` for `size` tokens, its metadata refreshed first, at the persistent addresses."""

    def call() -> Any:
        buffers.refresh(size)
        metadata, rows = buffers.metadata(size), inputs.rows(size)
        if size > 1:
            for tensor in (*rows, *token_tensors(metadata)):
                maybe_mark_dynamic(tensor, 0)
        return step(*rows, metadata, caches)

    return torch.no_grad()(call)
