"""Guards of a converted model's graphs that the checks of each call make redundant, and a fingerprint in their place.

Dynamo guards every module, setting and parameter that a graph has read, and its check grows with the layers. A call
passes `Snapshot.holds`, which compares the same in lists, so a graph guards one string instead, `fingerprint`. What
neither a snapshot nor the fingerprint has stays guarded: inputs, the configuration, functions of torch and
transformers, modes.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat import module_hooks
from ...options import mode_settings

OWN = "dsv4"
"""Begins the names under which `convert` keeps what belongs to this package in a module."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
CONTAINERS = ("_modules", "_parameters", "_buffers", *HOOKS)
"""Dictionaries of a module that a graph may depend on."""
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
STATE = "dsv4_state"
TENSORS = "dsv4_parameters"
"""Attributes of a decoder stack, and of a cache, that a graph guards and reads tensors from."""
REPEATS = "dsv4_repeats"
"""Attribute of a decoder stack that follows from its state: see `layer_kinds.repeats_of`."""
SCALARS = (bool, int, float, str, type(None), torch.dtype, torch.device)
_OF_CACHE = (TENSORS, "paged", "seq_lens")
_OF_MODULE = {"TYPE_MATCH", "HASATTR", "NOT_PRESENT_IN_GENERIC_DICT", "CLASS_MATCH", "DUPLICATE_INPUT"}
_OF_ALL_MODULES = frozenset(vars(nn.Module()))
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|\['([^']+)'\]")
_TYPE = re.compile(r"type\((.+)\)")

watched: set[str] = {"forward"}
"""Names of attributes that graphs of any model read without a guard. Models of one fingerprint share graphs."""

_LIMIT = "recompile_limit"
"""Argument of torch.compile from 2.13 on: how many graphs one function may have."""
MOST_KINDS = 64
"""Kinds of calls of a model compiled in place, which differ in arguments and in which sizes are 1: each is a graph."""
_FILTER = "guard_filter_fn"
"""Option of torch.compile, and the name under which its compiler keeps it."""

_IDENTITIES = {"ID_MATCH", "BUILTIN_MATCH", "CLASS_MATCH", "CLOSURE_MATCH", "FUNCTION_MATCH", "MODULE_MATCH"}
"""Types of guards that compare a global by identity."""
_CONSTANT = ("G['__import_dsv4_compile_dot_", "G['__builtins_dict__")
"""How Dynamo's names of this package's globals and of builtins begin. Under other names their guards would stay."""
_OWN_CONSTANT = re.compile(r"G\['__import_dsv4_compile_dot_\w+'\]\._?[A-Z][A-Z0-9_]*(\[\d+\])*")
"""Names of this package's constants."""

_serials: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_count = iter(range(1 << 62))


def own_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return this package's modules in a converted decoder stack, by a path for each."""
    modules: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith(OWN) and isinstance(value, nn.Module):
                modules |= dict(value.named_modules(prefix=f"{path}.{name}"))
    return modules


def modules_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return a module, those inside it and this package's in them, by a path for each."""
    return {**dict(module.named_modules()), **own_modules(module)}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the distinct parameters, buffers and stacked weights of a converted decoder stack, by a path for each."""
    named: dict[int, tuple[str, Tensor]] = {}
    for path, module in modules_of(model).items():
        for name, value in tensors_in(module).items():
            named.setdefault(id(value), (f"{path}.{name}", value))
    return dict(named.values())


def tensors_in(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters, buffers and stacked weights that a module itself holds and graphs may read, by name."""
    held = {**module._parameters, **module._buffers, **vars(module)}
    return {name: value for name, value in held.items() if isinstance(value, Tensor) and not name.endswith("inv_freq")}


def fingerprint(model: Any) -> str:
    """Return a name that is equal for decoder stacks that can share graphs.

    They have equal modules, settings, hooks and layouts of weights; values of weights do not count.
    """
    modules = modules_of(model)
    paths = {id(module): path for path, module in modules.items()} | {id(model.config): "config"}
    digest = hashlib.sha256()
    for name in GLOBAL_HOOKS:
        digest.update(_described(list(getattr(module_hooks, name).values()), paths).encode())
    places: dict[int, int] = {}
    for path, module in modules.items():
        digest.update(f"{path}:{module_text(module, paths, places)};".encode())
    return digest.hexdigest()


