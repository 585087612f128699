"""DeepSeek-V4.1 (text) in plain modules: load a folder, prefill, decode, generate. See docs/v41.md."""

from __future__ import annotations

from .cache import V41Caches, V41Format
from .config import V41Config
from .generate import generate
from .model import V41Model
from .prefill import prefill
from .step import Tail

__all__ = ["Tail", "V41Caches", "V41Config", "V41Format", "V41Model", "generate", "prefill"]
