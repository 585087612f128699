"""DeepSeek-V4.1 (text) in plain modules: load a folder, prefill, decode, generate. See docs/v41.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .cache import V41Caches, V41Format
from .compiled import CompiledSteps, compile
from .config import V41Config
from .generate import generate
from .model import V41Model
from .prefill import prefill
from .step import Tail

if TYPE_CHECKING:
    from .loading import load as load
    from .save import save_folder as save_folder
    from .splitting import split as split

__all__ = [
    "CompiledSteps",
    "Tail",
    "V41Caches",
    "V41Config",
    "V41Format",
    "V41Model",
    "compile",
    "generate",
    "load",
    "prefill",
    "save_folder",
    "split",
]
_LAZY = {"load": "loading", "save_folder": "save", "split": "splitting"}
"""Functions that need transformers' libraries, and their modules."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
