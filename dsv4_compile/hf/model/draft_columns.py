"""The host's loop of `generate` with drafts, in place of transformers' decoding loop.

Tokens leave the loop column by column, as in transformers: streamers, stopping criteria and finished rows see what they
see without drafts. A row with accepted drafts runs ahead of the columns; its tokens wait on the host.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ...errors import check, error, fail
from ...reference.drafts.distributions import NO_TOKEN
from .._compat import padding_of, sampling_of
from .cache import CACHE_NAME, RESIZE, CacheHandle
from .call_results import RECORDED
from .generate_call import current

_log = logging.getLogger("dsv4_compile.hf")
OPTION = "drafts"
"""Argument of `generate` and attribute of a generation configuration: False generates without drafts."""
TOLD = "_dsv4_told"
"""Attribute of a language model: reasons that were logged."""


def refuse_missing_drafts() -> NoReturn:
    """Raise E208 for drafts=True of a model that has none."""
    fail("E208", got="drafts=True for a model without drafts", fix='load a folder with drafts, drafts="on"')


class AsksForDrafts:
    """Part of a language model that says whether a call of `generate` wants its drafts."""

    dsv4_drafts: Any

    def _may_draft(self, config: Any) -> bool:
        """Return whether the model has drafts that a call wants. Raises E208 for drafts=True without drafts."""
        generation = current()
        asked = getattr(config, OPTION, None) if generation is None or generation.drafts is None else generation.drafts
        check(
            asked is None or type(asked) is bool,
            "E208",
            got=f"drafts={asked!r}",
            fix="pass drafts=True or drafts=False",
        )
        if self.dsv4_drafts is None and asked:
            refuse_missing_drafts()
        return self.dsv4_drafts is not None and asked is not False

    def _tell(self, why: str) -> None:
        """Log why a call runs without drafts, once."""
        told: set[str] = self.__dict__.setdefault(TOLD, set())
        if why not in told:
            told.add(why)
            _log.warning("generate() runs without drafts: %s", why)


def why_host(processors: Any, config: Any, synced_gpus: bool, kwargs: dict[str, Any]) -> str:
    """Return why a call of `generate` needs the host at each step, or ""."""
    if synced_gpus:
        return "synced_gpus runs ranks in lockstep"
    if processors and sampling_of(processors) is None:
        names = ", ".join(dict.fromkeys(type(processor).__name__ for processor in processors))
        return f"of {names} only temperature, top-k and top-p run on the device"
    wanted = [name for name in ("output_scores", "output_logits", *RECORDED) if getattr(config, name, None)]
    wanted += [name for name in RECORDED if kwargs.get(name)]
    return f"{wanted[0]}=True asks for each step's results" if wanted else ""


@dataclass
class Row:
    """A row on the host.

    Attributes:
        cached: its tokens in the cache; at_first: those after the prompt.
        waiting: tokens that have not left the loop; last: the newest token.
        ended: whether a stopping criterion has ended it.
        end: column of its last token where padding follows.
    """

    cached: int
    at_first: int
    waiting: deque[int] = field(default_factory=deque)
    last: int = 0
    ended: bool = False
    end: int | None = None


class DraftCall:
    """A call of `generate` with drafts, of any model.

    Args:
        count: drafts of a step.

    Attributes:
        held, handle: the cache and what the caller has of it; limit: most tokens of a row.
        ids, prompt: tokens `[B, S]` so far, and the columns of the prompt.
        accepted: steps of single rows by number of accepted drafts.
        outlives: whether the cache is read after the call.
    """

    held: Any
    handle: Any
    limit: int
    ids: Tensor
    prompt: int
    outlives: bool

    def __init__(self, model: Any, count: int, processors: Any, criteria: Any, config: Any, streamer: Any) -> None:
        self.model, self.criteria, self.config, self.streamer = model, criteria, config, streamer
        self.count = count
        self.sampling = sampling_of(processors) if config.do_sample else None
        self.accepted = [0] * (count + 1)
        self.pad = padding_of(config, criteria)

    @property
    def in_step(self) -> Any:
        """`InStep` of a split model, or None."""
        raise NotImplementedError

    def verify(self) -> None:
        """Verify the drafts of rows that may go on, see `widths`, and `take` their tokens."""
        raise NotImplementedError

    def append(self, new: Tensor, mask: Tensor, last: Tensor, size: int) -> None:
        """Append the columns `new` `[B, S]` where `mask` is not 0 to the cache, `size` at a time; `last` follow."""
        raise NotImplementedError

    def draw_seeds(self, rows: int) -> Tensor:
        """Return a seed for each row, int64 `[B]` on the host: torch.manual_seed repeats a sampled call."""
        if self.sampling is None:
            return torch.zeros(rows, dtype=torch.int64, device="cpu")
        return torch.randint(0, 2**63 - 1, (rows,), device="cpu")

    def begin(self, held: Any, handle: Any, input_ids: Tensor) -> None:
        """Begin with a prompt `[B, S]` and a cache."""
        self.held, self.handle, self.ids, self.prompt = held, handle, input_ids, input_ids.shape[1]
        self.limit = held.paged.max_seq_len
        private = isinstance(handle, CacheHandle) and handle.holder is current()
        self.outlives = self.config.return_dict_in_generate or not private

    def numbers(self, rows: int) -> Tensor:
        """Return how each row samples, float64 `[B, 4]` on the host, as `accept_drafts` takes it."""
        one = torch.tensor(self.sampling or (0.0, 0.0, 1.0, 0.0), dtype=torch.float64, device="cpu")
        return one.expand(rows, -1).clone()

    def run(self, first: Tensor) -> Any:
        """Return what transformers' loop returns, after the first new token of each row, int64 `[B]`."""
        self.base = self.held.appended - self.prompt  # columns of the cache before those of `ids`
        lengths, tokens = self.held.seq_lens[: len(first)].tolist(), first.tolist()
        self.rows = [Row(length, length, deque([token]), token) for length, token in zip(lengths, tokens, strict=True)]
        try:
            while not self._emit():
                self.verify()
        except BaseException:  # of a streamer or a criterion, for example
            if self.in_step is not None:
                self.held.interrupted = True  # other ranks may not have this fault, and do not come to `_settle`
            elif self.outlives and not self.held.interrupted:
                try:
                    self._settle()
                except BaseException:
                    self.held.interrupted = True
                    raise
            raise
        if self.outlives:
            self._settle()
        if self.streamer is not None:
            self.streamer.end()
        if not self.config.return_dict_in_generate:
            return self.ids
        return GenerateDecoderOnlyOutput(**{"sequences": self.ids, CACHE_NAME: self.handle})

    def widths(self) -> list[int]:
        """Return the tokens of each row that the next step runs, 0 for one that has ended or waits."""
        width, most, widths = self.count + 1, self.criteria.max_length or self.limit + 1, []
        for row in self.rows:
            produced = self.ids.shape[1] + len(row.waiting)
            # Rows keep together where the cache will be read again: it can be cut to where the last step began.
            goes_on = row.end is None and produced < most and not (self.outlives and row.waiting)
            has_room = not goes_on or bool(row.waiting) or row.cached < self.limit
            got = f"a row of {row.cached} tokens that no criterion has ended"
            check(has_room, "E204", got=got, why=f"the cache takes {self.limit} tokens of a sequence", fix=RESIZE)
            widths.append(min(width, self.limit - row.cached) if goes_on else 0)
        return widths

    def take(self, results: Sequence[Sequence[int]]) -> None:
        """Give each row its new tokens, whose number comes first."""
        for row, (new, *tokens) in zip(self.rows, results, strict=True):
            if new:
                row.cached += new
                row.waiting.extend(tokens[:new])
                row.last = tokens[new - 1]
                self.accepted[new - 1] += 1
        # A bound on the columns of tokens; the step has appended columns of rejected drafts too.
        self.held.appended = self.held.drafted = self.base + self.ids.shape[1] + max(len(r.waiting) for r in self.rows)

    def _check(self, token: int) -> None:
        if token == NO_TOKEN:
            fix = "look for NaN and infinity in the weights that its tokens reach, embeddings first"
            raise error("E211", got=f"logits of NaN or infinity after {self.ids.shape[1]} columns", fix=fix)

    def _emit(self) -> bool:
        """Emit every column that all rows have a token for; return whether all rows have ended."""
        while all(row.end is not None or row.waiting for row in self.rows):
            for row in self.rows:
                if row.end is None:
                    self._check(row.waiting[0])
            tokens = [row.waiting.popleft() if row.end is None else self.pad for row in self.rows]
            column = torch.tensor(tokens, device=self.ids.device)
            self.ids = torch.cat((self.ids, column[:, None]), dim=-1)
            stopped = self.criteria(self.ids, None).tolist()
            if self.streamer is not None:
                self.streamer.put(column.cpu())
            for row, stops in zip(self.rows, stopped, strict=True):
                if stops and self.pad is not None and row.end is None:
                    row.end = self.base + self.ids.shape[1] - 1
                row.ended |= stops
            if all(row.ended for row in self.rows):
                return True
        return False

    def _settle(self) -> None:
        """Bring the cache into the state that plain decode leaves: all columns but the last, padding of ended rows."""
        held, device = self.held, self.ids.device
        last = self.base + self.ids.shape[1] - 1
        begin = self.base + self.prompt
        columns = []
        for row in self.rows:
            correct = last if row.end is None else min(row.end + 1, last)
            columns.append(min(begin + row.cached - row.at_first, correct))
        lengths = [row.at_first + end - begin for row, end in zip(self.rows, columns, strict=True)]
        held.seq_lens[: len(lengths)].copy_(torch.tensor(lengths, dtype=torch.int32))
        held.appended = held.drafted = first = min(columns)
        if first < last:
            new = self.ids[:, first - self.base : last - self.base]
            missing = torch.arange(first, last, device=device) >= torch.tensor(columns, device=device)[:, None]
            self.append(new, missing.long(), self.ids[:, -1].contiguous(), held.paged.max_step_tokens)