def module_text(
    module: nn.Module,
    paths: dict[int, str],
    places: dict[int, int],
    *,
    without: frozenset[str] = frozenset(),
) -> str:
    """Return a text that is equal for modules that do the same, and hold the same ones of the tensors seen before.

    Args:
        module: any module.
        paths: names of modules, by their ids.
        places: numbers of tensors, by their ids, to which those of the module are added.
        without: settings that the text leaves out.
    """
    state = vars(module)
    seen: dict[str, Any] = {name: list(state[name].values()) for name in HOOKS if state[name]}
    seen |= {name: state[name] for name in CONTAINERS if name not in HOOKS and state[name]}
    seen |= {name: value for name, value in state.items() if is_setting(name) and name not in without}
    ties = [places.setdefault(id(tensor), len(places)) for tensor in tensors_in(module).values()]
    return f"{_serial(type(module))}:{_described(seen, paths)}:{ties}"


def is_setting(name: str) -> bool:
    """Return whether an attribute belongs to a kind of module, not to all modules or to this package."""
    return name == "training" or (name not in _OF_ALL_MODULES and not name.startswith(OWN))


def named(value: Any) -> str:
    """Return a string that two values without modules share if guards do not tell them apart."""
    return hashlib.sha256(_described(value, {}).encode()).hexdigest()


def _described(value: Any, paths: dict[int, str]) -> str:
    """Return a string that is equal for values that guards do not tell apart; `paths` names modules by their ids.

    What it cannot describe is guarded.
    """
    if isinstance(value, SCALARS):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, Tensor):
        layout = f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.device}"
        return f"{_serial(type(value))} {layout} {value.requires_grad} {value.is_inference()}"
    if isinstance(value, nn.Module) or id(value) in paths:
        return f"part {paths.get(id(value), '')}"
    if isinstance(value, dict):
        parts = (f"{key!r}:{_described(item, paths)}" for key, item in value.items())
        return f"{{{','.join(parts)}}}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}[{','.join(_described(item, paths) for item in value)}]"
    if _is_frozen(value):
        held = {item.name: getattr(value, item.name) for item in fields(value)}
        return f"{_serial(type(value))}{_described(held, paths)}"
    return f"call {_serial(value)}" if callable(value) else f"object {_serial(type(value))}"


def _is_frozen(value: Any) -> bool:
    params: Any = getattr(type(value), "__dataclass_params__", None)
    return bool(params is not None and params.frozen)


def _is_described(value: Any) -> bool:
    """Return whether `_described` has all of a value that no graph can write."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_described, value))
    if _is_frozen(value):
        return all(_is_described(getattr(value, field.name)) for field in fields(value))
    return isinstance(value, (*SCALARS, nn.Module))


def _serial(value: Any) -> int:
    """Return a number of a class or a function that nothing else ever has."""
    try:
        return _serials.setdefault(value, next(_count))
    except TypeError:  # no weak reference, or no hash
        return next(_count)


class _Root:
    """A decoder stack whose state a graph guards, under one name in the traced frame."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.own = {id(module) for module in own_modules(model).values()}
        self.tensors = {id(tensor) for tensor in getattr(model, TENSORS).values()}
        self.kept: set[tuple[Any, ...]] = set()

    def covers(self, steps: list[str], guard: str) -> bool:
        """Return whether what a guard checks at the end of `steps` is compared without it."""
        module, rest = self._find(steps)
        if rest[:1] in ([TENSORS], [REPEATS]) and module is self.model:
            return True
        if module is self.model:
            return False
        if not rest:
            return guard in _OF_MODULE
        name, *deeper = rest
        if name in CONTAINERS or name.endswith(("hooks", "with_kwargs", "always_called")):
            return not deeper or name in ("_parameters", "_buffers")
        value = {**module._buffers, **module._parameters, **vars(module)}.get(name, self)
        if value is self:
            return not hasattr(type(module), name) or self._is_second((type(module), guard, *rest))
        if isinstance(value, Tensor):
            return id(value) in self.tensors
        if not is_setting(name):
            return False
        if id(module) in self.own:
            return _is_described(value)
        if deeper or not (isinstance(value, SCALARS) or value is self.model.config):
            return False
        watched.add(name)
        return True

    def _is_second(self, key: tuple[Any, ...]) -> bool:
        """Return whether a guard of a class attribute was kept for an earlier module of that class."""
        known = key in self.kept
        self.kept.add(key)
        return known

    def _find(self, steps: list[str]) -> tuple[nn.Module, list[str]]:
        """Return the last module on the way, and the steps after it."""
        module: nn.Module = self.model
        while steps:
            used = 2 if steps[0] == "_modules" and len(steps) > 1 else 1
            value = module._modules.get(steps[1]) if used == 2 else vars(module).get(steps[0])
            if not isinstance(value, nn.Module):
                break
            module, steps = value, steps[used:]
        return module, steps


