"""`generate` with drafts: transformers prepares the call, and this loop takes the place of its decoding loop.

Tokens leave the loop column by column, as in transformers: streamers, stopping criteria and finished rows see what they
see without drafts. A row with accepted drafts runs ahead of the columns; its tokens wait on the host.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..._compat import maybe_mark_dynamic
from ...errors import check, error, fail
from ...parallel.agreement import digest, digest_in_order
from ...reference.drafts.distributions import NO_TOKEN
from ...runtime.drafting import DraftStatistics
from .._compat import mask_columns, padding_of, sampling_of
from .cache import CACHE_NAME, RESIZE, CacheHandle
from .call_checks import held_by
from .call_results import RECORDED
from .draft_steps import PrefillStep, VerifyStep
from .generate_call import current
from .token_inputs import mark_dynamic_tokens, tokens_after

_log = logging.getLogger("dsv4_compile.hf")
OPTION = "drafts"
"""Argument of `generate` and attribute of a generation configuration: False generates without drafts."""

STEPS, TOLD, COMPILED = "dsv4_draft_steps", "_dsv4_told", "dsv4_compile"
"""Attributes of a language model: `DraftSteps`, reasons that were logged, and the arguments of `compile`."""


class DraftSteps:
    """Steps with drafts of a language model, compiled as it was.

    Attributes:
        statistics: of the last `generate` with drafts, or None.
    """

    def __init__(self, model: Any, arguments: tuple[tuple[Any, ...], dict[str, Any]] | None) -> None:
        self.source, self.arguments = model.dsv4_drafts, arguments
        self.prefill, self.verify = PrefillStep(model), VerifyStep(model)
        self.statistics: DraftStatistics | None = None
        if arguments is not None:
            for step in (self.prefill, self.verify):
                step.compile(*arguments[0], **arguments[1])


def refuse_missing_drafts() -> NoReturn:
    """Raise E208 for drafts=True of a model that has none."""
    fail("E208", got="drafts=True for a model without drafts", fix='load a folder with drafts, drafts="on"')


def skipped_additions(module: Any) -> str:
    """Return what a caller has added to the call of `module` and steps that call its parts would skip, or ""."""
    if module._forward_hooks or module._forward_pre_hooks:
        return "forward hooks"
    forward: Any = vars(module).get("forward")
    compiled: Any = getattr(forward, "_torchdynamo_orig_callable", forward)  # torch.compile(model.forward)
    replaced = forward is not None and getattr(compiled, "__func__", None) is not type(module).forward
    return "a forward of its own" if replaced else ""


class GeneratesWithDrafts:
    """Part of a language model that generates with the drafts of its `dsv4_drafts`, if it has any."""

    dsv4_drafts: Any
    model: Any

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile in place as `nn.Module.compile`, steps with drafts at their first call too."""
        inherited: Any = super()
        inherited.compile(*args, **kwargs)
        self.__dict__[COMPILED] = args, kwargs

    @property
    def draft_statistics(self) -> DraftStatistics | None:
        """Acceptance by position and tokens a step of the last `generate`, None if it ran without drafts."""
        steps = self.__dict__.get(STEPS)
        return None if steps is None else steps.statistics

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Generate with drafts, or as transformers does, which the log explains once if the model has drafts."""
        inherited: Any = super()
        arguments = {"synced_gpus": synced_gpus, "streamer": streamer, **model_kwargs}
        steps = self.__dict__.get(STEPS)
        if steps is not None:
            steps.statistics = None
        if self._may_draft(generation_config):
            why = _why_plain(self, input_ids, logits_processor, generation_config, synced_gpus, model_kwargs)
            seeds = None
            if not why:
                call = _Call(self, logits_processor, stopping_criteria, generation_config, streamer)
                seeds = call.draw_seeds(len(input_ids))
            if self.model.dsv4_in_step is not None:
                seeds = self.model.dsv4_in_step.agree({"runs without drafts": why}, seeds)[0]
            if seeds is not None:
                return call.generate(input_ids, seeds, model_kwargs)
            self._tell(why)
        return inherited._sample(input_ids, logits_processor, stopping_criteria, generation_config, **arguments)

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


def _why_plain(model: Any, ids: Tensor, processors: Any, config: Any, synced_gpus: bool, kwargs: dict[str, Any]) -> str:
    """Return why a call runs without drafts, or ""."""
    held = held_by(model.model, kwargs[CACHE_NAME])
    if synced_gpus:
        return "synced_gpus runs ranks in lockstep"
    if processors and sampling_of(processors) is None:
        names = ", ".join(dict.fromkeys(type(processor).__name__ for processor in processors))
        return f"of {names} only temperature, top-k and top-p run on the device"
    wanted = [name for name in ("output_scores", "output_logits", *RECORDED) if getattr(config, name, None)]
    wanted += [name for name in RECORDED if kwargs.get(name)]
    if wanted:
        return f"{wanted[0]}=True asks for each step's results"
    for module in (model, model.model):
        if addition := skipped_additions(module):
            return f"a {type(module).__name__} with {addition}"
    width = model.dsv4_drafts.num_drafts + 1
    if held.paged.max_step_tokens < width:
        return f"the cache takes {held.paged.max_step_tokens} tokens in a step, and drafts need {width}"
    if held.drafted != held.appended:
        mask = kwargs.get("attention_mask")
        new = mask_columns(config, mask, ids) - held.appended
        tokens = new if mask is None else int((mask[:, -new:] != 0).sum(1).min())
        if tokens < model.config.sliding_window:
            return "the cache has tokens of calls without drafts"
    return ""


@dataclass
class _Row:
    """A row on the host.

    Attributes:
        cached: its tokens in the cache; at_first: those after the prompt.
        waiting: tokens that have not left the loop.
        ended: whether a stopping criterion has ended it.
        end: column of its last token where padding follows.
    """

    cached: int
    at_first: int
    waiting: deque[int] = field(default_factory=deque)
    ended: bool = False
    end: int | None = None


class _Call:
    """A call of `generate` with drafts."""

    def __init__(self, model: Any, processors: Any, criteria: Any, config: Any, streamer: Any) -> None:
        self.model, self.criteria, self.config, self.streamer = model, criteria, config, streamer
        self.count = model.dsv4_drafts.num_drafts
        self.sampling = sampling_of(processors) if config.do_sample else None
        self.steps = _steps_of(model)
        self.accepted = [0] * (self.count + 1)
        self.pad = padding_of(config, criteria)

    def draw_seeds(self, rows: int) -> Tensor:
        """Return a seed for each row, int64 `[B]` on the host: torch.manual_seed repeats a sampled call."""
        if self.sampling is None:
            return torch.zeros(rows, dtype=torch.int64, device="cpu")
        return torch.randint(0, 2**63 - 1, (rows,), device="cpu")

    @torch.no_grad()
    def generate(self, input_ids: Tensor, seeds: Tensor, kwargs: dict[str, Any]) -> Any:
        """Return what transformers' loop returns for a prompt `[B, S]` and seeds `[B]`, equal on all ranks."""
        handle, input_ids = kwargs[CACHE_NAME], input_ids.long()
        self.model.dsv4_drafts.adopt()
        self.held = held = held_by(self.model.model, handle)
        self.handle, self.ids, self.prompt = handle, input_ids, input_ids.shape[1]
        rows, device = input_ids.shape[0], input_ids.device
        numbers = torch.zeros(rows, 4, dtype=torch.float64, device=device)
        numbers[:] = torch.tensor(self.sampling or (0.0, 0.0, 1.0, 0.0), dtype=torch.float64)
        self.limit = held.paged.max_seq_len
        self.requests = {"numbers": numbers, "seeds": seeds.to(device)}
        self.requests["limits"] = torch.full((rows,), self.limit, device=device)
        if rows > 1:
            self.requests = {name: _dynamic(tensor) for name, tensor in self.requests.items()}
        _allocate_draft_caches(held, self.model.dsv4_drafts)
        private = isinstance(handle, CacheHandle) and handle.holder is current()
        self.outlives = self.config.return_dict_in_generate or not private

        columns = mask_columns(self.config, kwargs.get("attention_mask"), input_ids)
        new = input_ids[:, max(held.appended - (columns - input_ids.shape[1]), 0) :]
        mask = kwargs.get("attention_mask")
        mask = None if mask is None else mask[:, -new.shape[1] :]
        chunk = self.config.prefill_chunk_size or new.shape[1]
        first, drafts, logits = self._append(new, mask, None, chunk)
        if (in_step := self.model.model.dsv4_in_step) is not None:
            # Accepting different drafts would take the ranks apart, and each has weights of them that may have changed.
            values = {"values of drafts": digest_in_order(drafts)}
            in_step.agree(values if logits is None else {**values, "bits of draft logits": digest(logits)})
        self.base = held.appended - input_ids.shape[1]  # columns of the cache before those of `ids`
        lengths, tokens = held.seq_lens[:rows].tolist(), first.tolist()
        self.rows = [_Row(length, length, deque([token])) for length, token in zip(lengths, tokens, strict=True)]
        ids = torch.cat((first[:, None], drafts), 1).clamp_min(0)
        try:
            while not self._emit():
                ids, drafts, logits = self._verify(ids, drafts, logits)
        except BaseException:  # of a streamer or a criterion, for example
            if in_step is not None:
                held.interrupted = True  # other ranks may not have this fault, and do not come to `_settle`
            elif self.outlives and not held.interrupted:
                try:
                    self._settle()
                except BaseException:
                    held.interrupted = True
                    raise
            raise
        if self.outlives:
            self._settle()
        if self.streamer is not None:
            self.streamer.end()
        self.steps.statistics = DraftStatistics(tuple(self.accepted))
        if not self.config.return_dict_in_generate:
            return self.ids
        return GenerateDecoderOnlyOutput(**{"sequences": self.ids, CACHE_NAME: handle})

    def _append(self, new: Tensor, mask: Tensor | None, last: Tensor | None, size: int) -> tuple[Tensor, Any, Any]:
        """Append columns to the cache, `size` at a time; return the token after them, its drafts and their logits.

        Args:
            last: the token after them, if it is known; then nothing is chosen or drafted.
        """
        mask = torch.ones_like(new) if mask is None else mask
        for begin in range(0, new.shape[1], size):
            end = begin + size
            chunk = mark_dynamic_tokens(new[:, begin:end].clone(memory_format=torch.contiguous_format))
            keep = mark_dynamic_tokens(mask[:, begin:end].clone(memory_format=torch.contiguous_format))
            following = tokens_after(new, mask, end) if end < new.shape[1] else last
            if following is not None and len(following) > 1:
                following = _dynamic(following)
            options = {"input_ids": chunk, "attention_mask": keep, "following": following, **self.requests}
            result: tuple[Tensor, Any, Any] = self.steps.prefill(**options, **{CACHE_NAME: self.handle})
            self.held.drafted = self.held.appended
        return result

    def _verify(self, ids: Tensor, drafts: Tensor, logits: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Verify the drafts of rows that may go on, and give them their tokens."""
        width, most = self.count + 1, self.criteria.max_length or self.limit + 1
        widths = []
        for row in self.rows:
            produced = self.ids.shape[1] + len(row.waiting)
            # Rows keep together where the cache will be read again: it can be cut to where the last step began.
            goes_on = row.end is None and produced < most and not (self.outlives and row.waiting)
            has_room = not goes_on or bool(row.waiting) or row.cached < self.limit
            got = f"a row of {row.cached} tokens that no criterion has ended"
            check(has_room, "E204", got=got, why=f"the cache takes {self.limit} tokens of a sequence", fix=RESIZE)
            widths.append(min(width, self.limit - row.cached) if goes_on else 0)
        room = torch.tensor(widths, device="cpu")[:, None] > torch.arange(width, device="cpu")
        tensors = {"input_ids": ids, "attention_mask": room.to(ids.device), "drafts": drafts, "draft_logits": logits}
        tensors = {name: _dynamic(t) if t is not None and len(t) > 1 else t for name, t in tensors.items()}
        results = self.steps.verify(**tensors, **self.requests, **{CACHE_NAME: self.handle})
        for row, (new, *tokens) in zip(self.rows, results[0].tolist(), strict=True):  # waits for the device
            if new:
                row.cached += new
                row.waiting.extend(tokens[:new])
                self.accepted[new - 1] += 1
        # A bound on the columns of tokens; the step has appended columns of rejected drafts too.
        self.held.appended = self.held.drafted = self.base + self.ids.shape[1] + max(len(r.waiting) for r in self.rows)
        return results[1], results[2], results[3]

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
            self._append(new, missing.long(), self.ids[:, -1].contiguous(), held.paged.max_step_tokens)


def run_padding(model: Any, rows: int, columns: int, *, ends: bool, cache: Any) -> None:
    """Run a prompt of padding alone with drafts, which writes no row of a cache; it `ends`, or more chunks follow.

    Args:
        cache: None for the model's.
    """
    model.dsv4_drafts.adopt()
    _allocate_draft_caches(model.model.dsv4_cache if cache is None else cache, model.dsv4_drafts)
    ids = torch.zeros(rows, columns, dtype=torch.int64, device=model.device)
    values = {"numbers": ids.new_zeros(rows, 4, dtype=torch.float64)}
    values |= {name: ids.new_zeros(rows) for name in ("seeds", "limits")}  # graphs guard that they are two tensors
    following = None if ends else ids.new_zeros(rows)
    tokens = {"input_ids": ids, "attention_mask": torch.zeros_like(ids), "following": following}
    _steps_of(model).prefill(**tokens, **values, **({} if cache is None else {CACHE_NAME: cache}))


def _allocate_draft_caches(held: Any, source: Any) -> None:
    """Give a cache those of `source`, unless it has some of the same settings."""
    caches = held.draft_caches
    if caches is None or getattr(caches, "settings", None) != getattr(source, "settings", None):
        held.draft_caches = source.new_caches(held.paged.max_batch_size)


def _dynamic(tensor: Tensor) -> Tensor:
    """Mark the rows of a batch as dynamic."""
    maybe_mark_dynamic(tensor, 0)
    return tensor


def _steps_of(model: Any) -> DraftSteps:
    """Return the steps of a model, made anew if its drafts or its compilation have changed."""
    arguments = model.__dict__.get(COMPILED) if model._compiled_call_impl is not None else None
    steps: DraftSteps | None = model.__dict__.get(STEPS)
    if steps is None or steps.source is not model.dsv4_drafts or steps.arguments is not arguments:
        steps = model.__dict__[STEPS] = DraftSteps(model, arguments)
    return steps
