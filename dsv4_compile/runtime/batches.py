"""What a runner does with a batch: count its tokens, leave none, find its tensors, check outputs and padding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from torch import Tensor

from .._compat import pytree
from ..errors import check, fail
from ..metadata import AttentionMetadata, MetadataBuffers

_DESCRIBED_BY = ("query_start_loc", "seq_lens")
_MOVED = (*_DESCRIBED_BY, "input_ids", "overflow")
"""Inputs of the metadata that advance writes."""


def count_tokens(num_tokens: int | None, num_reqs: int | None, tokens_each: int, capacity: int) -> int:
    """Tokens of a step of so many, or of `num_reqs` requests. E201 unless one is given, E204 over capacity."""
    # Without `check`, which would put its message together at every step.
    if (num_tokens is None) == (num_reqs is None):
        fail(
            "E201",
            got=f"{num_tokens=}, {num_reqs=}",
            rule="one of num_tokens and num_reqs is given",
            fix="step(num_tokens) or step(num_reqs=...)",
        )
    tokens = num_tokens if num_tokens is not None else (num_reqs or 0) * tokens_each
    if not 0 < tokens <= capacity:
        fail(
            "E204",
            got=f"a step of {tokens} tokens with buffers of {capacity}",
            fix=f"pass 1 to {capacity}: allocate MetadataBuffers for the largest step, or cut the step",
        )
    return tokens


@contextmanager
def idle(buffers: MetadataBuffers) -> Iterator[None]:
    """Let the buffers describe no request inside the block: a step then touches no live byte. Restored after it."""
    saved = {name: buffers.tensors[name].clone() for name in _MOVED}
    for name in _DESCRIBED_BY:
        buffers.tensors[name].zero_()
    try:
        yield
    finally:
        for name, tensor in saved.items():
            buffers.tensors[name].copy_(tensor)


def token_tensors(metadata: AttentionMetadata) -> list[Tensor]:
    """The tensors of `metadata` with a row for each token; block tables have one for each request."""
    found: list[Tensor] = []
    for field in fields(metadata):
        value = getattr(metadata, field.name)
        if isinstance(value, Tensor):
            found.append(value)
        elif value is not None:
            parts = {part.name: getattr(value, part.name) for part in fields(value)}
            found += [t for name, t in parts.items() if t is not None and not name.endswith("block_table")]
    return found


def check_outputs(outputs: Any, size: int) -> None:
    """Raise E426 unless `outputs` are tensors of `size` rows, at least one of them."""
    leaves = pytree.tree_leaves(outputs)
    wrong = next((leaf for leaf in leaves if not isinstance(leaf, Tensor)), None)
    check(
        wrong is None and bool(leaves),
        "E426",
        got=f"a step that returns {type(wrong).__name__}" if leaves else "a step that returns nothing",
    )
    short = next((leaf.shape for leaf in leaves if leaf.dim() == 0 or leaf.shape[0] != size), None)
    check(short is None, "E426", got=f"an output of shape {list(short or ())} from a step of {size} tokens")


def check_padding(buffers: MetadataBuffers, tokens: int, rows: int) -> None:
    """Raise E429 unless the refreshed metadata from row `tokens` to `rows` is what it was declared to be.

    Waits for the device.
    """
    for spec in buffers.plan.specs:
        if spec.filled_by == "refresh":
            pad = buffers.plan.pad(spec)
            wrong = int((buffers.tensors[spec.name][tokens:rows] != pad).sum())
            check(
                wrong == 0,
                "E429",
                got=f"{wrong} elements of metadata {spec.name} behind {tokens} tokens of {rows} are not {pad}",
            )
