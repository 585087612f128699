"""Rules for the buffers that a captured step reads, and the first buffer that breaks one.

A step that reads what an earlier step was given computes plausible nonsense. Values are read only to name the fault,
and where a rule is about values: block tables, padding, lengths. That waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import layout
from ..errors import DSV4Error, error
from ..metadata import MetadataBuffers
from ..sources import Group
from .writes import Buffer, Write

EACH_STEP = "what describes a step, or is its input, is written between two replays that read it"
COPIED = "a block table is copied again after its source changed"
PAGES = "a block table has a page for each token that the step writes"
REFRESHED = "refresh follows each change of its inputs, before the replay"
PADDING = "rows of inputs after the batch are zero"
TOKENS = "a step has a row for each token of its batch"
CONTEXT = "the tokens before a query were written by steps, or by ops between them"
_FIXES = {
    EACH_STEP: "write it before each step: buffers.load or advance, step(n, name=...), or copy_ into it",
    COPIED: "pass block_tables to buffers.load, or copy the rows that changed",
    PAGES: "give the request a page before the step, and copy it into the table",
    REFRESHED: "call buffers.refresh(n) after load or advance",
    PADDING: "let DecodeRunner.step copy inputs, and write no row after the batch",
    TOKENS: "pass the number of tokens that query_start_loc counts",
    CONTEXT: "advance lengths by the tokens of the step before, and run a step for each; or see witness(contexts=)",
}


@dataclass(frozen=True, slots=True)
class Stale:
    """A buffer that a step would read although it breaks a rule.

    Attributes:
        buffer: its name: "metadata seq_lens", "input hidden".
        what: the rows or columns, and the fault there.
        write: the write that it has, with step and writer.
        step: the step that would read it.
        where: what would be replayed.
        rule: the rule that it breaks.
    """

    buffer: str
    what: str
    write: Write
    step: int
    where: str
    rule: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.where}: {self.buffer} {self.what}, written {self.write}"

    def error(self) -> DSV4Error:
        """Return E431."""
        got = f"{self.buffer} {self.what}, in step {self.step}, {self.where}"
        return error("E431", got=got, rule=self.rule, why=f"written {self.write}", fix=_FIXES[self.rule])


@dataclass(frozen=True, slots=True)
class Batch:
    """Live requests of the persistent metadata, on the host: row, first token, its end, and tokens in all."""

    requests: tuple[tuple[int, int, int, int], ...]

    @classmethod
    def of(cls, buffers: MetadataBuffers) -> Batch:
        """Read lengths and query starts."""
        starts, lens = buffers.tensors["query_start_loc"].tolist(), buffers.tensors["seq_lens"].tolist()
        rows = ((r, starts[r], starts[r + 1], length) for r, length in enumerate(lens) if length > 0)
        return cls(tuple(row for row in rows if row[2] > row[1]))

    @property
    def tokens(self) -> int:
        """End of the last live query."""
        return max((end for _, _, end, _ in self.requests), default=0)


@dataclass(frozen=True, slots=True)
class Reading:
    """Buffers that a step is about to read, with their rows. Writes after number `since` are new."""

    step: int
    where: str
    since: int
    rows: Mapping[Buffer, tuple[int, int]]

    def stale(self, buffer: Buffer, what: str, rule: str, write: Write | None = None) -> Stale:
        """Return a finding."""
        return Stale(buffer.name, what, buffer.last if write is None else write, self.step, self.where, rule)

    def each_step(self) -> Iterator[Stale]:
        """Find inputs with rows, and batches, that were not written since the last reading."""
        for buffer, (first, end) in self.rows.items():
            if buffer.version < 0 or end <= first:
                continue
            if buffer.kind == "input":
                low, high, write = buffer.oldest(first, end)
                if write.serial <= self.since:
                    yield self.stale(buffer, f"rows {low} to {high - 1} of an earlier step", EACH_STEP, write)
            elif buffer.kind in ("batch", "output") and buffer.last.serial <= self.since:
                yield self.stale(buffer, "of an earlier step", EACH_STEP)

    def refreshed(self) -> Iterator[Stale]:
        """Find outputs of refresh that are older than an input of it."""
        inputs = [buffer for buffer in self.rows if buffer.kind in ("batch", "starts", "table")]
        newest = max((buffer.last for buffer in inputs), key=lambda write: write.serial, default=Write())
        for buffer, (first, end) in self.rows.items():
            if buffer.kind == "output" and end > first and buffer.last.serial < newest.serial:
                yield self.stale(buffer, f"older than its inputs, written {newest}", REFRESHED)

    def copied(self, batch: Batch, buffers: MetadataBuffers) -> Iterator[Stale]:
        """Find tables with a source that changed, in columns that the batch uses, and was not copied again."""
        for buffer, group in self._tables(buffers):
            changed = buffer.source.changed() if buffer.source is not None else None
            if buffer.source is None or changed is None or buffer.last.serial > self.since:
                continue
            target = buffer.source.target
            differs = torch.nonzero(target.cpu() != changed.cpu().to(target.dtype)).tolist()
            used = {row: layout.cdiv(length, group.page_tokens) for row, _, _, length in batch.requests}
            for row, column in (index for index in differs if len(index) == 2):
                if column < used.get(row, 0):
                    now, was = int(changed[row, column]), int(target[row, column])
                    what = f"has page {was} for request {row}, column {column}, and its source has {now}"
                    yield self.stale(buffer, what, COPIED)
                    break

    def pages(self, batch: Batch, buffers: MetadataBuffers) -> Iterator[Stale]:
        """Find tables without a page for a token of the batch."""
        for buffer, group in self._tables(buffers):
            for row, start, end, length in batch.requests:
                # A page may be missing before a token completes a row.
                written = [p for p in range(length - (end - start), length) if (p + 1) % group.row_tokens == 0]
                columns = sorted({position // group.page_tokens for position in written})
                entries = buffer.tensor[row, columns].tolist() if columns else []
                missing = next((c for c, entry in zip(columns, entries, strict=True) if entry < 0), None)
                if missing is not None:
                    what = f"has no page for request {row}, column {missing}, of {length} tokens"
                    yield self.stale(buffer, what, PAGES)
                    break

    def tokens(self, batch: Batch, count: int) -> Iterator[Stale]:
        """Find a batch with more tokens than the step has rows."""
        starts = next((buffer for buffer in self.rows if buffer.name.endswith(" query_start_loc")), None)
        if starts is not None and batch.tokens > count:
            yield self.stale(starts, f"counts {batch.tokens} tokens, and the step has {count}", TOKENS)

    def padding(self, tokens: int, bucket: int) -> Iterator[Stale]:
        """Find inputs with values in rows after the batch."""
        for buffer in self.rows:
            if buffer.kind == "input" and tokens < bucket:
                wrong = _first_row_with_values(buffer.tensor[tokens:bucket])
                if wrong is not None:
                    _, _, write = buffer.oldest(tokens + wrong, tokens + wrong + 1)
                    yield self.stale(buffer, f"row {tokens + wrong}, padding, is not zero", PADDING, write)

    def _tables(self, buffers: MetadataBuffers) -> Sequence[tuple[Buffer, Group]]:
        groups = {f"metadata {group.name}_block_table": group for group in buffers.plan.groups}
        return [(b, groups[b.name]) for b in self.rows if b.kind == "table" and b.name in groups]


def _first_row_with_values(rows: Tensor) -> int | None:
    """Return the first of `rows` that is not all zeros, NaN included."""
    rows_with_values = torch.nonzero((rows != 0).flatten(1).any(1) if rows.dim() > 1 else rows != 0)
    return int(rows_with_values[0, 0]) if rows_with_values.numel() else None
