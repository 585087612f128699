"""RunningBatch: requests of different lengths that join and leave one batch of a converted model.

batch = RunningBatch(model, slots=8)
request = batch.submit(prompt_ids, max_new_tokens=64, stop_tokens=[eos])
for token in request:                     # runs the whole batch; or batch.run(), batch.step()
    ...

A request has one slot of a paged cache from its first chunk of prefill to its last token. Waiting requests join in the
order they came. A step prefills at most `prefill_chunk` tokens, then decodes one token of every other request; each
part is one captured graph on a GPU. The host waits for the device once a step, when it reads the tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import check
from ..metadata import MetadataBuffers
from ..runtime import Statistics, mark_static_inputs, padded_buckets
from ..runtime.addresses import AddressCheck, named_tensors
from ..runtime.repeated_layers import writes_out
from ..sizes import check_size
from .entry import check_call
from .model import CompilableForCausalLM, cache_like
from .requests import Request, token_ids
from .running_steps import DecodeTokens, Part, PrefillTokens, with_repeated
from .sampling import COLUMNS, RequestSampling, choose_tokens
from .unchanged import has_block


class RunningBatch:
    """Runs requests of a converted model together, each with the tokens that it gets alone.

    Args:
        model: what `hf.convert` returned, whole on this device. Its weights are shared; the cache is the batch's own.
        slots: most requests that run at the same time.
        max_seq_len: most tokens of a request, prompt and answer together (None = that of the model's cache).
        prefill_chunk: most prompt tokens of a step, of one or several requests. Longer prompts take several steps,
            between which the others decode. Smaller chunks shrink the cache.
        backend: "dsv4", or another backend of `torch.compile`, for the two kinds of steps; None runs them eager.
        options: of that backend. CUDA graphs are captured here, so they are none of its settings.
        graphs: "auto" captures CUDA graphs on a GPU and nothing on a CPU; "cuda", "off", or "standin" for tests.

    Raises E208 for a model that is not converted or is split over ranks, E204 for sizes.

    One thread drives it. Changed weights are read when requests join, outside of blocks of `hf.unchanged`; a parameter
    that a captured graph reads from another address raises E421.
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        max_seq_len: int | None = None,
        prefill_chunk: int = 256,
        backend: str | None = None,
        options: Mapping[str, Any] | None = None,
        graphs: str = "auto",
    ) -> None:
        check(
            isinstance(model, CompilableForCausalLM) and model.model.dsv4_in_step is None,
            "E208",
            got=f"a {'split ' if isinstance(model, CompilableForCausalLM) else ''}{type(model).__name__}",
            why="the host of one device decides who joins",
            fix="pass a model that dsv4_compile.hf.convert returned, without mesh",
        )
        slots, prefill_chunk = check_size("slots", slots), check_size("prefill_chunk", prefill_chunk, least=2)
        self.model, self.slots = model, slots
        paged = cache_like(model.model, slots, max_seq_len, prefill_chunk).paged
        self.max_seq_len, self.prefill_chunk = paged.max_seq_len, min(prefill_chunk, slots * paged.max_seq_len)
        self.caches = paged.layers
        device = model.model.dsv4_cache.seq_lens.device
        self._buffers = MetadataBuffers(
            max_num_batched_tokens=max(slots, self.prefill_chunk),
            max_num_seqs=slots,
            max_model_len=paged.max_seq_len,
            window=paged.config.sliding_window,
            ratios=paged.config.compressed_ratios,
            block_tables=paged.block_tables,
            device=device,
        )
        self.graphs = ("cuda" if device.type == "cuda" else "off") if graphs == "auto" else graphs
        mark_static_inputs(named_tensors(self.caches, "caches"))
        from .._compat import lookup_backend

        compile_options = None if options is None else dict(options)

        def part(step: nn.Module, buckets: Collection[int]) -> Part:
            run: Any = step
            if backend is not None:
                run = torch.compile(step, fullgraph=True, dynamic=True, backend=backend, options=compile_options)
            if repeats:
                run = with_repeated(run, model, self.caches)
            return Part(run, self._buffers, self.caches, buckets, self.graphs)

        # A graph reads tensors of repeated layers where `adopt` has put them.
        repeats = backend is not None and writes_out(lookup_backend(backend), options)
        self._adopts = repeats and self.graphs == "off"
        self._decode = part(DecodeTokens(model), padded_buckets(slots))
        self._prefill = part(PrefillTokens(model), {max(2, self.prefill_chunk // 4), self.prefill_chunk})
        self._weights: AddressCheck | None = None
        self._checked: Any = None
        self._device = device
        self._chosen = torch.zeros(slots, dtype=torch.int64, device=device)
        self._waiting: deque[Request] = deque()
        self._running: list[Request | None] = [None] * slots
        self._joined: list[Request] = []
        self._stepping = False

    def __repr__(self) -> str:
        return (
            f"RunningBatch({len(self.running)} of {self.slots} slots, {len(self._waiting)} waiting, "
            f"{self.max_seq_len} tokens each, graphs {self.graphs})"
        )

    @property
    def running(self) -> list[Request]:
        """Requests that have a slot."""
        return [request for request in self._running if request is not None]

    @property
    def statistics(self) -> Statistics:
        """Captures and replays of both kinds of steps; all zero without graphs."""
        parts = [part.runner.statistics for part in (self._prefill, self._decode) if part.runner is not None]
        return Statistics(*(sum(getattr(each, name) for each in parts) for name in Statistics.__slots__))

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self._waiting and not self.running

    def submit(
        self,
        prompt: Sequence[int] | Tensor,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop_tokens: Collection[int] = (),
        on_token: Callable[[int], object] | None = None,
    ) -> Request:
        """Queue a request.

        Args:
            prompt: token ids, or an integer tensor `[S]`.
            max_new_tokens: most tokens to generate.
            temperature, top_k, top_p, seed: see `sampling.RequestSampling`; greedy unless `temperature` is above 0.
            stop_tokens: tokens that end the request; the one that did is its last.
            on_token: called with each token at the end of its step. If it raises, the request is cancelled, the others
                get their tokens, and `step` raises the error.

        Raises E201 for an empty prompt, ids outside the vocabulary or sampling out of range, and E204 for a request
        that would not fit its slot. A request that is not taken leaves the batch as it was.
        """
        ids = token_ids(prompt, self.model.config.vocab_size)
        check(max_new_tokens > 0, "E201", got=f"{max_new_tokens=}", rule="a request generates at least one token")
        check(
            len(ids) + max_new_tokens <= self.max_seq_len,
            "E204",
            got=f"a prompt of {len(ids)} tokens and {max_new_tokens} new ones",
            why=f"a slot holds {self.max_seq_len} tokens",
            fix="shorten it, or make a RunningBatch with a larger max_seq_len",
        )
        sampling = RequestSampling(temperature, top_k, top_p, seed)
        request = Request(ids, max_new_tokens, frozenset(stop_tokens), sampling, on_token, self.step, self.cancel)
        self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request of this batch now, and free its slot. Does nothing if it has ended."""
        if request.state == "waiting":
            self._waiting.remove(request)
        if not request.ended:
            self._end(request, "cancelled")

    def run(self) -> None:
        """Run steps until no request waits or runs."""
        while not self.idle:
            self.step()

    @torch.no_grad()
    def step(self) -> list[tuple[Request, int]]:
        """Let waiting requests join, prefill a chunk, decode a token of the others; return the new tokens.

        Raises E208 if the model is in training mode or cannot be read, before anything runs. If the model's forward
        raises, all running requests have failed and their slots are free; waiting ones still wait.
        """
        check(
            not self._stepping, "E208", got="a step inside a callback of a step", fix="submit or cancel there instead"
        )
        self._stepping = True
        try:
            return self._call_back(self._step())
        finally:
            self._stepping = False

    def _step(self) -> list[tuple[Request, int]]:
        self._join()
        if self._adopts:
            self._adopt()
        decoding = [request for request in self.running if request.state == "decode"]
        try:
            new = self._run_prefill()
            if decoding:
                self._run_decode(decoding)
            chosen = self._chosen.tolist()  # the one wait of a step
        except BaseException:
            for request in self.running:
                self._end(request, "failed")
            raise
        served = [*new, *decoding]
        found = [(request, chosen[slot]) for slot, request in enumerate(self._running) if request and request in served]
        for request, token in found:
            request.tokens.append(token)
            if token in request.stop_tokens:
                self._end(request, "stop")
            elif len(request.tokens) == request.max_new_tokens:
                self._end(request, "length")
        return found

    def _call_back(self, found: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Pass new tokens to the requests' callbacks; raise the first error of one after all were called."""
        errors: list[Exception] = []
        for request, token in found:
            if request.on_token is not None:
                try:
                    request.on_token(token)
                except Exception as error:
                    self.cancel(request)
                    errors.append(error)
        if errors:
            raise errors[0]
        return found

    def _end(self, request: Request, state: str) -> None:
        request.state = state
        if request in self._running:
            self._running[self._running.index(request)] = None

    def _join(self) -> None:
        """Give free slots to waiting requests, in the order they came."""
        if not self._waiting or None not in self._running:
            return
        check_call(self.model.model, {"input_ids": torch.zeros(1, 1, dtype=torch.int64)})
        self._adopt()
        if self.graphs != "off":
            self._check_captured_weights()
        while self._waiting and None in self._running:
            request = self._waiting.popleft()
            self._running[self._running.index(None)] = request
            self._joined.append(request)
            request.state = "prefill"

    def _adopt(self) -> None:
        """Read weights that have changed, unless a block of `hf.unchanged` says that none has."""
        if not has_block(self.model.model):
            self.model.model.adopt()

    def _check_captured_weights(self) -> None:
        """Capture the graphs before the first request; raise E421 for a parameter that has moved since."""
        if self._weights is None:
            for part in (self._prefill, self._decode):
                assert part.runner is not None
                part.runner.warm_up()
            self._weights = AddressCheck(lambda: named_tensors(self.model, "model"), self._device)
        # A snapshot is of the layers, and another one after a change. The check holds the tensors, so ids are theirs.
        head = [(id(tensor), tensor.data_ptr()) for tensor in named_tensors(self.model.lm_head, "lm_head").values()]
        now = self.model.model.dsv4_snapshot, head
        if now != self._checked:
            self._weights.check("the graphs of a RunningBatch")
            self._checked = now

    def _run_prefill(self) -> list[Request]:
        """Prefill a chunk of tokens, first come first; return the requests whose prompts are complete, by slot."""
        room, parts = self.prefill_chunk, {}
        for request in self._joined:
            if request.state == "prefill" and room:
                parts[request] = request.prompt[request.cached : request.cached + room]
                room -= len(parts[request])
        self._joined = [request for request in self._joined if request.state == "prefill"]
        if not parts:
            return []
        for request, tokens in parts.items():
            request.cached += len(tokens)
        ends: list[int] = []
        done: list[Request] = []
        count = 0
        for request in (request for request in self.running if request in parts):
            count += len(parts[request])
            if request.cached == len(request.prompt):
                request.state = "decode"
                ends.append(count - 1)
                done.append(request)
        hidden, (rows, slots) = self._run_part(self._prefill, parts, ends, self._slots_of(done))
        if done:
            logits = self.model.lm_head(hidden[rows])
            self._choose(logits, logits.argmax(-1), done, slots, self._prefill)
        return done

    def _run_decode(self, requests: list[Request]) -> None:
        """Decode one token of each of `requests`, which are in the order of their slots."""
        for request in requests:
            request.cached += 1
        parts = {request: request.tokens[-1:] for request in requests}
        (greedy, logits), (slots,) = self._run_part(self._decode, parts, self._slots_of(requests))
        count = len(requests)
        self._choose(logits[:count], greedy[:count], requests, slots, self._decode)

    def _run_part(self, part: Part, tokens: Mapping[Request, list[int]], *places: list[int]) -> tuple[Any, Any]:
        by_slot = [tokens.get(request, []) if request else [] for request in self._running]
        lengths = [request.cached if request and request in tokens else 0 for request in self._running]
        return part.run(by_slot, lengths, places)

    def _slots_of(self, requests: list[Request]) -> list[int]:
        return [slot for slot, request in enumerate(self._running) if request in requests]

    def _choose(self, logits: Tensor, greedy: Tensor, requests: list[Request], slots: Tensor, part: Part) -> None:
        """Set the chosen token of each of `requests`, whose logits are `[N, vocab]` and likeliest tokens `greedy`."""
        if not all(request.sampling.greedy for request in requests):
            (numbers,) = part.floats.send([number for request in requests for number in request.sampling.draw()])
            greedy = choose_tokens(logits, numbers.view(-1, COLUMNS))
        self._chosen.index_copy_(0, slots, greedy)
