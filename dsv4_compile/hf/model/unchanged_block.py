"""Blocks in which nothing of a model changes: its calls compare nothing, and the end of the block compares once.

A call compares all that its graph depends on, which visits every module and tensor: on the host that takes as long as a
decode step of a small batch takes on a GPU. A serving loop that owns its model can leave it out.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ...errors import check, fail
from .cache import PagedCache
from .model_snapshot import Snapshot

_RULE = "in a block of hf.unchanged, a converted model has the same weights, modules, hooks and settings throughout"


class _Block:
    """A block, the model as it was at its start, and the caches that calls in it have compared.

    `running` ends with the block in all contexts: a generator may enter and leave it in different contexts, and tasks
    and threads have copies of the context that they were started in.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.snapshot = model, model.dsv4_snapshot
        self.caches: weakref.WeakSet[PagedCache] = weakref.WeakSet()
        self.running = True

    def end(self) -> None:
        """Let calls compare again, in every context."""
        self.running = False
        _blocks.set(tuple(block for block in _blocks.get() if block.running))

    def check(self) -> None:
        """Raise E208 if the model has changed since the start."""
        before: Snapshot = self.snapshot
        _check_converted(self.model, "adopt")
        self.model.adopt()
        after: Snapshot = self.model.dsv4_snapshot
        if after is before:
            return
        moved = [name for name, tensor in after.named.items() if before.named.get(name) is not tensor]
        moved += [name for name in before.named if name not in after.named]
        if before.state == after.state and not moved and before.tensors.hold():
            return
        fail(
            "E208",
            got=f"a model that changed in a block: {', '.join(moved[:3]) or 'weights, modules, hooks or settings'}",
            rule=_RULE,
            why="calls in the block may have used what was replaced",
            fix="change the model between two blocks, or write weights in place, which calls do see",
        )


_blocks: ContextVar[tuple[_Block, ...]] = ContextVar("dsv4_unchanged", default=())


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Let calls of `model` in the block take for granted that it does not change.

    with dsv4_compile.hf.unchanged(model):
        while requests:
            logits = model(tokens, past_key_values=cache).logits

    Args:
        model: what `hf.convert` or `hf.load` returned, compiled or not.

    Weights may be written in place. Whatever else a caller changes of the model in the block has no effect on calls
    there, or only on some. Calls of other threads compare as always, and so do those of other models. Arguments, modes
    and the lengths of caches are checked in every call.

    Raises E208 for a model that is not converted, and at the end if the model has changed since the start: also where a
    generator with the block is closed early, but not where the block itself raises an error.
    """
    _check_converted(model, "entered_model")
    stack, _ = model.entered_model()
    stack.adopt()
    block = _Block(stack)
    _blocks.set((*(other for other in _blocks.get() if other.running), block))
    try:
        yield
    except GeneratorExit:
        block.end()
        block.check()
        raise
    except BaseException:
        block.end()
        raise
    block.end()
    block.check()


def _check_converted(model: Any, method: str) -> None:
    check(hasattr(model, method), "E208", got=f"a {type(model).__name__}", rule=_RULE, fix="pass a converted model")


def has_block(model: Any) -> bool:
    """Return whether a block takes for granted that `model`, a `CompilableModel`, does not change."""
    return any(block.model is model and block.running for block in _blocks.get())


def is_unchanged(model: Any, cache: PagedCache) -> bool:
    """Return whether a block takes for granted that `model`, a `CompilableModel`, and `cache` are as they were.

    A cache is, from the second time that it is asked for.
    """
    for block in _blocks.get():
        if block.model is model and block.running and model.dsv4_snapshot is not None:
            if cache in block.caches:
                return True
            block.caches.add(cache)
    return False
