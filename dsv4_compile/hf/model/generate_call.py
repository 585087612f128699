"""A running `generate` call: the caches that it owns, and comparisons of the model while the device works.

Between two steps of `generate` only transformers' code runs, unless the caller passed a function or an object to call.
Nothing in this thread can change the model then, so the comparison that a call makes before its launch follows the
launch before it, while the device is busy. Changes by other threads are adopted a step later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import TextIteratorStreamer, TextStreamer

from ...errors import fail
from .cache import OWN_CACHE, CacheHandle, PagedCache
from .token_inputs import check_ids

LOCK = threading.Lock()
"""Guards `holder` and `entered` of all caches, which threads take and give back."""
_PLAIN: tuple[type, ...] = (type(None), bool, int, float, str, Tensor, torch.dtype, torch.device)
_PLAIN += (GenerationConfig, PagedCache, CacheHandle, TextStreamer, TextIteratorStreamer)
"""Types of arguments of `generate` that bring no code of the caller."""
CHUNKS_SKIP_CACHED = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 21)
"""Whether transformers passes only new tokens in chunks of a prompt whose first columns are cached."""
_KNOWN = ("forward", "_compiled_call_impl", "dsv4_drafts")
"""Attributes that torch.compile and `convert` set on a model; their code runs in a step, if at all."""


class Generation:
    """A running `generate` call.

    Args:
        undisturbed: no code of the caller runs between its steps.
        drafts: the argument of this name, None if it was not given.

    Attributes:
        caches: those that are its own until it ends.
    """

    def __init__(self, undisturbed: bool, drafts: bool | None = None) -> None:
        self.drafts = drafts
        self.caches: list[PagedCache] = []
        self.undisturbed = undisturbed
        self._compared: tuple[Any, PagedCache] | None = None

    def compare_ahead(self, model: Any, cache: PagedCache) -> None:
        """Compare `model`, a `CompilableModel`, and `cache` for the next step, after the launch of this one."""
        snapshot = model.dsv4_snapshot
        if self.undisturbed and snapshot is not None and snapshot.holds() and cache.holds():
            self._compared = snapshot, cache

    def has_compared(self, model: Any, cache: PagedCache) -> bool:
        """Return whether both were compared after the last launch, and nothing has changed. True once a comparison."""
        compared, self._compared = self._compared, None
        return compared is not None and compared[0] is model.dsv4_snapshot and compared[1] is cache


_GENERATION: ContextVar[Generation | None] = ContextVar("generation", default=None)
current = _GENERATION.get


@contextmanager
def generating(undisturbed: bool, drafts: bool | None = None) -> Iterator[None]:
    """Keep the caches that `take_own` hands out in the block for it alone, until it ends."""
    generation = Generation(undisturbed, drafts)
    before = _GENERATION.set(generation)
    try:
        yield
    finally:
        _GENERATION.reset(before)
        for cache in generation.caches:
            cache.holder = None


def check_prompt(args: tuple[Any, ...], kwargs: dict[str, Any], held: PagedCache | None, default: Any) -> None:
    """Raise E208 for arguments of `generate` whose prompt is no tensor, or has no column after those of the cache.

    Args:
        held: the cache that the caller passed, or None.
        default: the model's generation configuration.
    """
    positional = next((value for value in args if isinstance(value, GenerationConfig)), None)
    configs = kwargs.get("generation_config"), positional, default
    chunk = kwargs.get("prefill_chunk_size", next((c.prefill_chunk_size for c in configs if c is not None), None))
    if chunk is not None and held is not None and held.appended and not CHUNKS_SKIP_CACHED:
        fail(
            "E208",
            got=f"prefill_chunk_size={chunk} with a cache that holds {held.appended} columns",
            why=f"transformers {transformers.__version__} passes the cached tokens again",
            fix="pip install 'transformers>=5.21', or leave prefill_chunk_size out for further turns of a chat",
        )
    prompts = (*args[:1], kwargs.get("inputs"), kwargs.get("input_ids"))
    ids = next((prompt for prompt in prompts if prompt is not None), None)
    if ids is None:
        return
    check_ids(ids)
    mask = kwargs.get("attention_mask")
    columns = max(ids.shape[-1], mask.shape[-1] if isinstance(mask, Tensor) else 0)
    if held is not None and held.appended >= columns:
        fail(
            "E208",
            got=f"a prompt of {columns} columns with a cache that holds {held.appended}",
            why="generate continues after the columns in the cache, which cannot be taken back",
            fix="pass all tokens so far and at least one more; to generate an answer again, or after an edit, call the "
            f"cache's reset() and pass the whole prompt, or {OWN_CACHE}",
        )


def is_undisturbed(model: Any, *arguments: Any) -> bool:
    """Return whether `generate` of `model` runs no code of the caller between its steps. Hooks run in a step.

    Args:
        model: a converted language model.
        arguments: positional arguments and keywords of `generate`.
    """
    replaced = (name for name, value in vars(model).items() if callable(value) and name not in _KNOWN)
    return type(model).__module__.startswith(f"{__package__}.") and _is_plain(arguments) and not any(replaced)


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return _is_plain(list(value.values())) if type(value) is dict else type(value) in _PLAIN


def take_own(model: Any, allocate: Callable[[], PagedCache], *, hold: bool) -> CacheHandle:
    """Return a handle of the model's cache, emptied, or of a new cache while a different call uses the model's.

    Args:
        model: a `CompilableModel`.
        allocate: makes a cache like the model's own.
        hold: keep the cache for the running `generate`, until it ends. If False, this thread's forward enters it, and
            a new cache lives as long as its handle.
    """
    default: PagedCache = model.dsv4_cache
    generation = _GENERATION.get() if hold else None
    with LOCK:
        free = default.holder is None and not default.entered
        cache = default if free else allocate()
        if generation is None:
            cache.entered, cache.thread = True, threading.get_ident()
        else:
            cache.holder = generation
            generation.caches.append(cache)
    cache.reset()
    return CacheHandle(cache, generation)
