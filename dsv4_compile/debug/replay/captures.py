"""Captures made inside a block, observed while they are made and measured at their first replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ...runtime import standin
from ...runtime.captures import Call, Capture
from ...runtime.cuda_graphs import CudaGraphs
from .driver import CaptureReader, DriverNode
from .observe import Launch, Observer
from .sources import Sources
from .times import Span, profiled

_UNMEASURED, _MEASURED = 1, 5
"""Replays that settle caches and clocks, and those after them that are measured."""


@dataclass(slots=True)
class ObservedCapture:
    """A capture with its launches and the times of its measured replays.

    Attributes:
        nodes: the driver's nodes, empty on the stand-in.
        spans: of each measured replay on a GPU.
        reruns: of each measured replay on the stand-in, its launches with their times.
        replays: number of replays, measured or not.
    """

    kind: str
    device: Any
    capture: Capture
    launches: list[Launch]
    nodes: list[DriverNode] = field(default_factory=list)
    spans: list[list[Span]] = field(default_factory=list)
    reruns: list[list[Launch]] = field(default_factory=list)
    replays: int = 0


@contextmanager
def observed_captures(
    sources: Sources, names: Callable[[], Mapping[int, str]], measured: int = _MEASURED
) -> Iterator[list[ObservedCapture]]:
    """Observe every capture inside the block and measure its first replays; yield the list of them.

    Args:
        sources: origins of generated code, see `Sources`.
        names: gives paths of modules by id when a capture begins.
        measured: replays to measure, after the first.
    """
    captures: list[ObservedCapture] = []
    originals = {kind: kind.capture for kind in (CudaGraphs, standin.StandInGraphs)}

    def patched(original: Callable[..., Capture]) -> Callable[..., Capture]:
        def capture(self: Any, call: Call, what: str) -> Capture:
            reader = CaptureReader() if self.kind == "cuda" else None
            observer = Observer(sources, names(), reader.new_nodes if reader else None, ignored=standin.__file__)

            def observed() -> Any:
                with observer.observing():
                    outputs = call()
                if reader is not None:
                    reader.read()
                return outputs

            recorded = original(self, observed, what)
            if reader is not None:
                reader.describe_functions()
            seen = ObservedCapture(
                self.kind, self.device, recorded, observer.observed(), reader.nodes if reader else []
            )
            captures.append(seen)
            return replace(recorded, replay=_measuring(seen, sources, measured))

        return capture

    for kind, original in originals.items():
        kind.capture = patched(original)  # type: ignore[method-assign]
    try:
        yield captures
    finally:
        for kind, original in originals.items():
            kind.capture = original  # type: ignore[method-assign]


def _measuring(seen: ObservedCapture, sources: Sources, measured: int) -> Callable[[], None]:
    """Return the replay of a capture, which measures itself some times and then no more."""
    replay = seen.capture.replay

    def run() -> None:
        seen.replays += 1
        if not _UNMEASURED < seen.replays <= _UNMEASURED + measured:
            replay()
        elif seen.kind == "cuda":
            seen.spans.append(profiled(replay))
        else:
            observer = Observer(sources, {})
            with observer.observing():
                replay()
            seen.reruns.append(observer.observed())

    return run
