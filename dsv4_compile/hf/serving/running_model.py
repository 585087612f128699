"""Steps of a `RunningBatch` on its device: a converted model with its cache, buffers, graphs and chosen tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import check, fail
from ...metadata import MetadataBuffers
from ...models.v41.model import V41Model
from ...options import INVARIANT
from ...parallel import split_of
from ...progress import stage
from ...runtime import DecodeRunner, Statistics, mark_static_inputs
from ...runtime.addresses import AddressCheck, named_tensors
from ...runtime.bucket_sizes import request_buckets, token_buckets
from ...runtime.compiler_choice import compiler_of
from ...runtime.repeated_layers import writes_out
from ...runtime.start_times import spending
from ...runtime.warmup import warming_up
from ..model.cache import cache_like
from ..model.call_checks import check_call
from ..model.causal_lm import CompilableForCausalLM
from ..model.draft_generate import skipped_additions
from ..model.unchanged_block import has_block
from ..model.v41_causal_lm import V41ForCausalLM
from .requests import Progress
from .running_drafts import CompiledSource, RunningDrafts, VerifyTokens, new_tokens
from .running_steps import DecodeTokens, Part, PrefillTokens, TappedPrefill, with_repeated
from .running_v41 import RunningV41
from .sampling import COLUMNS, NO_TOKEN, choose_tokens, likeliest_tokens

Slots = Sequence[Progress | None]
"""Request in each slot of the cache."""


def running_class(model: Any) -> type[RunningModel] | type[RunningV41]:
    """Return the class of a model's steps. Raises E208 for a model that no `RunningBatch` runs."""
    if isinstance(model, (V41Model, V41ForCausalLM)):
        return RunningV41
    fix = "pass a model that dsv4_compile.hf.load, hf.convert or models.v41.load returned"
    check(isinstance(model, CompilableForCausalLM), "E208", got=f"a {type(model).__name__}", fix=fix)
    return RunningModel


