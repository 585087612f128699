"""Decode steps of a model as CUDA graphs, one for each padded number of tokens, the choice of tokens in them.

    captured.load(ids, positions, requests)   # to fixed addresses
    tokens = captured.run(16)                 # 16 launches; the host waits for nothing

A graph advances its tokens: after a replay its inputs are those of the next greedy step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ... import progress
from ...errors import check, fail
from ...layout import PAD_INDEX
from ...reference.drafts.distributions import likeliest_tokens
from ...runtime import Capture, Graphs, Statistics, graphs_for, request_buckets
from ...runtime.addresses import AddressCheck, AtFixedAddresses, HeldTensors, named_tensors
from ...runtime.step import Buckets
from ...runtime.warmup import warming_up
from ...sizes import check_size
from .cache import V41Caches
from .model import V41Model
from .prefill import LEAST_ROWS

GRAPHS = ("auto", "cuda", "off", "standin")
MAX_RUN_STEPS = 1024
"""Most steps of one `run`, whose tokens stay on the device."""


class StepTensors:
    """Inputs of a captured step of `size` tokens and the tokens that it chose, at fixed addresses.

    Attributes:
        ids, positions, requests: int64 `[size]`; padding has position and request -1.
        rows: int64 `[size]`, of logits: 0, 1, 2...
        record: int64 `[MAX_RUN_STEPS, size]`, chosen tokens by step; count: int64 `[1]`, steps so far.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.positions, self.requests = (torch.full_like(self.ids, PAD_INDEX) for _ in range(2))
        self.rows = torch.arange(size, device=device)
        self.record = torch.zeros((MAX_RUN_STEPS, size), dtype=torch.int64, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)

    def load(self, ids: Tensor, positions: Tensor, requests: Tensor) -> None:
        """Copy a step in, and make the rows after it padding."""
        tokens = len(ids)
        for target, values, pad in (
            (self.ids, ids, 0),
            (self.positions, positions, PAD_INDEX),
            (self.requests, requests, PAD_INDEX),
        ):
            target[:tokens].copy_(values, non_blocking=True)
            target[tokens:].fill_(pad)
        self.count.zero_()

    def clear(self) -> None:
        """Make all rows padding."""
        self.load(*(self.ids[:0],) * 3)

    def advance(self, chosen: Tensor) -> None:
        """Note the chosen tokens `[size]`, and make them the inputs of the next step."""
        self.record.index_copy_(0, self.count % MAX_RUN_STEPS, chosen[None])
        self.count.add_(1)
        self.ids.copy_(chosen)
        self.positions.add_(self.positions >= 0)

    def named(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return dict(vars(self))


def bucket_sizes(caches: V41Caches) -> set[int]:
    """Return the padded numbers of requests of decode steps, at least 2."""
    return {max(LEAST_ROWS, size) for size in request_buckets(caches.max_batch_size)}


class Captures(AtFixedAddresses):
    """Captures of a step over a model's caches for padded sizes; a step replays the smallest that holds it.

    Args:
        model, caches: what the steps read and write.
        sizes: rows of inputs to capture, each at least 2.
        most: largest size that the caches take.
        unit: name of a row, in errors and progress.
        graphs: "auto" and "cuda" for CUDA graphs, "standin" to replay on a CPU in tests; or the pool of other captures.

    Model and caches must stay where they are (E421). A step that cannot be captured raises E422, one that captures
    inside E424. Copies and use after a fork raise E432.
    """

    _tensors: Mapping[int, Any]
    """Inputs of each size, at fixed addresses."""

    def __init__(
        self, model: V41Model, caches: V41Caches, sizes: Collection[int], most: int, *, unit: str, graphs: str | Graphs
    ) -> None:
        self.model, self.caches, self.unit = model, caches, unit
        if isinstance(graphs, str):
            graphs = graphs_for(model.device, graphs, 'v41.compile(graphs="standin")')
        self.graphs: Graphs = graphs
        self.buckets = Buckets(sizes, max(LEAST_ROWS, most))
        least = self.buckets.sizes[0]
        check(least >= LEAST_ROWS, "E204", got=f"a bucket of {least} {unit}", rule=f"at least {LEAST_ROWS}")
        self.statistics = Statistics()
        self._captures: dict[int, Capture] = {}
        self._loaded, self._rows = self.buckets.sizes[-1], 0

    def __repr__(self) -> str:
        state, sizes = "captured" if self.sealed else "not warmed up", ", ".join(map(str, self.buckets.sizes))
        return f"{type(self).__name__}({sizes} {self.unit} on {self.graphs.kind}, {state})"

    @property
    def sealed(self) -> bool:
        """True after warm_up; from then on nothing is compiled or captured."""
        return bool(self._captures)

    def _captured_tensors(self) -> dict[str, Tensor]:
        """Return all tensors that a capture holds the addresses of, by name."""
        named = named_tensors(self.model, "model") | named_tensors(self.caches.named(), "caches")
        return named | named_tensors({size: tensors.named() for size, tensors in self._tensors.items()}, "inputs")

    def _call_of(self, size: int) -> Callable[[], Any]:
        """Return a step of `size` rows at the fixed addresses."""
        raise NotImplementedError

    def warm_up(self) -> None:
        """Run and capture every bucket, largest first, by steps of padding, which write nothing. E425 if called again.

        With `dsv4.strict="after_warmup"` nothing may compile after it.
        """
        check(not self.sealed, "E425", got="warm_up of steps that have captured", fix="compile other steps")
        captures: dict[int, Capture] = {}
        with warming_up(), progress.stage("capture", total=len(self.buckets)) as work:
            for size in self.buckets:
                work.note(f"{size} {self.unit}")
                self._tensors[size].clear()
                for _ in range(2):
                    self.graphs.warm_up(self._call_of(size))
                captures[size] = self.graphs.capture(self._call_of(size), f"the step of {size} {self.unit}")
                self.statistics.captures += 1
                work.advance()
        self._captures = captures
        self.statistics.capture_bytes = self.graphs.memory()
        self._addresses = AddressCheck(self._captured_tensors, self.graphs.device)
        self._held = HeldTensors(self._captured_tensors().values())

    def check(self) -> None:
        """Raise E421 for a tensor of the model, the caches or the inputs that was moved or replaced since the capture.

        `load` finds tensors that moved, this those too that others have replaced.
        """
        self._addresses.check("the graphs of v41.compile")

    def fits(self, rows: int) -> bool:
        """Return whether a step of this many rows has a graph."""
        return rows <= self.buckets.sizes[-1]

    def _choose_bucket(self, rows: int, compare: bool) -> Any:
        """Return the inputs of the smallest bucket that holds so many rows, which steps run from now on."""
        self.check_process()
        bucket = self.buckets.fit(rows)
        if bucket is None:
            most = self.buckets.sizes[-1]
            fail("E204", got=f"a captured step of {rows} {self.unit}", rule=f"at most {most}, the largest bucket")
        if compare and self.sealed and not self._held.hold():
            self.check()
        self._loaded, self._rows = bucket, rows
        return self._tensors[bucket]

    def _replay(self) -> Any:
        """Replay the loaded step; return what its call returned. E427 before warm_up."""
        self.check_process()
        captured = self._captures.get(self._loaded)
        if captured is None:
            fail("E427", got=f"a step of {type(self).__name__} that have captured nothing")
        captured.replay()
        self.statistics.replays += 1
        return captured.outputs


class CapturedSteps(Captures):
    """Captures of a step of one token a row.

    Args:
        model, caches, graphs: see `Captures`.
        forward: `V41Model.logits` of the model, or the compiled model.
        buckets: numbers of tokens to capture, at least 2 (None = those of 1 to `max_batch_size` requests).
    """

    _tensors: dict[int, StepTensors]

    def __init__(
        self,
        model: V41Model,
        caches: V41Caches,
        forward: Callable[..., Tensor],
        *,
        buckets: Collection[int] | None = None,
        graphs: str = "auto",
    ) -> None:
        sizes = bucket_sizes(caches) if buckets is None else buckets
        super().__init__(
            model, caches, sizes, caches.max_batch_size * caches.max_step_tokens, unit="tokens", graphs=graphs
        )
        self._forward = forward
        with torch.inference_mode(False):  # later steps write them in any mode
            self._tensors = {size: StepTensors(size, model.device) for size in self.buckets}

    def _call_of(self, size: int) -> Callable[[], tuple[Tensor, Tensor]]:
        """Return a step of `size` tokens at the fixed addresses: its logits `[size, V]` and likeliest tokens."""
        tensors = self._tensors[size]

        def call() -> tuple[Tensor, Tensor]:
            inputs = tensors.ids, tensors.positions, tensors.requests
            logits = self._forward(*inputs, self.caches, tail=None, last=tensors.rows)
            likeliest = likeliest_tokens(logits)
            tensors.advance(likeliest)
            return logits, likeliest

        captured: Callable[[], tuple[Tensor, Tensor]] = torch.no_grad()(call)
        return captured

    def load(self, ids: Tensor, positions: Tensor, requests: Tensor, *, compare: bool = True) -> None:
        """Copy the next step, int `[T]` each, to the smallest bucket that holds it.

        Waits for nothing if the tensors are on the device, or pinned. E204 above the largest bucket; E421, unless
        `compare` is False, for a tensor of the model or the caches that moved since the capture.
        """
        self._choose_bucket(len(ids), compare).load(ids, positions, requests)

    def step(self) -> tuple[Tensor, Tensor]:
        """Replay the loaded step; return its logits `[T, V]` and likeliest tokens int64 `[T]`, until the next replay.

        The inputs advance: the next step has these tokens at the next positions. One launch. E427 before warm_up.
        """
        logits, likeliest = self._replay()
        return logits[: self._rows], likeliest[: self._rows]

    def choose(self, tokens: Tensor) -> None:
        """Replace the likeliest tokens of the last step by others, int64 `[T]` on the device, as inputs of the next."""
        self._tensors[self._loaded].ids[: self._rows].copy_(tokens)

    def stop(self, row: int) -> None:
        """Make a row of the next steps padding. Waits for nothing."""
        tensors = self._tensors[self._loaded]
        tensors.positions[row : row + 1].fill_(PAD_INDEX)
        tensors.requests[row : row + 1].fill_(PAD_INDEX)

    def run(self, steps: int) -> Tensor:
        """Run greedy steps from the loaded one on; return their tokens int64 `[steps, T]`, until the next run.

        One launch a step, and the host waits for nothing. A request beyond `max_seq_len` gets tokens of -1.
        """
        steps = check_size("steps", steps)
        check(steps <= MAX_RUN_STEPS, "E204", got=f"a run of {steps} steps", rule=f"at most {MAX_RUN_STEPS}")
        tensors = self._tensors[self._loaded]
        tensors.count.zero_()
        for _ in range(steps):
            self.step()
        return tensors.record[:steps, : self._rows]
