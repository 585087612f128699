"""Run DeepSeek-V4 attention through torch.compile.

Importing this package registers `torch.ops.dsv4` and does nothing else: it loads no Triton, uses no GPU and changes no
setting of torch. Other modules are imported on first use. The `dsv4` command imports torch only where needed.
"""

from __future__ import annotations

import importlib as _importlib
import pathlib as _pathlib
import sys as _sys
from typing import TYPE_CHECKING, Any

from .errors import DSV4Error

if TYPE_CHECKING:
    from . import attention_backends as attention_backends
    from . import backend as backend
    from . import bench as bench
    from . import cache as cache
    from . import debug as debug
    from . import hf as hf
    from . import loading as loading
    from . import metadata as metadata
    from . import ops as ops
    from . import runtime as runtime
    from .config import DeepseekV4Config
    from .debug import explain, explain_replay
    from .modules import DeepseekV4Attention
    from .runtime import DecodeRunner
    from .selection import costs as costs
    from .selection import decisions as decisions

_root = _pathlib.Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "kernels").is_dir():
    # In a source checkout the sibling folders kernels/ and lowering/ are subpackages of this package.
    __path__.append(str(_root))

__version__ = "0.1.0"


def _is_command() -> bool:
    """Return whether this process is the `dsv4` command, which imports torch when a subcommand needs it."""
    _, first, *rest = [*_sys.orig_argv, "", ""]
    if first == "-m":
        return rest[0] == __name__
    script, python = _pathlib.Path(first), _pathlib.Path(_sys.executable)
    return script.name == "dsv4" and script.parent.resolve() == python.parent.resolve()


if not _is_command():
    from . import ops as ops

__all__ = [
    "DSV4Error",
    "DecodeRunner",
    "DeepseekV4Attention",
    "DeepseekV4Config",
    "__version__",
    "explain",
    "explain_replay",
]

_MODULES = {
    "attention_backends": "attention_backends",
    "backend": "backend",
    "bench": "bench",
    "cache": "cache",
    "costs": "selection.costs",
    "debug": "debug",
    "decisions": "selection.decisions",
    "hf": "hf",
    "loading": "loading",
    "metadata": "metadata",
    "ops": "ops",
    "runtime": "runtime",
}
_HOMES = {
    "DeepseekV4Config": "config",
    "DeepseekV4Attention": "modules",
    "DecodeRunner": "runtime",
    "explain": "debug",
    "explain_replay": "debug",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(_importlib.import_module(f".{_HOMES[name]}", __name__), name)
    elif name in _MODULES:
        value = _importlib.import_module(f".{_MODULES[name]}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES, *_HOMES})
