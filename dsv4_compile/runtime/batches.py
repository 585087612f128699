"""What a runner does with the batch in the persistent buffers: leave none, find its tokens, check the padding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from torch import Tensor

from ..errors import check
from ..metadata import AttentionMetadata, MetadataBuffers

_DESCRIBED_BY = ("query_start_loc", "seq_lens")
_MOVED = (*_DESCRIBED_BY, "input_ids", "overflow")
"""Inputs of the metadata that advance writes."""


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
