"""A model compiled for one set of caches: all graphs that prompts and decode steps of any size run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ... import _compat, progress
from ...errors import check
from ...layout import PAD_INDEX
from ...runtime import Statistics
from ...runtime.addresses import AtFixedAddresses
from ...runtime.bucket_sizes import chunk_tokens, token_buckets
from ...runtime.compiler_choice import compiler_of
from ...runtime.drafting import Verified
from ...runtime.layer_programs import compiles_layers_apart, layer_tensors, pieces_so_far
from .cache import V41Caches, V41Format
from .calls import check_mode, check_step, default_device
from .captured import GRAPHS, CapturedSteps, Captures
from .captured_prompts import PromptSteps
from .draft_captured import CapturedDrafts, DraftSteps
from .draft_steps import verify
from .layer_kinds import RepeatedTensors
from .model import V41Model
from .prefill import LEAST_ROWS
from .ranks import step_of_ranks
from .step import Tail


class CompiledSteps(AtFixedAddresses):
    """Steps of a model over its `caches`. `compile` makes it; `prefill` and `generate` take it as `forward`.

    It has three graphs: a step, a step that runs the layers after the last source on a tail alone, and `encode`; caches
    with drafts have a fourth, which verifies, accepts and drafts. None is compiled again for other numbers of tokens
    or requests, from two on.

    Attributes:
        model, caches: what the graphs read and write.
        captured: CUDA graphs of small steps, such as those of `generate` after a prompt, or None.
        captured_drafts: those of steps with drafts, or None.
        prompts, encodes: those of steps of prompts on and before a tail, or None.
    """

    def __init__(
        self,
        model: V41Model,
        caches: V41Caches,
        backend: Any,
        options: Mapping[str, Any] | None = None,
        *,
        graphs: str = "off",
        buckets: Collection[int] | None = None,
        prompt_buckets: Collection[int] | None = None,
    ) -> None:
        self.model, self.caches = model, caches
        self._forward: Callable[..., Tensor] = model.logits
        self._verify: Callable[..., Verified] = verify
        self._encode: Callable[..., None] = model.insert
        compiler, compile_options = compiler_of(backend, options)
        self._compiles = compiler is not None
        if self._compiles:
            settings: dict[str, Any] = {"backend": backend, "fullgraph": True, "dynamic": True}
            if compile_options is not None:
                settings["options"] = compile_options
            repeated = RepeatedTensors(model._stack(), caches)
            calls: tuple[Any, ...] = model, model.insert, verify
            if repeated and compiles_layers_apart(compiler, compile_options):
                calls = tuple(_with_tensors(torch.compile(call, **settings), repeated) for call in _marked(model))
            else:
                calls = tuple(torch.compile(call, **settings) for call in calls)
            self._forward, self._encode, self._verify = map(_with_constants, calls)
        self.captured: CapturedSteps | None = None
        if graphs != "off":
            self.captured = CapturedSteps(model, caches, self._forward, buckets=buckets, graphs=graphs)
        self.prompts: PromptSteps | None = None
        self.encodes: PromptSteps | None = None
        if prompt_buckets is None:
            most = chunk_tokens(caches.max_batch_size, caches.max_step_tokens)
            prompt_buckets = {max(LEAST_ROWS, size) for size in token_buckets(most)}
        if self.captured is not None and prompt_buckets:
            shared: dict[str, Any] = {"buckets": prompt_buckets, "graphs": self.captured.graphs}
            self.prompts = PromptSteps(model, caches, self._forward, **shared)
            if model.config.last_source < model.config.num_layers:
                self.encodes = PromptSteps(model, caches, self._encode, **shared, encode=True)
        self.captured_drafts: CapturedDrafts | None = None
        if graphs != "off" and caches.drafts is not None:
            fitting = None if buckets is None else [size for size in buckets if size <= caches.max_batch_size]
            self.captured_drafts = CapturedDrafts(model, caches, self._verify, buckets=fitting or None, graphs=graphs)

    def drafts_for(self, requests: int) -> DraftSteps | CapturedDrafts:
        """Return the steps with drafts of this many requests, captured if they fit."""
        captured = self.captured_drafts
        if captured is None or not captured.sealed or not captured.fits(requests):
            return DraftSteps(self.model, self.caches, self._verify)
        captured.check()
        return captured

    @torch.no_grad()
    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        requests: Tensor,
        caches: V41Caches,
        *,
        tail: Tail | None = None,
        last: Tensor | None = None,
    ) -> Tensor:
        """Return what `V41Model.forward` returns, in memory of the caller.

        A step that has a CUDA graph replays it, see `CapturedSteps` and `PromptSteps`. Raises E208 for other caches
        than those that it was compiled for.
        """
        self._check(ids, positions, requests, caches)
        captured = self.captured
        if captured is not None and captured.sealed and tail is None and captured.fits(len(ids)):
            captured.load(ids, positions, requests)
            logits, _ = captured.step()
            return logits.clone() if last is None else logits[last]
        if last is None:
            last = torch.arange(len(ids) if tail is None else len(tail.rows), device=ids.device)
        if self.prompts is not None and self.prompts.fits(len(ids), len(last)):
            return self.prompts.step(ids, positions, requests, tail, last).clone()
        out: Tensor = self._forward(ids, positions, requests, caches, tail=tail, last=last)
        return out

    @torch.no_grad()
    def encode(self, ids: Tensor, positions: Tensor, requests: Tensor, caches: V41Caches) -> None:
        """Do what `V41Model.encode` does. Raises E208 for other caches than those that it was compiled for."""
        self._check(ids, positions, requests, caches)
        if self.encodes is not None and self.encodes.fits(len(ids)):
            self.encodes.encode(ids, positions, requests)
            return
        self._encode(ids, positions, requests, caches)

    def _check(self, ids: Tensor, positions: Tensor, requests: Tensor, caches: V41Caches) -> None:
        check(
            caches is self.caches,
            "E208",
            got="other caches than those that the steps were compiled for",
            fix="pass steps.caches, or compile for these",
        )
        self.check_process()
        check_step(self.model.config, self.model.device, ids, positions, requests, caches)

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compile all graphs, and capture small steps, with progress, by steps of padding, which write nothing."""
        with default_device():
            if self._compiles:
                token = pieces_so_far.set({})
                try:
                    self._compile()
                finally:
                    pieces_so_far.reset(token)
            with step_of_ranks(self.model):
                for captures in self._all_captures():
                    captures.warm_up()

    def _all_captures(self) -> list[Captures]:
        """Return all captures, the largest first: others fit in its memory."""
        every = self.prompts, self.encodes, self.captured, self.captured_drafts
        return [captures for captures in every if captures is not None]

    @property
    def statistics(self) -> Statistics:
        """Captures and replays of all steps, and the bytes of their captures; all zero without graphs."""
        parts = self._all_captures()
        pools = {id(part.graphs): part.graphs for part in parts}.values()
        captures, replays = (sum(getattr(part.statistics, name) for part in parts) for name in ("captures", "replays"))
        return Statistics(captures, replays, capture_bytes=sum(pool.memory() for pool in pools))

    def check_captured(self) -> None:
        """Raise E421 for a tensor that captures read and that was moved or replaced since."""
        for captures in self._all_captures():
            captures.check()

    def _compile(self) -> None:
        device = self.model.device
        # Sizes that are equal here would be one symbol in a graph, and equal in all of its calls.
        tokens, in_tail, with_logits = LEAST_ROWS + 2, LEAST_ROWS + 1, LEAST_ROWS
        padding = torch.full((tokens,), PAD_INDEX, dtype=torch.int64)
        inputs = torch.zeros_like(padding).to(device), padding.to(device), padding.clone().to(device)
        rows = torch.arange(in_tail)
        tail, last = Tail(rows.to(device), torch.zeros_like(rows).to(device)), torch.arange(with_logits).to(device)
        has_tail = self.model.config.last_source < self.model.config.num_layers
        drafts = self.caches.drafts is not None
        with progress.stage("compile", (3 if has_tail else 1) + drafts) as stage, step_of_ranks(self.model):
            stage.note("steps")
            self(*inputs, self.caches, last=last)
            if has_tail:
                stage.advance("tail of prompts")
                self(*inputs, self.caches, tail=tail, last=last)
                stage.advance("prompts before it")
                self.encode(*inputs, self.caches)
            if drafts:
                stage.advance("verification of drafts")
                DraftSteps(self.model, self.caches, self._verify).step()
            stage.advance()


