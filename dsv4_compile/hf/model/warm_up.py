"""Warm-up of a compiled model: all graphs, kernels and captures of its calls, before the first request."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch

from ... import progress
from ..._compat import cpp_builder
from ...debug import LateWork, compile_log
from ...errors import check, fail
from ...models.v41.compiled import CompiledSteps
from ...ops.common.define import OPS
from ...options import Options
from ...runtime.backends import shared_graphs
from ...runtime.bucket_sizes import chunk_columns, chunk_tokens, prompt_steps, request_buckets, token_buckets
from ...runtime.compiled import counting
from ...runtime.start_times import count, spending, spent, start_line, start_table
from ...runtime.warmup import warming_up
from .cache import CACHE_NAME, PagedCache
from .call_checks import held_by
from .causal_lm import CompilableForCausalLM
from .draft_columns import OPTION
from .draft_generate import run_padding
from .token_buckets import COMPILED_AS, SHORT, CompiledAs
from .token_inputs import refuse_autocast
from .v41_causal_lm import V41ForCausalLM

_log = logging.getLogger("dsv4_compile.hf")
_CALLS_OF_A_CAPTURE = 3
"""Calls of a shape until it is captured, see `runtime.compiled`."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Graphs, captures and seconds of a warm-up.

    Attributes:
        seconds: of this process's start until now, by kind of work: see `runtime.start_times`.
        graphs: functions that were compiled.
        captures: calls that were captured.
        evictions: captures that made room for later ones, see `dsv4.cudagraph.max_bytes`.
        capture_bytes: memory that the captures on the device hold, those of other models included.
        prompts: token counts that prompts are padded to; empty without buckets.
        batches: batch sizes that decodes are padded to; empty without buckets.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    graphs: int = 0
    captures: int = 0
    capture_bytes: int = 0
    prompts: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()
    evictions: int = 0

    def __str__(self) -> str:
        sizes = f"prompts of {_listed(self.prompts)} tokens, decodes of {_listed(self.batches)} rows"
        evicted = f", {self.evictions} evicted" if self.evictions else ""
        held = f"{self.graphs} graphs compiled, {self.captures} captures{evicted}, {self.capture_bytes / 2**20:.0f} MiB"
        return "\n".join([start_table(self.seconds), f"{held} held", sizes if self.prompts else "no buckets"])


