"""Choose an attention backend by name, or automatically, and record why.

    selection = select("auto", Demand(kv_cache_dtype="fp8_ds_mla", architecture="cuda sm_90"))
    print(selection)

A backend requested by name is used, or raises E302; there is no silent fallback.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from ..errors import check, fail
from ..selection import decisions
from .flashinfer import DeepseekV4FlashInferMLASparseBackend
from .flashmla import DeepseekV4FlashMLABackend
from .paged import DeepseekV4PagedBackend
from .protocol import AttentionBackend
from .rocm import DeepseekV4ROCMAiterMLASparseBackend
from .types import ENGINES, Demand
from .v32.attention import FlashInferMLASparseBackend

BACKENDS: dict[str, type[AttentionBackend]] = {
    "DSV4_PAGED": DeepseekV4PagedBackend,
    "FLASHMLA_SPARSE_DSV4": DeepseekV4FlashMLABackend,
    "FLASHINFER_MLA_SPARSE_DSV4": DeepseekV4FlashInferMLASparseBackend,
    "ROCM_FLASHMLA_SPARSE_DSV4": DeepseekV4ROCMAiterMLASparseBackend,
    "FLASHINFER_MLA_SPARSE": FlashInferMLASparseBackend,
}
"""All backends by name, in the order that `auto` tries them."""
NAMES = tuple(BACKENDS)
DECISION = "attention_backend"
"""The `op` of decisions that choose a backend."""
SEPARATOR = "; not "
"""Text in the reason of such a decision before each backend that was not chosen."""


def get_backend(name: str) -> type[AttentionBackend]:
    """Return the backend of that name; E302 if there is none."""
    if name not in BACKENDS:
        fail("E302", got=f"attention backend {name!r}", fix=f"pass auto, or one of {', '.join(NAMES)}")
    return BACKENDS[name]


@dataclass(frozen=True, slots=True)
class Selection:
    """The backend chosen for a demand, and why.

    Attributes:
        backend, engine: the chosen backend and one of `ENGINES`.
        reason: why it was chosen.
        others: name of every other backend and why it was not; empty for a backend requested by name.
    """

    backend: type[AttentionBackend]
    engine: str
    reason: str
    others: tuple[tuple[str, str], ...] = ()

    def decision(self) -> decisions.Decision:
        """Return the entry for `decisions.collect()` and `explain`."""
        reasons = [self.reason, *(f"{name}: {reason}" for name, reason in self.others)]
        return decisions.Decision(DECISION, self.backend.name, SEPARATOR.join(reasons))

    def __str__(self) -> str:
        lines = [f"{self.backend.name} on {self.engine}: {self.reason}"]
        return "\n".join([*lines, *(f"  not {name}: {reason}" for name, reason in self.others)])


def select(name: str, demand: Demand) -> Selection:
    """Choose the backend `name`, or with `auto` the first in `NAMES` that serves `demand`.

    The choice is recorded with `decisions.record`. Raises E302 with the reasons if the requested backend, or with
    `auto` every backend, is unsupported.
    """
    check(demand.engine in ENGINES, "E302", got=f"engine={demand.engine!r}", fix=f"pass one of {', '.join(ENGINES)}")
    selection = _automatic(demand) if name == "auto" else _explicit(name, demand)
    decisions.record(selection.decision())
    return selection


def cache_word(name: str, kv_cache_dtype: str) -> str:
    """Return the word for `CacheFormat.resolve` for the cache that the backend `name` uses for the user's word.

    `fp8` means `fp8_ds_mla` to FlashMLA and per-tensor fp8 to FlashInfer. With the backend `auto`, and for an `auto`
    cache of `DSV4_PAGED`, the word is returned as it is.
    """
    if name == "auto" or (name, kv_cache_dtype) == ("DSV4_PAGED", "auto"):
        return kv_cache_dtype
    fmt = get_backend(name).cache_format(kv_cache_dtype)
    if fmt != "plain":
        return fmt
    return "bfloat16" if kv_cache_dtype == "auto" else kv_cache_dtype


def selections(model: object) -> Iterator[decisions.Decision]:
    """Yield the decision of every `Selection` that is an attribute of a module of `model`."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        for value in vars(module).values():
            if isinstance(value, Selection):
                yield value.decision()


def _explicit(name: str, demand: Demand) -> Selection:
    backend = get_backend(name)
    if why := backend.why_unsupported(demand):
        fail("E302", got=f"attention_backend={name!r} with engine={demand.engine!r}", why=why, fix=_fix(name, demand))
    return Selection(backend, demand.engine, f"asked for; {backend.describe_support(demand)}")


def _fix(name: str, demand: Demand) -> str:
    if demand.engine == "library" and not get_backend(name).why_unsupported(replace(demand, engine="dsv4")):
        return f'{name} runs on torch.ops.dsv4 here: pass engine="dsv4"'
    able = [other for other in NAMES if not get_backend(other).why_unsupported(demand)]
    return (
        f"use one that serves it: {', '.join(able)}" if able else "no backend serves it; see why_unsupported() of each"
    )


def _automatic(demand: Demand) -> Selection:
    unsupported = {name: backend.why_unsupported(demand) for name, backend in BACKENDS.items()}
    chosen = next((name for name, why in unsupported.items() if not why), None)
    if chosen is None:
        of_model = [name for name, backend in BACKENDS.items() if backend.model_type == demand.model_type]
        models = sorted({backend.model_type for backend in BACKENDS.values()})
        fail(
            "E302",
            got=f"no attention backend for {demand}",
            why="; ".join(f"{name}: {why}" for name, why in unsupported.items()),
            rule="auto takes the first backend that serves the model, the cache, the device and the engine",
            fix=f"change what the reason of {' or '.join(of_model)} names"
            if of_model
            else f"model_type is one of {', '.join(models)}",
        )
    others = tuple(
        (name, why or f"serves it too, but {chosen} comes first") for name, why in unsupported.items() if name != chosen
    )
    return Selection(BACKENDS[chosen], demand.engine, BACKENDS[chosen].describe_support(demand), others)