def is_needed(entries: Sequence[Any]) -> list[bool]:
    """Return which guards of a traced frame stay: a `guard_filter_fn` of torch.compile.

    Args:
        entries: guards, with the name, value and type of the object that each checks.

    It drops guards below a decoder stack or a cache whose state the same frame guards, and in such a frame those of
    builtins and of this package's functions, classes and modules.
    """
    names = {entry.name for entry in entries}
    held = {e.name: e.value for e in entries if e.has_value and f"{e.name}.{STATE}" in names}
    roots = {name: _Root(value) for name, value in held.items() if isinstance(value, nn.Module)}
    caches = [name for name in held if name not in roots]

    def covers(name: str, guard: str) -> bool:
        if any(root.covers(steps, guard) for path, root in roots.items() if (steps := _steps_after(path, name))):
            return True
        return any(steps[0] in _OF_CACHE for cache in caches if (steps := _steps_after(cache, name)))

    return [not (covers(entry.name, entry.guard_type) or (held and _is_constant(entry))) for entry in entries]


def _is_constant(entry: Any) -> bool:
    """Return whether a guard is of an object that no caller replaces: builtins, this package's functions, constants."""
    by_identity = entry.guard_type in _IDENTITIES and entry.name.startswith(_CONSTANT)
    return by_identity or _OWN_CONSTANT.fullmatch(entry.name) is not None


def _steps_after(root: str, name: str) -> list[str]:
    """Return the attributes, keys and indices that lead from `root` to `name`, or to the instance whose type it names.

    Empty if nothing does.
    """
    of_type = _TYPE.fullmatch(name)
    inner = of_type[1] if of_type else name
    rest = inner.removeprefix(root)
    steps = list(_STEP.finditer(rest))
    if rest == inner or "".join(step[0] for step in steps) != rest:
        return []
    return [next(filter(None, step.groups())) for step in steps]


def compile_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return keywords of torch.compile that drop redundant guards, and those that the caller's filter drops.

    From torch 2.13 on they allow `MOST_KINDS` graphs, because the usual kinds of calls alone reach torch's limit of 8.
    torch.compile takes a mode or options, so a mode becomes the options that it stands for. With backends other than
    this package's and Inductor, modes and all guards stay.
    """
    if _LIMIT in inspect.signature(torch.compile).parameters:
        arguments = {_LIMIT: MOST_KINDS, **arguments}
    mode, options = arguments.get("mode"), dict(arguments.get("options") or {})
    if mode not in (None, "default"):
        if options or arguments.get("backend", "inductor") not in ("inductor", OWN):
            return arguments
        options = mode_settings(mode)
    is_kept: Callable[[Sequence[Any]], Sequence[bool]] | None = options.get(_FILTER)

    def both(entries: Sequence[Any]) -> list[bool]:
        needed = is_needed(entries)
        return needed if is_kept is None else [a and b for a, b in zip(needed, is_kept(entries), strict=True)]

    return {**arguments, "mode": None, "options": {**options, _FILTER: both}}


def drop_guards(compiler: Any) -> None:
    """Let the compiler that is active in a thread drop redundant guards, unless its caller has a filter."""
    hooks = getattr(compiler, "hooks", None)
    if hooks is not None and getattr(hooks, _FILTER, hooks) is None:
        setattr(hooks, _FILTER, is_needed)