class RunningModel:
    """Prefills and decodes requests in slots of a paged cache, see `RunningBatch` for the arguments."""

    def __init__(
        self,
        model: Any,
        slots: int,
        max_seq_len: int | None,
        prefill_chunk: int,
        backend: str | None,
        options: Mapping[str, Any] | None,
        graphs: str,
        drafts: bool = False,
    ) -> None:
        self.model, self.stack, self.vocab_size = model, model.model, model.config.vocab_size
        width = model.dsv4_drafts.num_drafts + 1 if drafts else 1
        paged = cache_like(model.model, slots, max_seq_len, max(prefill_chunk, width)).paged
        self.max_seq_len, self.prefill_chunk = paged.max_seq_len, min(prefill_chunk, slots * paged.max_seq_len)
        self.caches = paged.layers
        device = model.model.dsv4_cache.seq_lens.device
        self._buffers = MetadataBuffers(
            max_num_batched_tokens=max(slots * width, self.prefill_chunk),
            max_num_seqs=slots,
            max_model_len=paged.max_seq_len,
            window=paged.config.sliding_window,
            ratios=paged.config.compressed_ratios,
            block_tables=paged.block_tables,
            device=device,
        )
        self.graphs = ("cuda" if device.type == "cuda" else "off") if graphs == "auto" else graphs
        mark_static_inputs(named_tensors(self.caches, "caches"))
        compiler, compile_options = compiler_of(backend, options)

        def compiled(call: Any) -> Any:
            if backend is None:
                return call
            return torch.compile(call, fullgraph=True, dynamic=True, backend=backend, options=compile_options)

        def stepped(step: nn.Module) -> Any:
            run = compiled(step)
            return with_repeated(run, model, self.caches) if repeats else run

        def part(step: nn.Module, buckets: Collection[int]) -> Part:
            return Part(stepped(step), self._buffers, self.caches, buckets, self.graphs)

        # A graph reads tensors of repeated layers where `adopt` has put them.
        repeats = backend is not None and writes_out(compiler, options)
        self._adopts = repeats and self.graphs == "off"
        self._compiles = backend is not None
        self.drafts: RunningDrafts | None = None
        if drafts:
            source = model.dsv4_drafts if backend is None else CompiledSource(model.dsv4_drafts, compiled)
            step = stepped(VerifyTokens(model))
            self.drafts = RunningDrafts(source, step, self._buffers, self.caches, self.graphs)
        else:
            self._decode = part(DecodeTokens(model), request_buckets(slots))
        # A first bucket of 1 token would be a graph more.
        prefill = TappedPrefill(model) if drafts else PrefillTokens(model)
        self._prefill = part(prefill, {max(2, size) for size in token_buckets(self.prefill_chunk)})
        # A head between graphs would sum in an order of torch's.
        invariant = backend == "dsv4" and bool(dict(options or {}).get(INVARIANT, "off") not in ("off", False))
        self._head = compiled(model.lm_head) if invariant else model.lm_head
        self._weights: AddressCheck | None = None
        self._checked: Any = None
        self.device, self._cache = device, model.model.dsv4_cache
        self._ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self._verified: set[Progress] = set()
        self._chosen = torch.zeros(slots, dtype=torch.int64, device=device)

    @staticmethod
    def has_drafts(model: Any) -> bool:
        """Return whether the model has drafts."""
        return model.dsv4_drafts is not None

    @staticmethod
    def in_step_of(model: Any) -> Any:
        """Return the `InStep` of a split model, or None."""
        return model.model.dsv4_in_step

    def state_of_weights(self) -> Any:
        """Return a value that differs after weights have changed."""
        return self.stack.dsv4_snapshot

    def shared_weights(self) -> list[Tensor]:
        """Return the weights that all ranks have."""
        models = [model for model in (self.model, self.model.dsv4_drafts) if isinstance(model, nn.Module)]
        named = [pair for model in models for pair in model.named_parameters()]
        return [tensor for name, tensor in named if split_of(name, self.model.dsv4_part[1]) is None]

    @property
    def statistics(self) -> Statistics:
        """Captures and replays of both kinds of steps; all zero without graphs."""
        parts = [runner.statistics for runner in self._runners()]
        return Statistics(*(sum(getattr(each, name) for each in parts) for name in Statistics.__slots__))

    def _runners(self) -> list[DecodeRunner]:
        """Return the runners of the two kinds of steps, none without graphs."""
        runners = self._prefill.runner, self._decode.runner if self.drafts is None else self.drafts.runner
        return [runner for runner in runners if runner is not None]

    @property
    def reads_each_step(self) -> bool:
        """Whether each step reads weights that have changed, also where no request joins."""
        return self._adopts

    def prepare(self, joins: bool) -> None:
        """Check the model, and read weights that have changed, before a step where requests join or none do."""
        self.check()
        if joins:
            self.prepare_join()
        if self._adopts:
            self._adopt()

    def check(self) -> None:
        """Raise E208 unless the model is still the converted one, and is called as it can run."""
        model = self.model
        same = isinstance(model, CompilableForCausalLM) and model.model.__dict__.get("dsv4_cache") is self._cache
        if not same:
            fail("E208", got="a model that was reverted, or converted again", fix="make another RunningBatch")
        for module in (model, model.model):
            if addition := skipped_additions(module):
                fail(
                    "E208",
                    got=f"a {type(module).__name__} with {addition}",
                    why="a running batch calls the layers and lm_head",
                    fix="remove it, or put it on a layer, model.model.embed_tokens or model.lm_head",
                )
        check_call(model.model, {"input_ids": self._ids})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def warm_up(self) -> None:
        """Compile, build and capture all that steps can launch. Eager steps have nothing to prepare."""
        if not self._compiles and self.graphs == "off":
            return
        self.check()
        with spending("run"):
            self.prepare_join()
            if self.graphs == "off":
                with warming_up(), stage("warm up", total=2) as work:
                    for part in (self._prefill, self.drafts or self._decode):
                        part.compile()
                        work.advance()
            if self._head is not self.model.lm_head:
                weight = self.model.lm_head.weight
                with warming_up():
                    for rows in (1, 2):
                        self._head(weight.new_zeros(rows, weight.shape[1]))

    def prepare_join(self) -> None:
        """Read weights that have changed; capture the graphs once. Raises E421 for weights that they read elsewhere."""
        self._adopt()
        if self.graphs != "off":
            self._check_captured_weights()

    def _adopt(self) -> None:
        """Read weights that have changed, unless a block of `hf.unchanged` says that none has."""
        if not has_block(self.model.model):
            self.model.model.adopt()
            if self.drafts is not None:
                self.model.dsv4_drafts.adopt()

    def _check_captured_weights(self) -> None:
        """Capture the graphs before the first request; raise E421 for a parameter that has moved since."""
        if self._weights is None:
            for runner in self._runners():
                if not runner.sealed:
                    runner.warm_up()
            self._weights = AddressCheck(lambda: named_tensors(self.model, "model"), self.device)
        # A snapshot is of the layers, and another one after a change. The check holds the tensors, so ids are theirs.
        head = [(id(tensor), tensor.data_ptr()) for tensor in named_tensors(self.model.lm_head, "lm_head").values()]
        now = self.model.model.dsv4_snapshot, head
        if now != self._checked:
            self._weights.check("the graphs of a RunningBatch")
            self._checked = now

    def prefill(self, slots: Slots) -> list[Progress]:
        """Prefill a chunk of tokens, first come first; return the requests with complete prompts, by slot."""
        room, parts = self.prefill_chunk, {}
        served = [progress for progress in slots if progress is not None]
        for progress in sorted(served, key=lambda progress: progress.number):
            if self.is_plain(progress) and room:
                parts[progress] = progress.tokens[-1:]
                room -= 1
            elif progress.state == "prefill" and room:
                parts[progress] = progress.prompt[progress.cached : progress.cached + room]
                room -= len(parts[progress])
        if not parts:
            return []
        for progress, tokens in parts.items():
            progress.cached += len(tokens)
        ends: list[int] = []
        done: list[Progress] = []
        joining: list[Progress] = []
        following: list[int] = []
        for progress in (progress for progress in served if progress in parts):
            begin = progress.cached - len(parts[progress]) + 1
            following += [*progress.prompt[begin : progress.cached + 1], NO_TOKEN][: len(parts[progress])]
            if progress.cached >= len(progress.prompt):
                joining += [progress] if progress.state == "prefill" else []
                progress.state = "decode"
                ends.append(len(following) - 1)
                done.append(progress)
        groups = ends, _slots_of(done, slots), following if self.drafts is not None else []
        outputs, (rows, places, after) = _run(self._prefill, slots, parts, *groups)
        hidden, *taps = (outputs,) if self.drafts is None else outputs
        if done:
            logits = self._head(hidden[rows])
            self._choose(logits, likeliest_tokens(logits), done, places, self._prefill)
        if self.drafts is not None:
            self.drafts.inject(hidden.shape[0], taps, after, rows, self._chosen[places])
            if joining:
                self.drafts.join(joining, _slots_of(joining, slots), self._chosen)
        return done

    def is_plain(self, progress: Progress) -> bool:
        """Return whether a request in a batch with drafts decodes one token, because its slot has no room for more."""
        return self.drafts is not None and progress.state == "decode" and not self.drafts.has_room(progress)

    def decode(self, slots: Slots, decoding: list[Progress]) -> None:
        """Decode a token of each of `decoding`, which are in the order of their slots, or verify their drafts."""
        if self.drafts is not None:
            self.drafts.decode(slots, decoding)
            self._verified = set(decoding)
            return
        for progress in decoding:
            progress.cached += 1
        parts = {progress: progress.tokens[-1:] for progress in decoding}
        (likeliest, logits), (places,) = _run(self._decode, slots, parts, _slots_of(decoding, slots))
        count = len(decoding)
        self._choose(logits[:count], likeliest[:count], decoding, places, self._decode)

    def chosen(self) -> list[int]:
        """Return the last token that was chosen in each slot, NO_TOKEN for none. Waits for the device.

        With drafts, a number and tokens follow for each slot, see `RunningDrafts.read`.
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

    def _choose(self, logits: Tensor, likeliest: Tensor, served: list[Progress], places: Tensor, part: Part) -> None:
        """Set the chosen token of each of `served`, in slots `places`: logits `[N, vocab]`, likeliest tokens `[N]`."""
        if not all(progress.sampling.greedy for progress in served):
            (numbers,) = part.floats.send([number for progress in served for number in progress.sampling.draw()])
            likeliest = choose_tokens(logits, numbers.view(-1, COLUMNS), likeliest)
        self._chosen.index_copy_(0, places, likeliest)


def _run(part: Part, slots: Slots, tokens: Mapping[Progress, list[int]], *places: list[int]) -> tuple[Any, Any]:
    by_slot = [tokens.get(progress, []) if progress else [] for progress in slots]
    lengths = [progress.cached if progress and progress in tokens else 0 for progress in slots]
    return part.run(by_slot, lengths, places)


def _slots_of(served: list[Progress], slots: Slots) -> list[int]:
    return [slot for slot, progress in enumerate(slots) if progress in served]