def _marked(model: V41Model) -> tuple[Callable[..., Any], ...]:
    """Return a step, `encode` and a step with drafts whose traces have one layer of each kind."""

    # Separate code, so that torch.compile(model) does not share these graphs.
    def logits(*inputs: Any, **options: Any) -> Tensor:
        return model.logits(*inputs, **options, marked=True)

    def insert(ids: Tensor, positions: Tensor, requests: Tensor, caches: V41Caches) -> None:
        model.insert(ids, positions, requests, caches, marked=True)

    def verify_marked(model: V41Model, rows: Any, caches: V41Caches) -> Verified:
        return verify(model, rows, caches, marked=True)

    return logits, insert, verify_marked


def _with_tensors(call: Callable[..., Any], tensors: RepeatedTensors) -> Callable[..., Any]:
    """Return `call`, which is handed the tensors of repeated layers."""

    def run(*inputs: Any, **options: Any) -> Any:
        token = layer_tensors.set(tensors())
        try:
            return call(*inputs, **options)
        finally:
            layer_tensors.reset(token)

    return run


def _with_constants(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` with traces that have the numbers of modules as constants, whenever it is compiled.

    Else they are inputs of a graph first, which AOTAutograd traces again with their values, and marked layers read
    inputs that their marks do not name. Graphs also guard inference mode and tensors that were made in it, so calls
    leave it, as warm-up did.
    """

    def run(*inputs: Any, **options: Any) -> Any:
        if torch.is_inference_mode_enabled() or any(isinstance(x, Tensor) and x.is_inference() for x in inputs):
            with torch.inference_mode(False), torch.no_grad():
                inputs, options = _compat.pytree.tree_map_only(Tensor, _normal, (inputs, options))
                return run(*inputs, **options)
        with _Constants.block():
            return call(*inputs, **options)

    return run


def _normal(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor


class _Constants:
    """Number of open blocks of this process that set `specialize_float`, and its value outside. `patch` takes 80 us."""

    lock, blocks, outside = threading.Lock(), 0, False

    @classmethod
    @contextmanager
    def block(cls) -> Iterator[None]:
        config = _compat.dynamo_config
        with cls.lock:
            if not cls.blocks:
                cls.outside, config.specialize_float = config.specialize_float, True
            cls.blocks += 1
        try:
            yield
        finally:
            with cls.lock:
                cls.blocks -= 1
                if not cls.blocks:
                    config.specialize_float = cls.outside


def compile(
    model: V41Model,
    *,
    caches: V41Caches | None = None,
    cache_format: V41Format | None = None,
    backend: Any = "dsv4",
    options: Mapping[str, Any] | None = None,
    graphs: str = "auto",
    buckets: Collection[int] | None = None,
    prompt_buckets: Collection[int] | None = None,
    **sizes: Any,
) -> CompiledSteps:
    """Compile all graphs of a model before its first request, and capture decode steps on a GPU, with progress.

        steps = v41.compile(model, max_batch_size=8, max_seq_len=4096, max_step_tokens=512)
        tokens = v41.generate(model, prompts, max_new_tokens=64, forward=steps)

    Args:
        caches: to compile for (None = new ones, in `cache_format`, of `sizes` as `V41Caches` takes them).
        backend, options: of `torch.compile`; None compiles nothing. CUDA graphs are captured here, so they are none of
            its settings.
        graphs: "auto" captures a CUDA graph of each size of a decode step on a GPU, and nothing on a CPU; "cuda",
            "off", or "standin", which replays on a CPU, for tests.
        buckets: numbers of tokens to capture (None = those of 1 to `max_batch_size` requests); with drafts, those that
            are numbers of requests are captured with drafts, too.
        prompt_buckets: numbers of tokens of a step of prompts to capture, twice each (None =
            `runtime.token_buckets` up to 8,192 tokens, [] = none). Longer steps run compiled, and so do steps with
            logits of more than `max_batch_size` rows.

    Raises E204 for sizes and E210 for caches that do not fit, both without `caches`; E201 for sizes with `caches`;
    E301 for a backend or options that nobody knows; E420 for CUDA graphs on a CPU; E422 and E424 for steps that cannot
    be captured.
    """
    check(graphs in GRAPHS, "E420", got=f"{graphs=}", rule=f"graphs is one of {', '.join(GRAPHS)}", fix="pass one")
    check_mode(model)
    kind = ("cuda" if model.device.type == "cuda" else "off") if graphs == "auto" else graphs
    if caches is None:
        caches = model.new_caches(cache_format=cache_format, **sizes)
    else:
        extra = [*sizes, *(["cache_format"] if cache_format is not None else [])]
        check(not extra, "E201", got=f"caches and {', '.join(extra)}", rule="caches have their sizes and format")
    steps = CompiledSteps(model, caches, backend, options, graphs=kind, buckets=buckets, prompt_buckets=prompt_buckets)
    steps.warm_up()
    return steps