def warm_up(model: Any, *, cache: PagedCache | None = None) -> WarmUp:
    """Compile, build and capture all that `generate` and calls of a compiled model can launch.

    model.compile(fullgraph=True, backend="dsv4", options={"dsv4.cudagraph": "full"})
    print(dsv4_compile.hf.warm_up(model))

    Args:
        model: what `hf.load` or `hf.convert` returned, compiled in place. All ranks of a split model warm up.
        cache: an empty cache to capture calls with (None = the model's, which `generate` uses). Captures are for one
            cache: other caches share compiled graphs and kernels, and are captured at the third call of a size.

    With buckets (`dsv4.buckets`) that is one graph for prompts of all batches and lengths, one for decodes of one row
    and one for several, and a capture for each size; without, the graphs that `generate` uses, for one row and for
    several. Drafts add the same for their steps: prompts of all sizes, and a capture for each batch that is verified.
    Prompts of more than 512 tokens that keep more than 64 rows of logits run compiled, without a capture.

    The caches' bytes stay as they are; handles of earlier calls become stale. With `dsv4.strict="after_warmup"` the
    warm-up of the process ends with it. Logs the seconds of the start. Raises E208 for a model that is not compiled in
    place, and for a cache with sequences.
    """
    if isinstance(model, V41ForCausalLM):
        return _warm_up_v41(model, cache)
    check(
        isinstance(model, CompilableForCausalLM),
        "E208",
        got=f"a {type(model).__name__}",
        fix="pass a model that dsv4_compile.hf.load or convert returned",
    )
    how: CompiledAs | None = model.__dict__.get(COMPILED_AS)
    if how is None or model._compiled_call_impl is None:
        _refuse_uncompiled()
    held = model.model.dsv4_cache if cache is None else cache
    check(cache is None or held.appended == 0, "E208", got="warm_up in a cache with sequences", fix="call its reset()")
    paged = held.paged
    prompts: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()
    drafted = model.dsv4_drafts is not None
    calls = _kinds(paged, False if drafted else None)
    if how.buckets:
        prompts = token_buckets(chunk_tokens(paged.max_batch_size, paged.max_step_tokens))
        batches = request_buckets(paged.max_batch_size)
        calls = _sizes(prompts, batches, paged.max_step_tokens)
        if drafted:
            calls += _sizes_with_drafts(prompts, batches, paged)
    elif drafted:
        calls += _kinds(paged, True)
    before = spent()
    # Whatever the caller's modes are: graphs guard that of inference, and calls leave it.
    modes = torch.inference_mode(False), torch.no_grad()
    stage = progress.stage("warm up", total=len(calls))
    with modes[0], modes[1], warming_up(), compile_log() as log, counting() as counts, stage as work:
        with spending("run"):
            for call in calls:
                work.note(f"{call.rows} x {call.columns} tokens{' with drafts' if call.drafts else ''}")
                for _ in range(_CALLS_OF_A_CAPTURE if how.graphs else 1):
                    call.run(model, cache)
                work.advance()
        count_compilations(log, before)
        work.note(start_line({kind: seconds - before[kind] for kind, seconds in spent().items()}))
    device = held.seq_lens.device
    held_bytes = shared_graphs(device, how.graphs).memory() if how.graphs else 0
    graphs = sum(entry.kind == "compile" for entry in log)
    done = WarmUp(spent(), graphs, counts.captures, held_bytes, prompts, batches, counts.evictions)
    _log.info("warm-up:\n%s", done)
    return done


def _refuse_uncompiled() -> NoReturn:
    """Raise E208 for a model to warm up that runs eager."""
    fail("E208", got="warm_up of a model that is not compiled", fix='call model.compile(backend="dsv4") first')


def _warm_up_v41(model: V41ForCausalLM, cache: Any) -> WarmUp:
    """Compile and capture all steps over a cache of a DeepSeek-V4.1."""
    held: Any = model.dsv4_cache if cache is None else held_by(model, cache)
    with compile_log() as log, spending("run"):
        steps = model.steps_of(held)
    if not isinstance(steps, CompiledSteps):
        _refuse_uncompiled()
    prompts, batches = (() if part is None else part.buckets.sizes for part in (steps.prompts, steps.captured))
    graphs, done = sum(entry.kind == "compile" for entry in log), steps.statistics
    return WarmUp(spent(), graphs, done.captures, done.capture_bytes, prompts, batches)


def compile_and_warm_up(model: Any, options: Mapping[str, Any] | None = None) -> WarmUp:
    """Compile a converted model in place, as `hf.load(warm_up=True)` and `dsv4 build` do, and warm it up.

    Args:
        options: of backend="dsv4", in place of `serving_options` where they differ.
    """
    model.compile(fullgraph=True, backend="dsv4", options=serving_options(model.device, options) or None)
    return warm_up(model)


