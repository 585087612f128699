"""`generate` with drafts of a DeepSeek-V4: transformers prepares the call, and `DraftCall` has the loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._compat import maybe_mark_dynamic
from ...parallel.agreement import digest, digest_in_order
from ...runtime.drafting import DraftStatistics
from .._compat import mask_columns
from .cache import CACHE_NAME
from .call_checks import held_by
from .draft_columns import AsksForDrafts, DraftCall, why_host
from .draft_steps import PrefillStep, VerifyStep
from .token_inputs import mark_dynamic_tokens, tokens_after

STEPS, COMPILED = "dsv4_draft_steps", "dsv4_compile"
"""Attributes of a language model: `DraftSteps`, and the arguments of `compile`."""


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


def skipped_additions(module: Any) -> str:
    """Return what a caller has added to the call of `module` and steps that call its parts would skip, or ""."""
    if module._forward_hooks or module._forward_pre_hooks:
        return "forward hooks"
    forward: Any = vars(module).get("forward")
    compiled: Any = getattr(forward, "_torchdynamo_orig_callable", forward)  # torch.compile(model.forward)
    replaced = forward is not None and getattr(compiled, "__func__", None) is not type(module).forward
    return "a forward of its own" if replaced else ""


class GeneratesWithDrafts(AsksForDrafts):
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


def _why_plain(model: Any, ids: Tensor, processors: Any, config: Any, synced_gpus: bool, kwargs: dict[str, Any]) -> str:
    """Return why a call runs without drafts, or ""."""
    if why := why_host(processors, config, synced_gpus, kwargs):
        return why
    held = held_by(model.model, kwargs[CACHE_NAME])
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


class _Call(DraftCall):
    """A call of `generate` with drafts of a DeepSeek-V4."""

    def __init__(self, model: Any, processors: Any, criteria: Any, config: Any, streamer: Any) -> None:
        super().__init__(model, model.dsv4_drafts.num_drafts, processors, criteria, config, streamer)
        self.steps = _steps_of(model)

    @property
    def in_step(self) -> Any:
        """`InStep` of a split model, or None."""
        return self.model.model.dsv4_in_step

    @torch.no_grad()
    def generate(self, input_ids: Tensor, seeds: Tensor, kwargs: dict[str, Any]) -> Any:
        """Return what transformers' loop returns for a prompt `[B, S]` and seeds `[B]`, equal on all ranks."""
        handle, input_ids = kwargs[CACHE_NAME], input_ids.long()
        self.model.dsv4_drafts.adopt()
        held = held_by(self.model.model, handle)
        self.begin(held, handle, input_ids)
        rows, device = input_ids.shape[0], input_ids.device
        self.requests = {"numbers": self.numbers(rows).to(device), "seeds": seeds.to(device)}
        self.requests["limits"] = torch.full((rows,), self.limit, device=device)
        if rows > 1:
            self.requests = {name: _dynamic(tensor) for name, tensor in self.requests.items()}
        _allocate_draft_caches(held, self.model.dsv4_drafts)

        columns = mask_columns(self.config, kwargs.get("attention_mask"), input_ids)
        new = input_ids[:, max(held.appended - (columns - input_ids.shape[1]), 0) :]
        mask = kwargs.get("attention_mask")
        mask = None if mask is None else mask[:, -new.shape[1] :]
        chunk = self.config.prefill_chunk_size or new.shape[1]
        first, drafts, logits = self._append(new, mask, None, chunk)
        if (in_step := self.in_step) is not None:
            # Accepting different drafts would take the ranks apart, and each has weights of them that may have changed.
            values = {"values of drafts": digest_in_order(drafts)}
            in_step.agree(values if logits is None else {**values, "bits of draft logits": digest(logits)})
        self.fed = torch.cat((first[:, None], drafts), 1).clamp_min(0), drafts, logits
        result = self.run(first)
        self.steps.statistics = DraftStatistics(tuple(self.accepted))
        return result

    def append(self, new: Tensor, mask: Tensor, last: Tensor, size: int) -> None:
        """Append columns to the cache."""
        self._append(new, mask, last, size)

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

    def verify(self) -> None:
        """Verify the drafts of rows that may go on, and give them their tokens."""
        ids, drafts, logits = self.fed
        room = torch.tensor(self.widths(), device="cpu")[:, None] > torch.arange(self.count + 1, device="cpu")
        tensors = {"input_ids": ids, "attention_mask": room.to(ids.device), "drafts": drafts, "draft_logits": logits}
        tensors = {name: _dynamic(t) if t is not None and len(t) > 1 else t for name, t in tensors.items()}
        results = self.steps.verify(**tensors, **self.requests, **{CACHE_NAME: self.handle})
        self.take(results[0].tolist())  # waits for the device
        self.fed = results[1], results[2], results[3]


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
