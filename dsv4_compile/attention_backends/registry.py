"""Choose an attention backend by name, or automatically, and say why.

    selection = select("auto", Demand(kv_cache_dtype="fp8_ds_mla", architecture="cuda sm_90"))
    print(selection)

An explicit request is used or refused; nothing is replaced in silence.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from .. import decisions
from ..errors import check, fail
from .facts import ENGINES, Demand
from .protocol import AttentionBackend

HOMES: dict[str, tuple[str, str]] = {
    "DSV4_PAGED": ("paged", "DeepseekV4PagedBackend"),
    "FLASHMLA_SPARSE_DSV4": ("flashmla", "DeepseekV4FlashMLABackend"),
    "FLASHINFER_MLA_SPARSE_DSV4": ("flashinfer", "DeepseekV4FlashInferMLASparseBackend"),
    "ROCM_FLASHMLA_SPARSE_DSV4": ("rocm", "DeepseekV4ROCMAiterMLASparseBackend"),
    "FLASHINFER_MLA_SPARSE": ("flashinfer_v32", "FlashInferMLASparseBackend"),
}
"""Name of a backend -> its file in this package and its class, in the order in which `auto` asks them."""
NAMES = tuple(HOMES)
BACKEND, AGAINST = "attention_backend", "; not "
"""What decisions call the choice of a backend, and what their reason has in front of each backend that was not chosen.
"""


def get_backend(name: str) -> type[AttentionBackend]:
    """The backend of that name; E302 if there is none."""
    if name not in HOMES:
        fail("E302", got=f"attention backend {name!r}", fix=f"pass auto, or one of {', '.join(NAMES)}")
    module, attribute = HOMES[name]
    backend: type[AttentionBackend] = getattr(importlib.import_module(f".{module}", __package__), attribute)
    return backend


@dataclass(frozen=True, slots=True)
class Selection:
    """Which backend serves a demand, and why.

    Attributes:
        backend: the chosen one. engine: who computes, see `ENGINES`.
        reason: why this one. others: name and reason against it, of every other backend; empty for explicit requests.
    """

    backend: type[AttentionBackend]
    engine: str
    reason: str
    others: tuple[tuple[str, str], ...] = ()

    def decision(self) -> decisions.Decision:
        """As `decisions.collect()` and `explain` list it."""
        reasons = [self.reason, *(f"{name}: {reason}" for name, reason in self.others)]
        return decisions.Decision(BACKEND, self.backend.name, AGAINST.join(reasons))

    def __str__(self) -> str:
        lines = [f"{self.backend.name} on {self.engine}: {self.reason}"]
        return "\n".join([*lines, *(f"  not {name}: {reason}" for name, reason in self.others)])


def select(name: str, demand: Demand) -> Selection:
    """Choose the backend `name`, or with `auto` the first in `NAMES` that serves `demand`.

    The choice is recorded with `decisions.record`. E302 if the backend asked for, or every backend, refuses; the
    message has the reasons.
    """
    check(demand.engine in ENGINES, "E302", got=f"engine={demand.engine!r}", fix=f"pass one of {', '.join(ENGINES)}")
    selection = _automatic(demand) if name == "auto" else _explicit(name, demand)
    decisions.record(selection.decision())
    return selection


def cache_word(name: str, kv_cache_dtype: str) -> str:
    """What `CacheFormat.resolve` calls the cache that the backend `name` makes of the user's word.

    Engines say `fp8` to FlashMLA and mean `fp8_ds_mla`; to FlashInfer they say it and mean per-tensor fp8. With `auto`,
    and for `auto` rows of `DSV4_PAGED`, the word stays.
    """
    if name == "auto" or (name, kv_cache_dtype) == ("DSV4_PAGED", "auto"):
        return kv_cache_dtype
    fmt = get_backend(name).cache_format(kv_cache_dtype)
    if fmt != "plain":
        return fmt
    return "bfloat16" if kv_cache_dtype == "auto" else kv_cache_dtype


def selections(model: object) -> Iterator[decisions.Decision]:
    """The decision of every `Selection` that a module of `model` keeps as an attribute; none for anything else."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        for value in vars(module).values():
            if isinstance(value, Selection):
                yield value.decision()


def _explicit(name: str, demand: Demand) -> Selection:
    support = get_backend(name).supports(demand)
    if not support:
        fail(
            "E302",
            got=f"attention_backend={name!r} with engine={demand.engine!r}",
            why=support.reason,
            fix=_way_out(name, demand),
        )
    return Selection(get_backend(name), demand.engine, f"asked for; {support.reason}")


def _way_out(name: str, demand: Demand) -> str:
    if demand.engine == "library" and get_backend(name).supports(replace(demand, engine="dsv4")):
        return f'{name} runs on torch.ops.dsv4 here: pass engine="dsv4"'
    able = [other for other in NAMES if get_backend(other).supports(demand)]
    return f"these serve it: {', '.join(able)}" if able else "no backend serves it; see each one's supports()"


def _models() -> str:
    return ", ".join(sorted({get_backend(name).model_type for name in NAMES}))


def _automatic(demand: Demand) -> Selection:
    supports = {name: get_backend(name).supports(demand) for name in NAMES}
    chosen = next((name for name, support in supports.items() if support), None)
    if chosen is None:
        own = [name for name in NAMES if get_backend(name).model_type == demand.model_type]
        fail(
            "E302",
            got=f"no attention backend for {demand}",
            why="; ".join(f"{name}: {support.reason}" for name, support in supports.items()),
            rule="auto takes the first backend that serves the model, the cache, the device and the engine",
            fix=f"change what the reason of {' or '.join(own)} names" if own else f"model_type is one of {_models()}",
        )
    others = tuple(
        (other, f"serves it too, and {chosen} is asked first" if support else support.reason)
        for other, support in supports.items()
        if other != chosen
    )
    return Selection(get_backend(chosen), demand.engine, supports[chosen].reason, others)