def serving_options(device: torch.device, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return `options` of a model that serves on `device`, with captures on a GPU unless they say otherwise."""
    captured = {"dsv4.cudagraph": "full"} if device.type == "cuda" else {}
    return {**captured, **(options or {})}


def check_serving(device: torch.device, options: Mapping[str, Any], *, compiles: bool) -> None:
    """Raise E101, E301, E420 or E208 where a model on `device` could not be compiled with `options`, before it is read.

    That are options that do not exist, captures on a CPU, autocast, and if it `compiles` C++ a missing compiler.
    """
    parsed = Options.parse(None, serving_options(device, options), ops=OPS)
    if parsed.cudagraph == "full":
        shared_graphs(device, str(parsed.capture.get("graphs", "auto")))
    if torch.is_autocast_enabled(device.type):
        refuse_autocast(device.type)
    if compiles and device.type == "cpu" and (why := why_no_compiler()):
        fix = "install g++, or name a compiler in CXX; load with warm_up=False and run without torch.compile"
        fail("E101", got="warm_up=True on a CPU", why=why, fix=fix)


def why_no_compiler() -> str:
    """Return why Inductor cannot compile C++ here, or ""."""
    try:
        cpp_builder.get_cpp_compiler()
    except RuntimeError as fault:  # torch's InvalidCxxCompiler and the errors of a search are such
        return (str(fault).splitlines() or [type(fault).__name__])[0]
    return ""


class _Call(NamedTuple):
    """A call of a warm-up: a forward that keeps `logits`, or with None `generate`, with `drafts` as its argument.

    A forward with drafts is a prompt that `ends`, or a chunk of one.
    """

    rows: int
    columns: int
    logits: int | None = None
    drafts: bool | None = None
    ends: bool = True

    def run(self, model: Any, cache: PagedCache | None) -> None:
        """Run padding alone, which writes no row of a cache; `generate` runs after a prompt of zeros."""
        ids = torch.zeros(self.rows, self.columns, dtype=torch.int64, device=model.device)
        more = {} if cache is None else {CACHE_NAME: cache}
        try:
            if self.logits is not None and self.drafts:
                run_padding(model, self.rows, self.columns, ends=self.ends, cache=cache)
                return
            if self.logits is not None:
                model(ids, attention_mask=torch.zeros_like(ids), logits_to_keep=self.logits, **more)
                return
            options = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False, OPTION: self.drafts, **more}
            model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        finally:
            if cache is not None:
                cache.reset()


def _sizes(prompts: tuple[int, ...], batches: tuple[int, ...], step_tokens: int) -> list[_Call]:
    """Return calls of all sizes, the largest first: others fit in its memory."""
    calls = []
    for tokens in reversed(prompts):
        rows = -(-tokens // step_tokens)
        calls.append(_Call(rows, max(2, tokens // rows), 1))
        if tokens <= SHORT:
            calls.append(_Call(rows, max(2, tokens // rows), 0))
    return calls + [_Call(rows, 1, 1) for rows in reversed(batches)]


def _sizes_with_drafts(prompts: tuple[int, ...], batches: tuple[int, ...], paged: Any) -> list[_Call]:
    """Return calls with drafts of all sizes of prompts, of chunks that others follow, and of batches."""
    step, most = paged.max_step_tokens, prompts[-1]
    calls = [_Call(rows := -(-tokens // step), tokens // rows, 0, True) for tokens in reversed(prompts)]
    widths = {rows: chunk_columns(rows, most, step) for rows in batches}
    chunks = {prompt_steps(rows, width, most, step): (rows, width) for rows, width in widths.items()}
    calls += [_Call(rows, width, 0, True, ends=False) for rows, width in chunks.values() if width < paged.max_seq_len]
    return calls + [_Call(rows, min(2, step), drafts=True) for rows in reversed(batches)]


def _kinds(paged: Any, drafts: bool | None) -> list[_Call]:
    """Return a call of each kind that `generate` makes."""
    columns = min(2, paged.max_step_tokens)
    return [_Call(rows, columns, drafts=drafts) for rows in (1, 2) if rows <= paged.max_batch_size]


def count_compilations(log: list[LateWork], before: dict[str, float]) -> None:
    """Count the seconds of compilations that the backend did not spend as traces, and late builds as builds.

    Both are taken from those of the calls, and no more than these took: builds inside a compilation are counted there.
    """
    after = spent()
    backend = sum(after[kind] - before[kind] for kind in ("compile", "build"))
    compiling = sum(entry.seconds or 0.0 for entry in log if entry.kind == "compile")
    late = sum(entry.seconds or 0.0 for entry in log if entry.kind == "kernel" and not entry.early)
    ran = after["run"] - before["run"]
    traced = min(max(0.0, compiling - backend), ran)
    count("trace", traced, out_of="run")
    count("build", min(late, ran - traced), out_of="run")


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))
