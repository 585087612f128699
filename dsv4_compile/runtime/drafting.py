"""Steps with drafts: verify N drafts and a token of each request, accept, and draft again, all on the device.

A step feeds N + 1 tokens of a request at positions L .. L + N: the last token that was chosen, and N drafts of those
after it. `accept_drafts` keeps the drafts that the target agrees with, `num_new - 1` of them, and chooses the token
that follows. The others need no undoing: see `reference.metadata.advance`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import check, fail
from ..metadata import AttentionMetadata, MetadataBuffers
from ..sizes import check_memory, check_size, shown
from .addresses import named_tensors

NO_DRAFT = -1
"""Draft for a place that has none: verification ends there."""
current_stage: ContextVar[str] = ContextVar("dsv4_stage", default="")
"""Stage of a step with drafts that launches now, for reports: "verify", "accept", "draft", "advance", or ""."""
SEEDS = 2**63
"""Seeds that ops take: larger ones of a request are taken modulo it."""
NUMBERS = 4
"""Columns of `numbers`, as `accept_drafts` takes them: temperature, top-k, top-p, unused."""


def staged(stage: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of `call`, which belongs to a stage of the step."""
    if torch.compiler.is_dynamo_compiling():
        return call(*args, **kwargs)
    token = current_stage.set(stage)
    try:
        return call(*args, **kwargs)
    finally:
        current_stage.reset(token)


