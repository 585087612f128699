"""Not a test: which generated kernels compile, so that only changed ones compile again: see tools/compiled_facts.py."""

from __future__ import annotations

from collections.abc import Sequence

from tests.lowering.claims import TARGETS
from tests.support.inductor_triton import GeneratedKernel
from tests.tools.compiled_facts import RECORD
from tests.tools.fingerprint_source import digest, source_of

Sources = Sequence[Sequence[str]]
"""Names and sources of generated kernels."""


def _key(source: Sequence[str], target: str) -> str:
    return digest(*source, target, source_of(GeneratedKernel))


def is_recorded(sources: Sources) -> bool:
    """Return whether nothing has to be compiled to know which of these kernels have binaries."""
    keys = [_key(source, target) for source in sources for target in TARGETS]
    return RECORD.mode == "changed" and all(RECORD.facts(key) is not None for key in keys)


def assembled(sources: Sources, sizes: dict[str, list[int]]) -> dict[str, list[bool]]:
    """Return by target which kernels have binaries: as recorded, or by `sizes`, those of binaries just compiled."""
    RECORD.compiled += sum(map(len, sizes.values()))
    return {
        target: [
            RECORD.answer(_key(source, target), "assembled", lambda size=size: size > 0)
            for source, size in zip(sources, sizes.get(target, [0] * len(sources)), strict=True)
        ]
        for target in TARGETS
    }
