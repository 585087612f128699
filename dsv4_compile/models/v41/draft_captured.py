"""Steps with drafts whose whole state is on the device: several in a row run without the host, captured or not.

    steps.load(first_tokens, lengths, numbers, seeds)
    tokens, counts = steps.run(16)     # [16, R, N + 1] and [16, R]

A step leaves the inputs of the next one at fixed addresses: anchors, lengths, drafts and their logits. The first step
after `load` has no drafts: it chooses a token and drafts the ones after it. Requests that come and go are described by
`join` and `describe` instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from ...errors import check
from ...layout import PAD_INDEX
from ...runtime.drafting import NO_DRAFT, NUMBERS, DraftStatistics, Verified
from ...sizes import check_memory, check_size
from .cache import V41Caches
from .captured import MAX_RUN_STEPS, Captures, bucket_sizes
from .draft_steps import DraftRows
from .model import V41Model
from .prefill import LEAST_ROWS

VerifyStep = Callable[[V41Model, DraftRows, V41Caches], Verified]
"""`draft_steps.verify`, or what compiles it."""


class DraftTensors:
    """State of `size` requests, and the tokens of their steps, at fixed addresses.

    Attributes:
        rows: see `DraftRows`; padding has length -1.
        record: int64 `[MAX_RUN_STEPS, size, N + 2]`, number of new tokens of each step and these tokens, then -1.
        count: int64 `[1]`, steps since `load`.
        accepted: int64 `[N + 1]`, steps of single requests by number of accepted drafts, since they were allocated.
    """

    def __init__(self, size: int, model: V41Model) -> None:
        assert model.mtp is not None
        device, drafts = model.device, model.mtp.block
        check_memory("logits of drafts", 4 * size * drafts * model.vocab, device)

        def ints(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int64, device=device)

        with torch.inference_mode(False):  # later steps write them in any mode
            self.rows = DraftRows(
                anchors=ints(size),
                lengths=ints(size, fill=PAD_INDEX),
                limits=ints(size),
                drafts=ints(size, drafts, fill=NO_DRAFT),
                draft_logits=torch.zeros((size, drafts, model.vocab), dtype=torch.float32, device=device),
                numbers=torch.zeros((size, NUMBERS), dtype=torch.float64, device=device),
                seeds=ints(size),
            )
            self.record, self.count = ints(MAX_RUN_STEPS, size, drafts + 2), ints(1)
            self.accepted, self._kinds = ints(drafts + 1), torch.arange(1, drafts + 2, device=device)

    def first(self, rows: int) -> DraftTensors:
        """Return the state of the first rows, in the same memory."""
        part = copy.copy(self)
        part.rows = DraftRows(*(_first(tensor, rows) for tensor in self.rows))
        part.record = self.record[:, :rows]
        return part

    def clear(self) -> None:
        """Make all rows padding."""
        self.rows.lengths.fill_(PAD_INDEX)
        self.count.zero_()

    def load(self, anchors: Tensor, lengths: Tensor, numbers: Tensor, seeds: Tensor, limit: int) -> None:
        """Copy requests without drafts in, and make the rows after them padding."""
        rows, used = self.rows, len(anchors)
        self.clear()
        rows.drafts.fill_(NO_DRAFT)
        rows.limits.fill_(limit)
        given = (rows.anchors, anchors), (rows.lengths, lengths), (rows.numbers, numbers), (rows.seeds, seeds)
        for target, values in given:
            target[:used].copy_(values, non_blocking=True)

    def join(self, places: Tensor, numbers: Tensor, seeds: Tensor) -> None:
        """Let requests without drafts take the rows `places`, int64 `[K]`; see `DraftRows` for the others."""
        rows = self.rows
        rows.numbers.index_copy_(0, places, numbers)
        rows.seeds.index_copy_(0, places, seeds)
        rows.drafts.index_fill_(0, places, NO_DRAFT)

    def describe(self, anchors: Tensor, lengths: Tensor, limits: Tensor) -> None:
        """Set the last token, the length and the limit of the first requests; rows after them are padding."""
        rows, used = self.rows, len(anchors)
        rows.lengths[used:].fill_(PAD_INDEX)
        for target, values in ((rows.anchors, anchors), (rows.lengths, lengths), (rows.limits, limits)):
            target[:used].copy_(values, non_blocking=True)

    def advance(self, done: Verified) -> Tensor:
        """Note the new tokens of a step, and make the next one of its drafts; return what is noted, `[size, N + 2]`.

        A request without a finite largest logit, whose last token is -1, becomes padding. Padding keeps its drafts.
        """
        rows, kept = self.rows, done.num_new.long()
        ran = kept > 0
        last = done.tokens.gather(1, (kept - 1).clamp_min(0)[:, None])[:, 0]
        tokens = torch.where(ran[:, None], done.tokens, NO_DRAFT)
        noted = torch.cat((kept[:, None], tokens), 1)
        self.record.index_copy_(0, self.count % MAX_RUN_STEPS, noted[None])
        self.count.add_(1)
        self.accepted.add_((kept[:, None] == self._kinds).sum(0))
        rows.anchors.copy_(torch.where(ran, last, rows.anchors))
        rows.lengths.copy_(torch.where(ran & (last < 0), PAD_INDEX, rows.lengths + kept))
        torch.where(ran[:, None], done.drafts, rows.drafts, out=rows.drafts)
        if done.draft_logits is not None:
            torch.where(ran[:, None, None], done.draft_logits, rows.draft_logits, out=rows.draft_logits)
        return noted

    def stop(self, row: int) -> None:
        """Make a row of the next steps padding. Waits for nothing."""
        self.rows.lengths[row : row + 1].fill_(PAD_INDEX)

    def named(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {**self.rows._asdict(), **{name: value for name, value in vars(self).items() if name != "rows"}}


def _first(tensor: Tensor, rows: int) -> Tensor:
    """Return the first rows of a tensor, no view of it: a graph is specialised on the sizes of a view's base."""
    shape = rows, *tensor.shape[1:]
    with torch.inference_mode(False):
        return tensor.new_empty(0).set_(tensor.untyped_storage(), 0, shape, tensor.stride())


