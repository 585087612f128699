"""Steps of a `RunningBatch` of DeepSeek-V4.1: prompts in chunks, and one graph a decode step, also with drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import check
from ...layout import PAD_INDEX
from ...models.v41.cache import V41Caches
from ...models.v41.calls import Prompt, check_mode, check_settings, default_device
from ...models.v41.compiled import CompiledSteps
from ...models.v41.model import V41Model
from ...models.v41.prefill import LEAST_ROWS, Piece, chunk_of, run_chunk, tail_length, to_device
from ...runtime import Statistics
from ...runtime.bucket_sizes import token_buckets
from ...runtime.start_times import spending
from ...runtime.warmup import warming_up
from ..model.v41_causal_lm import V41ForCausalLM
from .requests import Progress
from .running_drafts import new_tokens
from .running_v41_drafts import RunningV41Drafts
from .sampling import COLUMNS, choose_tokens, likeliest_tokens

Slots = Sequence[Progress | None]
"""Request in each slot of the caches."""


class RunningV41:
    """Prefills and decodes requests in rows of caches, see `hf.RunningBatch` for the arguments.

    Prompts run layers after the last source on their exact tails. Raises E208 for a model in training mode,
    E201 without `max_seq_len`, and what `compile` raises.
    """

    reads_each_step = False

    def __init__(
        self,
        model: V41Model | V41ForCausalLM,
        slots: int,
        max_seq_len: int | None,
        prefill_chunk: int,
        backend: Any,
        options: Mapping[str, Any] | None,
        graphs: str,
        drafts: bool = False,
    ) -> None:
        fix = "RunningBatch(model, slots=8, max_seq_len=4096)"
        cache_format = None
        if isinstance(model, V41ForCausalLM):
            own: V41Caches = model.dsv4_cache.paged
            cache_format, max_seq_len = own.cache_format, own.max_seq_len if max_seq_len is None else max_seq_len
        model = _text_model(model)
        check(max_seq_len is not None, "E201", got="a V41Model without max_seq_len", why="it has no cache", fix=fix)
        check_mode(model)
        self.model, self.stack, self.vocab_size = model, model, model.config.vocab_size
        self.state_of_weights = model.state_of_weights
        most = prefill_chunk if model.mtp is None or not drafts else max(prefill_chunk, model.mtp.config.step_tokens)
        sizes: dict[str, Any] = {"max_batch_size": slots, "max_seq_len": max_seq_len, "max_step_tokens": most}
        caches = model.new_caches(cache_format=cache_format, drafts=drafts, **sizes)
        self.max_seq_len, self.prefill_chunk = caches.max_seq_len, min(prefill_chunk, slots * caches.max_seq_len)
        self.caches, self.device = caches, model.device
        self.graphs = ("cuda" if self.device.type == "cuda" else "off") if graphs == "auto" else graphs
        prompts = token_buckets(self.prefill_chunk)
        self._steps = CompiledSteps(model, caches, backend, options, graphs=self.graphs, prompt_buckets=prompts)
        self._tail = tail_length(model.config, "tail")
        self._chosen = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self.drafts = RunningV41Drafts(self._steps, slots) if drafts else None
        self._verified: set[Progress] = set()

    @staticmethod
    def has_drafts(model: V41Model | V41ForCausalLM) -> bool:
        """Return whether the model has drafts."""
        return _text_model(model).mtp is not None

    @staticmethod
    def in_step_of(model: V41Model | V41ForCausalLM) -> Any:
        """Return the `InStep` of a split model, or None."""
        return _text_model(model).in_step

    def shared_weights(self) -> list[Tensor]:
        """Return the weights that all ranks have."""
        return [tensor for name, tensor in self.model.named_parameters() if name in self.model.shared_weights]

    @property
    def statistics(self) -> Statistics:
        """Captures and replays of both kinds of steps; all zero without graphs."""
        return self._steps.statistics

    def prepare(self, joins: bool) -> None:
        """Check the model before a step, and what graphs read before one where requests join."""
        check_mode(self.model)
        check_settings(self.device)
        if joins:
            self._steps.check_captured()

    def warm_up(self) -> None:
        """Compile and capture all that steps can launch. Eager steps have nothing to prepare."""
        with spending("run"), warming_up():
            self._steps.warm_up()
        if self.drafts is not None:
            self.drafts.begin()

    def prefill(self, slots: Slots) -> list[Progress]:
        """Prefill a chunk of tokens, first come first; return the requests with complete prompts, by slot."""
        room, ends = self.prefill_chunk, dict[Progress, int]()
        filling = [(progress, slot) for progress, slot in _served(slots) if progress.state == "prefill"]
        for progress, _ in sorted(filling, key=lambda pair: pair[0].number):
            new = min(room, len(progress.prompt) - progress.cached)
            if new:
                ends[progress], room = progress.cached + new, room - new
        served = [(progress, slot) for progress, slot in filling if progress in ends]
        pieces = [
            Piece(Prompt(torch.tensor(progress.prompt, device="cpu"), slot, 0), progress.cached, ends[progress])
            for progress, slot in served
        ]
        if not pieces:
            return []
        for progress, end in ends.items():
            progress.cached = end
        with default_device():
            step = chunk_of(pieces, self._tail)
            logits = run_chunk(self.model, self._steps, self.caches, step)
        done = [served[number] for number, _ in step.ends]
        for progress, _ in done:
            progress.state = "decode"
        if done:
            logits = logits[: len(done)]
            if self.drafts is None:
                self._choose(logits, likeliest_tokens(logits), done)
            else:
                self._put(self.drafts.first_tokens(logits, done), done)
        return [progress for progress, _ in done]

    def is_plain(self, progress: Progress) -> bool:
        """Return False: a step with drafts decodes one token of a request whose slot has no room for more."""
        return False

    def decode(self, slots: Slots, decoding: list[Progress]) -> None:
        """Decode a token of each of `decoding`, which are in the order of their slots, or verify their drafts."""
        if self.drafts is not None:
            self.drafts.decode(slots, decoding)
            self._verified = set(decoding)
            return
        served = [(progress, slot) for progress, slot in _served(slots) if progress in decoding]
        rows = [(progress.tokens[-1], progress.cached, slot) for progress, slot in served]
        for progress in decoding:
            progress.cached += 1
        captured, count = self._steps.captured, len(rows)
        if captured is None:
            rows += [(0, PAD_INDEX, PAD_INDEX)] * (LEAST_ROWS - count)
        sent = torch.tensor(rows, dtype=torch.int64, device="cpu").t().contiguous()
        ids, positions, requests = to_device(sent, self.device)
        if captured is None:
            # Not views: a graph is specialised on the sizes of their bases.
            with default_device():
                logits = self._steps(ids.clone(), positions.clone(), requests.clone(), self.caches)[:count]
            likeliest = likeliest_tokens(logits)
        else:
            captured.load(ids, positions, requests, compare=False)  # `prepare` compares at joins
            logits, likeliest = captured.step()
        self._choose(logits, likeliest, served)

    def chosen(self) -> list[int]:
        """Return the last token that was chosen in each slot, NO_TOKEN for none. Waits for the device.

        With drafts, a number and tokens follow for each slot, see `RunningV41Drafts.read`.
        """
        if self.drafts is None:
            return self._chosen.tolist()
        return torch.cat((self._chosen, self.drafts.read.flatten())).tolist()

    def new_tokens(self, slots: Slots, chosen: Sequence[int]) -> list[list[int]]:
        """Return the new tokens of each slot, from the numbers of `chosen`."""
        if self.drafts is None:
            return [[token] for token in chosen]
        verified, self._verified = self._verified, set()
        return new_tokens(self.drafts, slots, chosen, verified)

    def _choose(self, logits: Tensor, likeliest: Tensor, served: Sequence[tuple[Progress, int]]) -> None:
        """Set the chosen token of each of `served`: logits `[N, vocab]`, likeliest tokens `[N]`."""
        if not all(progress.sampling.greedy for progress, _ in served):
            numbers = [progress.sampling.draw() for progress, _ in served]
            sent = to_device(torch.tensor(numbers, dtype=torch.float64, device="cpu").view(-1, COLUMNS), self.device)
            likeliest = choose_tokens(logits, sent, likeliest)
        self._put(likeliest, served)

    def _put(self, tokens: Tensor, served: Sequence[tuple[Progress, int]]) -> None:
        """Set the chosen token of each of `served`."""
        places = to_device(torch.tensor([slot for _, slot in served], device="cpu"), self.device)
        self._chosen.index_copy_(0, places, tokens)


def _text_model(model: V41Model | V41ForCausalLM) -> V41Model:
    """Return the model without transformers' shell."""
    return model.model if isinstance(model, V41ForCausalLM) else model


def _served(slots: Slots) -> list[tuple[Progress, int]]:
    """Return the requests that have a slot, and their slots, in the order of slots."""
    return [(progress, slot) for slot, progress in enumerate(slots) if progress is not None]
