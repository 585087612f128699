"""Calls of a split model, kept the same on all ranks: compared, watched, and named where one of them is gone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import DSV4Error
from ...parallel import Ranks, agreement, host_waits, peers, watchdog
from ...runtime import groups
from .cache import PagedCache
from .call_facts import cache_facts, settings

_CALL = "a call"
"""Name of the comparison of ranks at a forward, at the end of `generate`, and where a rank rejects either."""


@dataclass
class Generation:
    """A running `generate` of a split model.

    Attributes:
        arguments: of the call, by name.
        undisturbed: whether no code of this rank's caller runs between the steps.
        agreed: whether the ranks have compared their calls.
        in_lockstep: whether each step is compared, since a rank runs code of its caller between steps.
    """

    arguments: Mapping[str, Any]
    undisturbed: bool
    agreed: bool = False
    in_lockstep: bool = False


class InStep:
    """Keeps the calls of a split model the same on all ranks.

    A call with more than one column is compared with those of the other ranks, on a CPU every call, and each call of
    `generate` as a whole; of the first call of each graph also the bits of its results. Later direct calls with one
    column on a GPU are not: a comparison reads their ids, for which the host would wait at each step. All-reduces
    over symmetric memory wait without end, so a watchdog looks for ranks that are gone; waits of gloo end by
    `host_waits`.
    """

    def __init__(self, ranks: Ranks, device: torch.device | None = None, timeout: float = watchdog.TIMEOUT) -> None:
        self.ranks, self.timeout = ranks, timeout
        self.processes = peers.meet(ranks)
        self.watchdog: watchdog.Watchdog | None = None
        self.waits = None if ranks.symmetric else host_waits.watch(ranks, timeout)
        if ranks.symmetric and device is not None:
            self.watchdog = watchdog.watch(ranks, self.processes, watchdog.DeviceWork(device), timeout)
        if self.watchdog is not None or self.waits is not None:
            groups.free_before_destruction()
        self.seen: set[tuple[Any, ...]] = set()
        self.comparing: tuple[Any, ...] | None = None
        self.generation: Generation | None = None

    def begin(self, arguments: Mapping[str, Any], cache: PagedCache | None = None, model: Any = None) -> None:
        """Begin a forward, and compare its inputs where `compares` says so; raise E702 on all ranks if they differ.

        Args:
            arguments: of the forward, by name.
            cache: what it continues.
            model: the decoder stack.

        Raises E208 while the other ranks follow a `RunningBatch`.
        """
        self.processes.check_free()
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in arguments.items() if isinstance(value, (bool, int, str))}
        ids = tensors["input_ids"]
        kind = ids.shape[0] == 1, ids.shape[1] == 1, tuple(tensors), tuple(others.items())
        self.comparing = None if kind in self.seen else kind
        if self.comparing is not None:
            with self.watched():
                self._compare(tensors, others, cache, model)
        self._enter()
        if self.comparing is None and self._compares(ids):
            try:
                self._compare(tensors, others, cache, model)
            except BaseException:
                self.launched()
                raise

    def _compares(self, ids: Tensor) -> bool:
        """Return whether a call of a graph that has been compared before is compared."""
        if self.generation is not None and self.generation.agreed:
            return self.generation.in_lockstep
        return ids.shape[1] > 1 or ids.device.type == "cpu"

    def _enter(self) -> None:
        if self.waits is not None:
            self.waits.enter()
        if self.watchdog is not None:
            self.watchdog.enter()

    def launched(self) -> None:
        """End a forward that `begin` began, whether or not it failed; its kernels may still run."""
        if self.waits is not None:
            self.waits.exit()
        if self.watchdog is not None:
            self.watchdog.exit()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a step of all ranks in the block, without comparing it; a failed collective raises E703.

        The other ranks are told of anything else that the block raises.
        """
        self._enter()
        try:
            yield
        except BaseException as fault:
            self.explain(fault)
            raise
        finally:
            self.launched()

    def watched(self) -> AbstractContextManager[None]:
        """Watch other calls of the block in which ranks wait for each other."""
        return nullcontext() if self.watchdog is None else self.watchdog.call()

    def _compare(
        self, tensors: Mapping[str, Tensor], others: Mapping[str, Any], cache: PagedCache | None, model: Any
    ) -> None:
        facts: dict[str, Any] = {**others, **({} if model is None else settings(model))}
        if cache is not None:
            facts["cache"] = cache_facts(cache)
        for name, tensor in tensors.items():
            facts[name] = f"{tuple(tensor.shape)} {tensor.dtype}"
            facts[f"values of {name}"] = agreement.digest_in_order(tensor)
        agreement.check_agree(_CALL, facts, self.ranks)

    def reject(self, fault: BaseException) -> None:
        """Tell the ranks that this one rejects the call; raise E702 on all unless all reject it.

        Inside of `generate`, which tells them itself, this does nothing.
        """
        if self.generation is None and not is_agreed(fault):
            with self.watched():
                agreement.reject(_CALL, fault, self.ranks)

    def agree(self, facts: Mapping[str, Any], note: Any = None) -> list[Any]:
        """Return the `note` of every rank within a call; raise E702 on all of them unless `facts` are equal."""
        with self.watched():
            return agreement.agree(_CALL, facts, self.ranks, note)

    def end_generation(self, result: Any, statistics: Any = None) -> None:
        """Raise E702 on all ranks unless all have generated the same tokens, and accepted the same drafts.

        Over symmetric memory, where the host waits for nobody, only where code of a caller chose them.
        """
        tokens = result if isinstance(result, Tensor) else getattr(result, "sequences", None)
        generation = self.generation
        if generation is None or not generation.agreed or (self.watchdog is not None and not generation.in_lockstep):
            return
        if isinstance(tokens, Tensor):
            facts = {"tokens": f"{tuple(tokens.shape)} {agreement.digest_in_order(tokens)}", "generate": "has ended"}
            facts["acceptance of drafts"] = repr(statistics)
            with self.watched():
                agreement.check_agree(_CALL, facts, self.ranks)

    def fail_generation(self, generation: Generation, fault: BaseException) -> None:
        """Tell the ranks that `generate` ended with `fault` on this one; raise E702 on all unless it did on all."""
        if is_agreed(fault):
            return
        told = self.waits is not None and self.waits.left is not None  # a forward that failed
        if isinstance(fault, Exception) and not told and (generation.in_lockstep or not generation.agreed):
            with self.watched():
                agreement.reject(_CALL if generation.agreed else "generate", fault, self.ranks)
        elif self.waits is not None and not told:
            self.waits.leave_call(fault)

    def finish(self, result: Any, cache: PagedCache) -> None:
        """Raise E702 unless the result of a first call and `cache` have the same bits on all ranks.

        Logits are gathered, so they alone would hide that ranks had different hidden states.
        """
        if self.comparing is None:
            return
        values = result if isinstance(result, tuple) else tuple(result.values())
        floating = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
        cached = [tensor for layer in cache.paged.layers for tensor in layer.tensors().values()]
        with self.watched():
            bits = {"bits of outputs": agreement.digest(*floating), "bits of caches": agreement.digest(*cached)}
            agreement.check_agree("results of a call", bits, self.ranks)
        self.seen.add(self.comparing)

    def explain(self, fault: BaseException) -> None:
        """Raise E703 if `fault` is that of a collective, with the ranks it waited for; else tell them of `fault`."""
        if peers.of_collective(fault):
            self.processes.fail(fault)
        if self.waits is not None and not is_agreed(fault):
            self.waits.leave_call(fault)


def is_agreed(fault: BaseException) -> bool:
    """Return whether all ranks raise an error like `fault`."""
    return isinstance(fault, DSV4Error) and fault.code in ("E702", "E703")


@contextmanager
def naming_faults(in_step: InStep) -> Iterator[None]:
    """Raise E703 for a collective that fails in the block."""
    try:
        yield
    except RuntimeError as fault:
        if peers.of_collective(fault):
            in_step.processes.fail(fault)
        raise