class DraftSource(Protocol):
    """Proposes tokens of requests, such as the draft layers of a checkpoint.

    Attributes:
        num_drafts: N, drafts of a request in a step.
        taps: what it reads of the target's layers, or None.
    """

    num_drafts: int
    taps: Any

    def adopt(self) -> None:
        """Read weights that have changed, on the host, before a call."""

    def new_caches(self, max_batch_size: int) -> Any:
        """Allocate its caches for a number of requests; None for a source without state."""

    def inject(
        self,
        taps: Tensor | None,
        metadata: AttentionMetadata,
        next_tokens: Tensor | None,
        num_new: Tensor | None = None,
        caches: Any = None,
    ) -> None:
        """Write what drafts read of the target's tokens.

        Args:
            taps: of the T tokens that the target has run, `[T, ...]`; None for a source without taps.
            metadata: of these tokens.
            next_tokens: int64 `[T]`, the token after each, -1 where it is unknown.
            num_new: int32 `[R]`, in a verify step of T = R * (N + 1) tokens the first rows of each request to write,
                0 for none. None writes all valid rows.
            caches: what `new_caches` returned.
        """

    def propose(
        self,
        anchors: Tensor,
        lengths: Tensor,
        numbers: Tensor,
        seeds: Tensor,
        requests: Tensor | None = None,
        caches: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return drafts int64 `[R, N]`, and the logits that they were drawn from, float32 `[R, N, V]`.

        Args:
            anchors: int64 `[R]`, the last token of each request, at position `lengths`; -1 for padding.
            lengths: int64 `[R]`, tokens of each request that the target has run; 0 for padding.
            numbers, seeds: as in `accept_drafts`.
            requests: row of each request in the caches (None = in order).

        Logits are None where drafts are chosen without chance. A draft of -1 is none.
        """


@dataclass(frozen=True)
class DraftStatistics:
    """Numbers of accepted drafts.

    Attributes:
        accepted: for k = 0 .. N, the verified steps of single requests that accepted k drafts.
    """

    accepted: tuple[int, ...]

    @property
    def steps(self) -> int:
        """Verified steps, counted for each request."""
        return sum(self.accepted)

    @property
    def tokens(self) -> int:
        """Tokens of all steps: accepted drafts, and one more a step."""
        return sum((k + 1) * count for k, count in enumerate(self.accepted))

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens of a request in a step, 1 to N + 1; NaN before the first step."""
        return self.tokens / self.steps if self.steps else float("nan")

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Share of steps that accepted the draft at each position, `[N]`; a later one needs all before it."""
        reached = [sum(self.accepted[k:]) for k in range(1, len(self.accepted))]
        return tuple(count / self.steps if self.steps else float("nan") for count in reached)

    def __str__(self) -> str:
        positions = " ".join(f"{share:.2f}" for share in self.acceptance)
        return f"{self.tokens_per_step:.2f} tokens a step over {self.steps} steps; accepted by position: {positions}"


class Verified(NamedTuple):
    """Results of `accept_and_draft` for R requests.

    Attributes:
        num_new: int32 `[R]`, tokens that each request keeps of its query, 0 for an idle one.
        tokens: int64 `[R, N + 1]`, the accepted drafts, the token that follows, then -1.
        drafts: int64 `[R, N]` of the next step, -1 where there is none.
        draft_logits: float32 `[R, N, V]` that they were drawn from, or None.
    """

    num_new: Tensor
    tokens: Tensor
    drafts: Tensor
    draft_logits: Tensor | None


class Verify(NamedTuple):
    """Requests that a step has verified.

    Attributes:
        drafts: int64 `[R, N]` that were fed, -1 for none; draft_logits: float32 `[R, N, V]`, or None.
        numbers, seeds: how each request samples, see `accept_drafts`.
        lengths: int64 `[R]`, L: tokens of each request before the step.
        limits: int `[R]`, most tokens of each request. One without room for its next query is not drafted.
        active: bool `[R]`, False for padding and for requests that sit the step out.
    """

    drafts: Tensor
    draft_logits: Tensor | None
    numbers: Tensor
    seeds: Tensor
    lengths: Tensor
    limits: Tensor
    active: Tensor


def accept_and_draft(
    source: DraftSource, caches: Any, logits: Tensor, taps: Tensor | None, metadata: AttentionMetadata, step: Verify
) -> Verified:
    """Accept drafts by the target's logits `[R * (N + 1), V]`, inject the rows that are kept, and draft again."""
    count = source.num_drafts
    proposed = step.drafts, step.draft_logits, step.numbers, step.seeds, step.lengths
    num_new, tokens = staged("accept", torch.ops.dsv4.accept_drafts, logits, *proposed)
    last = tokens.gather(1, (num_new.long() - 1)[:, None])[:, 0]
    num_new = torch.where(step.active, num_new, 0)
    staged("draft", source.inject, taps, metadata, tokens.flatten(), num_new=num_new, caches=caches)
    lengths = step.lengths + num_new
    fits = step.active & (lengths + count + 1 <= step.limits) & (last >= 0)
    anchors, lengths = torch.where(fits, last, NO_DRAFT), torch.where(fits, lengths, 0)
    drafts, draft_logits = staged("draft", source.propose, anchors, lengths, step.numbers, step.seeds, caches=caches)
    return Verified(num_new, tokens, torch.where(fits[:, None], drafts, NO_DRAFT), draft_logits)


class Drafting:
    """Drafts and the choice of tokens of a runner's requests, at fixed addresses.

    Args:
        buffers: the runner's metadata.
        source: proposes drafts.
        caches: of the source.
        max_steps: most steps of one `run`.

    Attributes:
        numbers, seeds: float64 `[R, 4]` and int64 `[R]`, how each request samples; greedy at first.
        drafts: int64 `[R, N]`, to verify in the next step; -1 for none.
        draft_logits: float32 `[R, N, V]` that they were drawn from, None for a source that returns none.
        accepted: int64 `[N + 1]`, steps by number of accepted drafts.
    """

    captured = True

    def __init__(self, buffers: MetadataBuffers, source: DraftSource, caches: Any, max_steps: int) -> None:
        methods = all(callable(getattr(source, name, None)) for name in ("inject", "propose"))
        if not methods or type(getattr(source, "num_drafts", None)) is not int:
            fail(
                "E201",
                got=f"drafts={shown(source)}",
                rule="a source of drafts has num_drafts, inject and propose",
                fix="pass a model's dsv4_drafts, or an object with the methods of runtime.DraftSource",
            )
        self.source, self.caches = source, caches
        self.count = check_size("num_drafts", source.num_drafts)
        rows, width, device = buffers.max_num_seqs, self.count + 1, buffers.tensors["seq_lens"].device
        check(
            rows * width <= buffers.max_num_batched_tokens,
            "E204",
            got=f"{rows} requests of {width} tokens with buffers of {buffers.max_num_batched_tokens}",
            fix=f"allocate MetadataBuffers(max_num_batched_tokens={rows * width})",
        )
        check_memory("tokens of a run", 8 * max_steps * rows * width, device)
        self._buffers = buffers

        def ints(*shape: int, fill: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        self.numbers = torch.zeros(rows, NUMBERS, dtype=torch.float64, device=device)
        self.numbers[:, 2] = 1
        self.seeds, self.drafts = ints(rows), ints(rows, self.count, fill=NO_DRAFT)
        self.draft_logits: Tensor | None = None
        self.accepted = ints(width)
        self.anchors, self.lengths = ints(rows, fill=NO_DRAFT), ints(rows)
        self._tokens, self._num_new = ints(rows, width), ints(rows, dtype=torch.int32)
        self.chosen, self.kept = ints(max_steps, rows, width), ints(max_steps, rows, dtype=torch.int32)
        self._step = ints(1)
        self._kinds = torch.arange(1, width + 1, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors at fixed addresses by name."""
        named = {"numbers": self.numbers, "seeds": self.seeds, "drafts": self.drafts, "accepted": self.accepted}
        if self.draft_logits is not None:
            named["draft_logits"] = self.draft_logits
        of_caches: dict[str, Tensor] = getattr(self.caches, "tensors", dict)()
        named |= {f"draft caches {name}": tensor for name, tensor in of_caches.items()}
        return named | named_tensors(self.source, "drafts")

    def load(
        self,
        anchors: Sequence[int],
        lengths: Sequence[int],
        *,
        numbers: Tensor | None = None,
        seeds: Sequence[int] | None = None,
        reserved: Sequence[int] | None = None,
    ) -> None:
        """Describe a batch without drafts: the last token of each request, at position `lengths`, and its sampling.

        Args:
            anchors: a token of each of the first R requests.
            lengths: tokens of each request in the caches; -1 leaves its row empty.
            numbers, seeds: see `accept_drafts`; None is greedy.
            reserved: tokens that each request has pages for.

        `DecodeRunner.draft` then drafts; without it the next step chooses a single token of each request. Raises E201
        for arguments that do not describe as many requests, before anything is written.
        """
        width, rows = self.count + 1, len(lengths)
        described = {"anchors": anchors, "seeds": seeds, "reserved": reserved}
        counts = {name: len(values) for name, values in described.items() if values is not None}
        good = all(count == rows for count in counts.values())
        got = ", ".join(f"{count} {name}" for name, count in counts.items())
        check(good, "E201", got=f"{got} and {rows} lengths", rule="each request has one of each")
        shape = numbers.shape if isinstance(numbers, Tensor) else None
        if numbers is not None and shape != (rows, NUMBERS):
            fail("E201", got=f"numbers={shown(numbers)}", rule=f"numbers is a tensor [{rows}, {NUMBERS}]")
        if seeds is not None and not all(0 <= seed < 2**63 for seed in seeds):
            fail("E201", got=f"seeds={shown(seeds)}", rule="seeds are integers from 0 to 2**63 - 1")
        if any(anchor < 0 <= length for anchor, length in zip(anchors, lengths, strict=True)):
            fail("E201", got=f"anchors={shown(anchors)}", rule="anchors are token ids, from 0 on")
        starts = [row * width for row in range(rows + 1)]
        ids = [token for anchor in anchors for token in (anchor, *[0] * self.count)]
        seq_lens = [length + width if length >= 0 else 0 for length in lengths]
        self._buffers.load(starts, seq_lens, input_ids=ids, reserved=reserved)
        self.numbers.zero_()
        self.numbers[:, 2] = 1
        self.seeds.zero_()
        if numbers is not None:
            self.numbers[:rows].copy_(numbers)
        if seeds is not None:
            self.seeds[:rows].copy_(torch.tensor(seeds, dtype=torch.int64))
        self.drafts.fill_(NO_DRAFT)
        self.anchors.fill_(NO_DRAFT)
        self.lengths.zero_()
        drafted = [anchor if length > 0 else NO_DRAFT for anchor, length in zip(anchors, lengths, strict=True)]
        self.anchors[:rows].copy_(torch.tensor(drafted, dtype=torch.int64))
        self.lengths[:rows].copy_(torch.tensor([max(length, 0) for length in lengths], dtype=torch.int64))

    def draft(self) -> None:
        """Draft for the requests with an anchor in `anchors`, of `lengths` tokens; the drafts of others stay."""
        rows, width = len(self.anchors), self.count + 1
        room = self.lengths + width <= self._buffers.tensors["reserved"]
        fits = (self.lengths > 0) & (self.anchors >= 0) & room
        drafts, logits = self.source.propose(
            torch.where(fits, self.anchors, NO_DRAFT),
            torch.where(fits, self.lengths, 0),
            self.numbers,
            self.seeds,
            caches=self.caches,
        )
        self._put(rows, drafts, logits, fits)
        self.feed(rows)

    def feed(self, rows: int) -> None:
        """Set the tokens to verify of the first `rows` requests to their drafts."""
        width = self.count + 1
        rows = min(rows, self._buffers.max_num_batched_tokens // width)
        fed = self._buffers.tensors["input_ids"][: rows * width].view(rows, width)
        fed[:, 1:].copy_(self.drafts[:rows].clamp_min(0))

    def begin(self) -> None:
        """Restart the record of chosen tokens."""
        self._step.zero_()

    def finish_step(self, outputs: Any, num_reqs: int) -> None:
        """Accept, record, draft, and advance the batch, by the target's logits or `(logits, taps)`."""
        logits, taps = (*outputs, None)[:2] if isinstance(outputs, (tuple, list)) else (outputs, None)
        width, buffers = self.count + 1, self._buffers
        if not (isinstance(logits, Tensor) and logits.dim() == 2 and logits.shape[0] >= num_reqs * width):
            fail(
                "E201",
                got=f"a step that returns {shown(outputs)} for {num_reqs} requests",
                rule=f"a step with drafts returns logits [R * {width}, vocabulary], or these and its taps",
            )
        lens = buffers.tensors["seq_lens"][:num_reqs].long()
        active = lens >= width
        step = Verify(
            self.drafts[:num_reqs],
            None if self.draft_logits is None else self.draft_logits[:num_reqs],
            self.numbers[:num_reqs],
            self.seeds[:num_reqs],
            (lens - width).clamp_min(0),
            buffers.tensors["reserved"][:num_reqs],
            active,
        )
        metadata = buffers.metadata(num_reqs * width)
        follow = getattr(self.source, "accept_and_draft", None) or partial(accept_and_draft, self.source)
        done = follow(self.caches, logits[: num_reqs * width], taps, metadata, step)
        self.accepted.add_((done.num_new[:, None] == self._kinds).sum(0))
        self._num_new[:num_reqs].copy_(done.num_new)
        self._tokens[:num_reqs].copy_(done.tokens)
        self._put(num_reqs, done.drafts, done.draft_logits, active)
        self.chosen.index_copy_(0, self._step, self._tokens[None])
        self.kept.index_copy_(0, self._step, self._num_new[None])
        self._step.add_(1)
        buffers.advance(self._num_new, self._tokens.clamp_min(0), self.drafts.clamp_min(0), query_len=width)

    def _put(self, rows: int, drafts: Tensor, logits: Tensor | None, drafted: Tensor) -> None:
        """Keep the drafts of the requests that have new ones, bool `[rows]`."""
        old = self.drafts[:rows]
        torch.where(drafted[:, None], drafts.to(old.dtype), old, out=old)
        if logits is None:
            return
        if self.draft_logits is None:  # in a warm-up, before anything is captured
            shape = (self._buffers.max_num_seqs, *logits.shape[1:])
            check_memory("logits of drafts", 4 * shape[0] * shape[1] * shape[2], logits.device)
            with torch.inference_mode(False):  # later steps write them in any mode
                self.draft_logits = torch.zeros(shape, dtype=torch.float32, device=logits.device)
        old_logits = self.draft_logits[:rows]
        torch.where(drafted[:, None, None], logits.to(old_logits.dtype), old_logits, out=old_logits)

    def result(self, steps: int, num_reqs: int) -> tuple[Tensor, Tensor]:
        """Return tokens int64 `[steps, num_reqs, N + 1]` and the numbers kept, int32 `[steps, num_reqs]`."""
        return self.chosen[:steps, :num_reqs], self.kept[:steps, :num_reqs]

    def statistics(self) -> DraftStatistics:
        """Return the acceptance of all steps so far. Waits for the device."""
        return DraftStatistics(tuple(self.accepted.tolist()))
