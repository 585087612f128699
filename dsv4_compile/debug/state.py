"""Compile inside a block as a new process does, and restore the compiler afterwards.

torch.compiler.reset() drops every compiled function of the process. Here only functions that the block itself compiled
are dropped; one that had been compiled before too is compiled again at its next call.
"""

from __future__ import annotations

import copy
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from ..runtime.warmup import suspended

_SETTINGS: dict[str, dict[str, Any]] = {
    "dynamo_config": {
        "disable": False,
        "suppress_errors": False,
        "verbose": False,
        "error_on_recompile": False,
        "fail_on_recompile_limit_hit": False,
        # Shapes remembered from earlier runs would hide recompiles of the first.
        "automatic_dynamic_local_pgo": False,
        "automatic_dynamic_remote_pgo": False,
    },
    # A graph from a cache is not lowered, so there would be no decision and no code to report.
    "inductor_config": {"fx_graph_cache": False, "fx_graph_remote_cache": False},
    "functorch_config": {"enable_autograd_cache": False, "enable_remote_autograd_cache": False},
}

_COMPILER_GLOBALS = ("__builtins_dict__", "__import_")


_alone = threading.RLock()
"""Held inside `fresh_compiler`: two threads would restore each other's settings, caches and counters."""


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """Compile without history inside the block; restore settings, caches, counters and random state after it.

    One thread at a time; others wait for the end of the block.
    """
    from .. import _compat

    with _alone, suspended(), ExitStack() as stack:
        for name, wanted in _SETTINGS.items():
            config = getattr(_compat, name)
            stack.enter_context(config.patch({key: value for key, value in wanted.items() if hasattr(config, key)}))
        stack.enter_context(torch.compiler.set_stance("default"))
        cuda = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        stack.enter_context(_restored_counters())
        stack.enter_context(_forgotten_shapes())
        stack.enter_context(_forgotten_globals())
        stack.enter_context(_forgotten_code())
        # The report contains what torch warns about.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", module=r"torch\._(dynamo|inductor|functorch)\b")
        yield


@contextmanager
def _restored_counters() -> Iterator[None]:
    from .._compat import counters

    before = copy.deepcopy(dict(counters))
    counters.clear()
    try:
        yield
    finally:
        counters.clear()
        counters.update(before)


@contextmanager
def _forgotten_shapes() -> Iterator[None]:
    """Hide the sizes that torch has seen so far: it makes dims dynamic because of them."""
    from .._compat import pgo

    names = ("_CODE_STATE", "_INIT_CODE_STATE")
    before = {name: getattr(pgo, name) for name in names}
    pgo.reset_code_state()
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(pgo, name, value)


@contextmanager
def _forgotten_code() -> Iterator[None]:
    """Drop what the block compiled. Inside it, functions that torch has marked untraceable are traced again."""
    from .. import _compat as compiler

    before = {code: compiler.compiled_versions(code) for code in compiler.traced_functions()}
    generated = compiler.generated_functions()
    ours = [code for code in before if not _is_library(code)]
    compiler.trace_again(ours)
    try:
        yield
    finally:
        for code in compiler.traced_functions():
            if compiler.compiled_versions(code) != before.get(code):
                compiler.forget_compiled(code)
        compiler.remove_globals_of(compiler.generated_functions() - generated)
        compiler.trace_again(ours)


@contextmanager
def _forgotten_globals() -> Iterator[None]:
    """Remove the names that torch adds to a module before it has compiled a function of it."""
    before = _compiler_globals()
    try:
        yield
    finally:
        for module, name in _compiler_globals() - before:
            vars(sys.modules[module]).pop(name, None)


def _compiler_globals() -> set[tuple[str, str]]:
    return {
        (module, name)
        for module, content in list(sys.modules.items())
        for name in list(getattr(content, "__dict__", ()))
        if name.startswith(_COMPILER_GLOBALS)
    }


def _is_library(code: CodeType) -> bool:
    return Path(code.co_filename).is_relative_to(Path(torch.__file__).parent)
