"""DeepseekV4ForCausalLM of transformers through torch.compile: convert in place, generate, revert."""

from __future__ import annotations

from .cache import PagedCache
from .convert import convert, new_cache, revert
from .load import load
from .model import mark_dynamic_tokens

__all__ = ["PagedCache", "convert", "load", "mark_dynamic_tokens", "new_cache", "revert"]
