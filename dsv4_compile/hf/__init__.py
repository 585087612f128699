"""DeepseekV4ForCausalLM of transformers through torch.compile: convert in place, generate, revert."""

from __future__ import annotations

from ..errors import needs

with needs("hf", "dsv4_compile.hf"):
    from .cache import PagedCache
    from .convert import convert, new_cache, revert
    from .experts_interface import register_experts
    from .inputs import mark_dynamic_tokens
    from .load import load
    from .requests import Request
    from .running import RunningBatch
    from .unchanged import unchanged

__all__ = [
    "PagedCache",
    "Request",
    "RunningBatch",
    "convert",
    "load",
    "mark_dynamic_tokens",
    "new_cache",
    "register_experts",
    "revert",
    "unchanged",
]

register_experts()