class _State:
    """State of the requests of steps with drafts."""

    _state: DraftTensors

    def join(self, places: Tensor, numbers: Tensor, seeds: Tensor) -> None:
        """Let requests without drafts take rows, see `DraftTensors.join`."""
        self._state.join(places, numbers, seeds)

    def stop(self, row: int) -> None:
        """Make a row of the next steps padding. Waits for nothing."""
        self._state.stop(row)

    def draft_statistics(self) -> DraftStatistics:
        """Return the acceptance since `load`. Waits for the device."""
        return DraftStatistics(tuple(self._state.accepted.tolist()))


class DraftSteps(_State):
    """Steps with drafts that are not captured.

    Args:
        model, caches: what the steps read and write.
        verify: a step of them.
    """

    def __init__(self, model: V41Model, caches: V41Caches, verify: VerifyStep) -> None:
        self.model, self.caches, self._verify = model, caches, verify
        self._state = DraftTensors(max(LEAST_ROWS, caches.max_batch_size), model)
        self._loaded, self._rows = self._state.first(LEAST_ROWS), 0

    def describe(self, anchors: Tensor, lengths: Tensor, limits: Tensor) -> None:
        """Describe the next step, see `DraftTensors.describe`. Drafts of its requests stay."""
        self._choose(len(anchors)).describe(anchors, lengths, limits)

    def _choose(self, rows: int) -> DraftTensors:
        """Return the state of the next steps, of so many requests."""
        self._loaded, self._rows = self._state.first(max(LEAST_ROWS, rows)), rows
        return self._loaded

    def load(self, anchors: Tensor, lengths: Tensor, numbers: Tensor, seeds: Tensor) -> None:
        """Begin with the last token of each request int64 `[R]`, at position `lengths` `[R]`; see `DraftRows`."""
        tensors = self._choose(len(anchors))
        tensors.load(anchors, lengths, numbers, seeds, self.caches.max_seq_len)
        tensors.accepted.zero_()

    @torch.no_grad()
    def step(self) -> Tensor:
        """Run a step; return int64 `[R, N + 2]`, the number of new tokens of each request and these tokens."""
        tensors = self._loaded
        return tensors.advance(self._verify(self.model, tensors.rows, self.caches))[: self._rows]


class CapturedDrafts(_State, Captures):
    """Captures of a step with drafts, for padded numbers of requests: verify, accept, draft and advance in one graph.

    Args:
        model, caches, graphs: see `Captures`.
        verify: `draft_steps.verify`, or what compiles it.
        buckets: numbers of requests to capture, at least 2 (None = those of 1 to `max_batch_size`).
    """

    _tensors: dict[int, DraftTensors]

    def __init__(
        self,
        model: V41Model,
        caches: V41Caches,
        verify: VerifyStep,
        *,
        buckets: Collection[int] | None = None,
        graphs: str = "auto",
    ) -> None:
        sizes = bucket_sizes(caches) if buckets is None else buckets
        super().__init__(model, caches, sizes, caches.max_batch_size, unit="requests with drafts", graphs=graphs)
        self._verify = verify
        self._state = DraftTensors(self.buckets.sizes[-1], model)
        self._tensors = {size: self._state.first(size) for size in self.buckets}

    def _call_of(self, size: int) -> Callable[[], Tensor]:
        """Return a step of `size` requests at the fixed addresses, which returns what `step` does."""
        tensors = self._tensors[size]

        def call() -> Tensor:
            return tensors.advance(self._verify(self.model, tensors.rows, self.caches))

        captured: Callable[[], Tensor] = torch.no_grad()(call)
        return captured

    def load(self, anchors: Tensor, lengths: Tensor, numbers: Tensor, seeds: Tensor, *, compare: bool = True) -> None:
        """Begin with the last token of each request int64 `[R]`, at position `lengths` `[R]`; see `DraftRows`.

        E204 above the largest bucket; E421, unless `compare` is False, for a tensor that moved since the capture.
        """
        tensors = self._choose_bucket(len(anchors), compare)
        tensors.load(anchors, lengths, numbers, seeds, self.caches.max_seq_len)
        tensors.accepted.zero_()

    def describe(self, anchors: Tensor, lengths: Tensor, limits: Tensor) -> None:
        """Describe the next step, see `DraftTensors.describe`. Drafts of its requests stay. E204 as in `load`."""
        self._choose_bucket(len(anchors), False).describe(anchors, lengths, limits)

    def step(self) -> Tensor:
        """Replay a step; return int64 `[R, N + 2]`, the number of new tokens of each request and these tokens.

        Valid until the next replay. One launch. E427 before warm_up.
        """
        record: Tensor = self._replay()
        return record[: self._rows]

    def run(self, steps: int) -> tuple[Tensor, Tensor]:
        """Run steps; return their tokens int64 `[steps, R, N + 1]` and numbers `[steps, R]`, until the next run.

        One launch a step, and the host waits for nothing. After the tokens of a step that are new, -1 follows.
        """
        steps = check_size("steps", steps)
        check(steps <= MAX_RUN_STEPS, "E204", got=f"a run of {steps} steps", rule=f"at most {MAX_RUN_STEPS}")
        tensors = self._tensors[self._loaded]
        tensors.count.zero_()
        for _ in range(steps):
            self.step()
        record = tensors.record[:steps, : self._rows]
        return record[..., 1:], record[..., 0]
