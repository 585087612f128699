"""Warm-up of a compiled model: all graphs, kernels and captures of its calls, before the first request."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch

from ... import progress
from ...debug import LateWork, compile_log
from ...errors import check, fail
from ...runtime.backends import shared_graphs
from ...runtime.bucket_sizes import chunk_tokens, request_buckets, token_buckets
from ...runtime.compiled import counting
from ...runtime.start_times import count, spending, spent, start_table
from ...runtime.warmup import warming_up
from .cache import CACHE_NAME, PagedCache
from .causal_lm import CompilableForCausalLM
from .token_buckets import COMPILED_AS, SHORT, CompiledAs

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

    def __str__(self) -> str:
        sizes = f"prompts of {_listed(self.prompts)} tokens, decodes of {_listed(self.batches)} rows"
        held = f"{self.graphs} graphs compiled, {self.captures} captures, {self.capture_bytes / 2**20:.0f} MiB held"
        return "\n".join([start_table(self.seconds), held, sizes if self.prompts else "no buckets"])


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
    several. Prompts of more than 512 tokens that keep more than 64 rows of logits run compiled, without a capture.

    The caches' bytes stay as they are; handles of earlier calls become stale. With `dsv4.strict="after_warmup"` the
    warm-up of the process ends with it. Logs the seconds of the start. Raises E208 for a model that is not compiled in
    place, and for a cache with sequences.
    """
    check(
        isinstance(model, CompilableForCausalLM),
        "E208",
        got=f"a {type(model).__name__}",
        fix="pass a model that dsv4_compile.hf.load or convert returned",
    )
    how: CompiledAs | None = model.__dict__.get(COMPILED_AS)
    if how is None or model._compiled_call_impl is None:
        fail("E208", got="warm_up of a model that is not compiled", fix='call model.compile(backend="dsv4") first')
    held = model.model.dsv4_cache if cache is None else cache
    check(cache is None or held.appended == 0, "E208", got="warm_up in a cache with sequences", fix="call its reset()")
    paged = held.paged
    prompts: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()
    calls = _kinds(model, paged)
    if how.buckets:
        prompts = token_buckets(chunk_tokens(paged.max_batch_size, paged.max_step_tokens))
        batches = request_buckets(paged.max_batch_size)
        calls = _sizes(prompts, batches, paged.max_step_tokens)
    before = spent()
    with warming_up(), compile_log() as log, counting() as counts:
        with spending("run"), progress.stage("warm up", total=len(calls)) as work:
            for rows, columns, logits in calls:
                work.note(f"{rows} x {columns} tokens")
                for _ in range(_CALLS_OF_A_CAPTURE if how.graphs else 1):
                    if how.buckets:
                        _call(model, rows, columns, logits, cache)
                    else:
                        _generate(model, rows, columns, cache)
                work.advance()
        _count_compilations(log, before)
    device = held.seq_lens.device
    held_bytes = shared_graphs(device, how.graphs).memory() if how.graphs else 0
    graphs = sum(entry.kind == "compile" for entry in log)
    done = WarmUp(spent(), graphs, counts.captures, held_bytes, prompts, batches)
    _log.info("warm-up:\n%s", done)
    return done


def _sizes(prompts: tuple[int, ...], batches: tuple[int, ...], step_tokens: int) -> list[tuple[int, int, int]]:
    """Return rows, columns and logits to keep of calls of all sizes, the largest first: others fit in its memory."""
    calls = []
    for tokens in reversed(prompts):
        rows = -(-tokens // step_tokens)
        calls.append((rows, max(2, tokens // rows), 1))
        if tokens <= SHORT:
            calls.append((rows, max(2, tokens // rows), 0))
    return calls + [(rows, 1, 1) for rows in reversed(batches)]


def _kinds(model: Any, paged: Any) -> list[tuple[int, int, int]]:
    """Return rows, columns and logits to keep of calls of each kind that `generate` makes."""
    return [(rows, min(2, paged.max_step_tokens), 1) for rows in (1, 2) if rows <= paged.max_batch_size]


@torch.no_grad()  # type: ignore[untyped-decorator]
def _call(model: Any, rows: int, columns: int, logits: int, cache: PagedCache | None) -> None:
    """Run padding alone, which writes no row of a cache."""
    ids = torch.zeros(rows, columns, dtype=torch.int64, device=model.device)
    more = {} if cache is None else {CACHE_NAME: cache}
    try:
        model(ids, attention_mask=torch.zeros_like(ids), logits_to_keep=logits, **more)
    finally:
        if cache is not None:
            cache.reset()


def _generate(model: Any, rows: int, columns: int, cache: PagedCache | None) -> None:
    """Generate after a prompt of zeros: a prefill and a decode as `generate` calls them."""
    ids = torch.zeros(rows, columns, dtype=torch.int64, device=model.device)
    more = {} if cache is None else {CACHE_NAME: cache}
    try:
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, min_new_tokens=2, do_sample=False, **more
        )
    finally:
        if cache is not None:
            cache.reset()


def _count_compilations(log: list[LateWork], before: dict[str, float]) -> None:
    """Count the seconds of compilations that the backend did not spend as traces, and late builds as builds."""
    after = spent()
    backend = sum(after[kind] - before[kind] for kind in ("compile", "build"))
    compiling = sum(entry.seconds or 0.0 for entry in log if entry.kind == "compile")
    count("trace", max(0.0, compiling - backend), out_of="run")
    late = (e.seconds or 0.0 for e in log if e.kind == "kernel" and "beside" not in e.cause)
    count("build", sum(late), out_of="run")


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))
